"""The functions that numba has compiled, for tests that look at all of them."""

from __future__ import annotations

import sys
from typing import Any


def compiled_functions() -> dict[str, Any]:
    """Those that a module of kernels defines, if it is imported, by module and name; `warm_up` imports them all."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("thinwire.kernels.")}
    return {
        f"{name}.{attribute}": function
        for name, module in modules.items()
        for attribute, function in vars(module).items()
        if hasattr(function, "signatures") and function.__module__ == name
    }
