"""What numba has compiled: the functions, for tests that look at all of them, and where their machine code is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from thinwire.kernels.jit import code_directory


def compiled_functions() -> dict[str, Any]:
    """Those that a module of kernels defines, if it is imported, by module and name; `warm_up` imports them all."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("thinwire.kernels.")}
    return {
        f"{name}.{attribute}": function
        for name, module in modules.items()
        for attribute, function in vars(module).items()
        if hasattr(function, "signatures") and function.__module__ == name
    }


def own_cache(folder: Path) -> str:
    """Make a cache in a folder, and return its path for XDG_CACHE_HOME: it has the compiled kernels, and nothing else.

    In an empty one each process would compile them again: 46 s of processor for a command that takes 14.
    """
    place = folder / "cache" / "thinwire"
    place.mkdir(parents=True)
    if kernels := code_directory():
        (place / "kernels").symlink_to(kernels.parent)
    return str(place.parent)
