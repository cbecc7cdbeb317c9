"""Commands of thinwire as functions and as programs."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

from thinwire.lab.cli import bench, main
from thinwire.lab.cli.commands import load

GROUPS = {"thinwire": main._Commands, "thinwire bench": bench._Benchmarks}


def all_commands() -> dict[str, Any]:
    """Every command by its name, with `thinwire plan show` and the like."""
    listed = {f"{group} {name}": kind.prefix + name for group, kind in GROUPS.items() for name in kind.lazy}
    found = {name: load(module, name) for name, module in listed.items() if name != "thinwire bench"}
    inner = {name: getattr(command, "commands", {}) for name, command in found.items()}
    return found | {f"{name} {sub}": command for name, group in inner.items() for sub, command in group.items()}


HEAVY = ("torch", "numpy", "matplotlib", "numba", "pyroute2", "sklearn", "asyncio", "multiprocessing")
"""Modules that no help needs: with none of them it is there in 0.2 s, with torch alone in 1.7 s."""


def imported_by(*lines: str) -> list[str]:
    """The modules of `HEAVY` that lines of Python import in a process of their own."""
    last = f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    code = "\n".join(("import sys", *lines, last))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(ran.stderr.splitlines()[-1])
