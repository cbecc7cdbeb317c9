"""Who may import whom: the rules of the house, as data, checked on every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "thinwire"

# What a room imports of thinwire, itself aside. Rooms stand above those that they import, so there is no circle.
ROOMS = {
    "errors": set(),
    "observe": {"errors"},
    "kernels": {"errors", "observe"},
    "codes": {"errors", "kernels", "observe"},
    "sparse": {"kernels", "observe"},
    "wire": {"errors", "kernels", "observe", "codes"},
    "partition": {"kernels", "wire"},
    "comm": {"errors", "kernels", "observe", "codes", "sparse", "wire", "partition"},
    "lossless": {"errors", "kernels", "observe", "codes", "wire", "partition", "comm"},
    "cuda": {"errors", "comm"},
    "sync": {"errors", "kernels", "codes", "sparse", "wire", "partition", "comm"},
    "schemes": {"sync", "wire"},
    "compress": {"errors", "kernels", "observe", "codes", "sparse", "wire"},
    "fuse": {"errors", "observe"},
    "plan": {"errors", "compress", "fuse"},
    "gradients": {
        "errors", "observe", "kernels", "codes", "sparse", "wire", "comm", "lossless", "cuda", "sync", "compress",
        "fuse", "plan",
    },
    "follow": {
        "errors", "observe", "kernels", "codes", "wire", "comm", "lossless", "sync", "compress", "fuse", "plan",
        "gradients",
    },
    "all_reduce": {"sparse", "comm", "sync"},
    "synchronizer": {
        "errors", "observe", "kernels", "sparse", "comm", "lossless", "cuda", "sync", "compress", "gradients", "follow",
    },
    "outer": {"errors", "observe", "wire", "comm", "cuda", "sync", "compress", "gradients", "follow", "synchronizer"},
    "attach": {
        "errors", "sparse", "comm", "lossless", "sync", "compress", "fuse", "plan", "gradients", "follow",
        "synchronizer", "outer",
    },
    "holder": {"errors"},
    "elastic": {"errors", "holder"},
    "checkpoint": {"errors", "codes", "comm", "cuda", "holder"},
    "integrations": {"errors", "comm", "gradients", "synchronizer", "outer", "attach", "checkpoint"},
    "lab": {
        "errors", "observe", "kernels", "codes", "sparse", "wire", "partition", "comm", "lossless", "cuda", "sync",
        "schemes", "compress",
        "fuse", "plan", "gradients", "follow", "all_reduce", "synchronizer", "outer", "attach", "holder",
        "checkpoint", "__init__", "__version__",
    },
    "cli": {"errors", "compress", "fuse", "plan", "outer", "holder", "checkpoint", "lab", "__init__", "__version__"},
    "__main__": {"cli"},
}  # fmt: skip

# Packages that only some rooms import at all; and those that even they import inside functions, on first use.
OWNERS = {
    "numba": {"kernels"},
    "triton": {"kernels"},
    "matplotlib": {"lab"},
    "pyroute2": {"lab"},
    "typer": {"cli", "lab"},
    "rich": {"cli", "lab"},
    "sklearn": {"lab"},
    "accelerate": {"integrations"},
    "deepspeed": {"integrations"},
    "lightning": {"integrations"},
    "pytorch_lightning": {"integrations"},
    "ray": {"integrations"},
    "torchrec": {"integrations"},
    "transformers": {"integrations"},
    "pickle": {"lab"},  # between a parent and its own child; never on what crosses a network
}  # fmt: skip
LAZY = {"numba", "triton", "matplotlib", "pyroute2", "sklearn"}

# Rooms that see types and costs, never process groups.
WITHOUT_PROCESS_GROUPS = {
    "errors", "observe", "kernels", "codes", "sparse", "wire", "partition", "schemes", "compress", "fuse", "plan",
    "holder",
}  # fmt: skip

# A room that imports nothing but the standard library, and of thinwire what is said above.
STANDARD_LIBRARY_ONLY = {"errors", "holder"}


@dataclass(frozen=True)
class Import:
    """``lazy``: inside a function. ``typing``: under TYPE_CHECKING, so never at run time."""

    module: str
    line: int
    lazy: bool
    typing: bool


def imports(tree: ast.AST, lazy: bool = False, typing: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write it out"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, lazy, typing)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.body, []), lazy, typing=True)
            yield from imports(ast.Module(node.orelse, []), lazy, typing)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, lazy or inside, typing)


def room_of(module: str) -> str | None:
    """``thinwire.sync.cost`` is in the room sync, and the package itself in ``__init__``; None for what is not its."""
    parts = [*module.split("."), "__init__"]
    return parts[1] if parts[0] == "thinwire" else None


def violations(source: str, room: str) -> list[str]:
    """What is only for type checkers needs no room below: it is not there at run time."""
    found = []
    for item in imports(ast.parse(source)):
        target, package = room_of(item.module), item.module.split(".")[0]
        if item.typing:
            continue
        if package == "thinwire" and target not in {room, *ROOMS[room]}:
            found.append(f"line {item.line}: {room} does not import {item.module}")
        if package in OWNERS and room not in OWNERS[package]:
            found.append(f"line {item.line}: only {sorted(OWNERS[package])} import {package}")
        if package in LAZY and not item.lazy:
            found.append(f"line {item.line}: {package} is imported inside functions, on first use")
        if room in WITHOUT_PROCESS_GROUPS and item.module.startswith("torch.distributed"):
            found.append(f"line {item.line}: {room} knows no process groups")
        if room in STANDARD_LIBRARY_ONLY and package not in {"thinwire", *sys.stdlib_module_names}:
            found.append(f"line {item.line}: {room} imports the standard library only")
    return found


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_keeps_to_its_room(path: Path) -> None:
    assert violations(path.read_text(), path.relative_to(SOURCE).with_suffix("").parts[0]) == []


def test_rooms_stand_above_those_that_they_import() -> None:
    below = {"__init__", "__version__"}
    for room, imported in ROOMS.items():
        assert imported <= below, f"{room} imports {sorted(imported - below)}"
        below.add(room)


def test_every_room_has_its_rule() -> None:
    """A room that was renamed must not lose its rules."""
    assert {path.relative_to(SOURCE).with_suffix("").parts[0] for path in modules()} == set(ROOMS)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from thinwire.sparse import SparseRows"),
        ("wire", "from thinwire import sparse"),
        ("sync", "def f():\n    import thinwire.attach"),
        ("sync", "import thinwire"),
        ("sync", "from thinwire.compress import top_k"),
        ("compress", "from thinwire.sync.scheme import Scheme"),
        ("comm", "from thinwire.sync.scheme import Scheme"),
        ("observe", "from torch import distributed"),
        ("observe", "import torch.distributed as dist"),
        ("observe", "import matplotlib.pyplot"),
        ("attach", "try:\n    from thinwire.lab.testbed.launch import run_ranks\nexcept ImportError:\n    pass"),
        ("plan", "from thinwire.lab.testbed import network"),
        ("plan", "import torch.distributed as dist"),
        ("plan", "from thinwire.lab.planning.link import measure_link"),
        ("fuse", "from thinwire.plan.plan import Plan"),
        ("fuse", "from thinwire.comm.lane import Lane"),
        ("holder", "import torch"),
        ("holder", "from thinwire.checkpoint.cycle import Cycle"),
        ("kernels", "import numba"),
        ("sync", "def f():\n    import numba"),
        ("lab", "from pyroute2 import IPRoute"),
        ("attach", "import rich.table"),
        ("wire", "import pickle"),
        ("checkpoint", "import pickle"),
        ("checkpoint", "from thinwire.compress import top_k"),
    ],
)  # fmt: skip
def test_a_breach_is_seen(room: str, source: str) -> None:
    assert violations(source, room)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "def f():\n    import numba"),
        ("lab", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("wire", "from thinwire import kernels"),
        ("cli", "import typer\nfrom thinwire.lab.testbed.launch import run_ranks"),
        ("sync", "from thinwire.sync.cost import Pricing"),
        ("gradients", "import torch.distributed as dist\nfrom thinwire.comm.lane import Lane"),
        ("plan", "from thinwire.fuse.profile import Profile"),
        ("holder", "import socket\nfrom thinwire.errors import ThinwireError"),
    ],
)  # fmt: skip
def test_what_is_allowed_is_allowed(room: str, source: str) -> None:
    assert violations(source, room) == []


def loaded(code: str) -> set[str]:
    """The modules that a process has loaded after running a line."""
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); {code}; print(sorted(sys.modules))",
    ]
    return set(ast.literal_eval(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout))


def test_importing_thinwire_loads_nothing_else() -> None:
    """Not even torch, which the holder does without."""
    found = loaded("import thinwire")
    assert {name for name in found if name.startswith("thinwire")} == {"thinwire"}
    assert "torch" not in found


def test_integrations_load_no_framework() -> None:
    found = loaded("import thinwire; thinwire.integrations")
    assert {name for name in found if name.startswith("thinwire.")} == {"thinwire.integrations"}
    assert not found & {"torch", "accelerate", "lightning", "ray", "transformers"}


def test_attaching_loads_no_optional_package() -> None:
    """Beyond what torch loads by itself."""
    before = loaded("import torch, torch.distributed")
    after = loaded("import torch, torch.distributed, thinwire; thinwire.attach")
    assert "thinwire.attach" in after - before
    assert not (after - before) & set(OWNERS)


def test_every_public_name_is_there() -> None:
    """Also after importing a module that has the name of a function."""
    code = "from importlib import import_module; import_module('thinwire.attach'); import thinwire; "
    code += (
        "assert all(getattr(thinwire, name) is not None for name in thinwire.__all__); assert callable(thinwire.attach)"
    )
    assert "thinwire.attach" in loaded(code)


def test_the_holder_runs_without_torch() -> None:
    found = loaded("import thinwire.holder.daemon, thinwire.holder.server, thinwire.holder.start")
    assert not {"torch", "numpy"} & found
