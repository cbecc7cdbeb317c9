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


def spec_of(module: str, target: str) -> ModuleSpec | None:
    """Return where a module is, in the working directory or ``sys.path``; nothing is imported.

    Args:
        target: what the user wrote, for the error.

    Returns:
        None for a module that only its parent knows, such as ``os.path``.

    Raises:
        ValueError: there is none.
    """
    name, *inner = module.split(".")
    spec = PathFinder.find_spec(name, [os.getcwd()]) or importlib.util.find_spec(name)
    while spec is not None and inner:
        if spec.submodule_search_locations is None:
            return None
        name = f"{name}.{inner.pop(0)}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    if spec is None:
        raise ValueError(f"cannot import {target}: No module named {name!r}; run from the directory that holds it")
    return spec
