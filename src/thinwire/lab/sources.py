"""Files and modules of users, looked at without running them, so that a typing error costs no start of ranks."""

import ast
import importlib.util
import os
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a source file.

    Raises:
        ValueError: it is no Python.
    """
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}" if error.lineno else str(path)
        raise ValueError(f"{where}: {error.msg}") from error


def top_level(module: str, target: str) -> ModuleSpec:
    """Return the top-level package of a module, in the working directory or ``sys.path``; nothing is imported.

    Args:
        target: what the user wrote, for the error.

    Raises:
        ValueError: there is none.
    """
    top = module.partition(".")[0]
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    if spec is None:
        raise ValueError(f"cannot import {target}: No module named {top!r}; run from the directory that holds it")
    return spec
