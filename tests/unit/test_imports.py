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

# These rooms import of thinwire only what is listed (and themselves).
FOUNDATION = {
    "errors": set(),
    "ranges": set(),
    "kernels": {"ranges"},
    "sparse": {"kernels", "ranges"},
    "wire": {"kernels", "errors", "ranges"},
    "sync": {"kernels", "errors", "sparse", "wire", "ranges"},
    "schemes": {"sync", "wire"},
    "cuda": {"sync"},
    "lane": {"errors", "sync"},
    "all_reduce": {"sparse", "sync", "lane"},
    "compress": {"errors", "kernels", "sparse", "wire", "ranges"},
    "fuse": {"plan"},
    "plan": {"errors", "kernels", "sync", "compress", "fuse", "lane", "hooks", "observe", "attach"},
    "hooks": {
        "errors", "kernels", "sparse", "wire", "sync", "compress", "lane", "observe", "ranges", "cuda", "plan",
        "fuse",
    },
    "synchronizer": {"kernels", "sync", "compress", "lane", "hooks", "observe", "cuda"},
    "attach": {"sparse", "sync", "compress", "lane", "hooks", "cuda", "synchronizer", "plan", "fuse"},
    "observe": {"sparse", "sync", "wire", "errors"},
    "testbed": {"errors"},
    "checkpoint": {"errors", "lane", "cuda", "sync"},
}  # fmt: skip

# Of another room, the first one imports only these modules.
ONLY_MODULES = {("fuse", "plan"): {"profile", "timeline"}}

# Whoever exists, only these rooms import the named one.
IMPORTED_ONLY_BY = {
    "testbed": {"testbed", "cli", "demo", "bench"},
    "bench": {"bench", "cli", "analyze"},
    "demo": {"demo", "cli", "analyze", "bench"},
    "analyze": {"analyze", "cli"},
    "cli": {"cli", "__main__"},
}  # fmt: skip

# Packages that only some rooms import at all; and those that even they import inside functions, on first use.
OWNERS = {
    "numba": {"kernels"},
    "triton": {"kernels"},
    "matplotlib": {"observe", "demo"},
    "pyroute2": {"testbed"},
    "typer": {"cli", "demo"},
    "rich": {"cli", "demo"},
    "sklearn": {"bench"},
    "pickle": {"testbed"},  # between a parent and its own child; never on what crosses a network
}  # fmt: skip
LAZY = {"numba", "triton", "matplotlib", "pyroute2", "sklearn"}

# Rooms that see types and costs, never process groups.
WITHOUT_PROCESS_GROUPS = {"errors", "kernels", "sparse", "wire", "observe", "schemes", "compress", "fuse", "plan"}

# But for these modules, which measure; and only they import what runs on process groups.
MEASURING = {"plan": {"measure", "link", "curves", "ready", "calibrate"}}
RUNS_ON_PROCESS_GROUPS = {"lane", "hooks", "attach"}


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
    """``thinwire.sync.cost`` is in the room sync; None for what is not thinwire's, or its top."""
    parts = module.split(".")
    return parts[1] if parts[0] == "thinwire" and len(parts) > 1 else None


def violations(source: str, module: str) -> list[str]:
    """``module``: a room, or a module of it, as ``plan.link``."""
    room, _, inside = module.partition(".")
    measures = inside in MEASURING.get(room, ())
    found = []
    for item in imports(ast.parse(source)):
        target, package = room_of(item.module), item.module.split(".")[0]
        if package == "thinwire" and room in FOUNDATION and target != room and target not in FOUNDATION[room]:
            found.append(f"line {item.line}: {room} does not import {item.module}")
        if (room, target) in ONLY_MODULES and item.module.split(".")[2] not in ONLY_MODULES[room, target]:
            found.append(f"line {item.line}: {room} imports of {target} only {sorted(ONLY_MODULES[room, target])}")
        if room in MEASURING and not measures and target in RUNS_ON_PROCESS_GROUPS:
            found.append(f"line {item.line}: only {sorted(MEASURING[room])} of {room} import {target}")
        if target in IMPORTED_ONLY_BY and room not in IMPORTED_ONLY_BY[target]:
            found.append(f"line {item.line}: only {sorted(IMPORTED_ONLY_BY[target])} import {target}")
        if item.typing:
            continue
        if package in OWNERS and room not in OWNERS[package]:
            found.append(f"line {item.line}: only {sorted(OWNERS[package])} import {package}")
        if package in LAZY and not item.lazy:
            found.append(f"line {item.line}: {package} is imported inside functions, on first use")
        if room in WITHOUT_PROCESS_GROUPS and not measures and item.module.startswith("torch.distributed"):
            found.append(f"line {item.line}: {room} knows no process groups")
    return found


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_keeps_to_its_room(path: Path) -> None:
    assert violations(path.read_text(), ".".join(path.relative_to(SOURCE).with_suffix("").parts)) == []


def test_every_rule_is_about_a_room_that_is_there() -> None:
    """A room that was renamed must not lose its rules."""
    rooms = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in modules()}
    assert set(FOUNDATION) | set(IMPORTED_ONLY_BY) | WITHOUT_PROCESS_GROUPS <= rooms
    assert set().union(*FOUNDATION.values()) <= rooms
    for room, names in [*MEASURING.items(), *((room, names) for (_, room), names in ONLY_MODULES.items())]:
        assert names <= {path.stem for path in (SOURCE / room).glob("*.py")}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from thinwire.sparse import SparseRows"),
        ("wire", "from thinwire import sparse"),
        ("sync", "def f():\n    import thinwire.attach"),
        ("sync", "import thinwire"),
        ("observe", "from torch import distributed"),
        ("observe", "import torch.distributed as dist"),
        ("observe", "import matplotlib.pyplot"),
        ("attach", "try:\n    from thinwire.testbed.launch import run_ranks\nexcept ImportError:\n    pass"),
        ("plan", "from thinwire.testbed import network"),
        ("plan.planner", "import torch.distributed as dist"),
        ("plan.timeline", "from thinwire.lane import Lane"),
        ("fuse.cupcake", "from thinwire.plan.planner import best_plan"),
        ("fuse.cupcake", "from thinwire.plan import Profile"),
        ("fuse.named", "from thinwire.compress.named import split"),
        ("kernels", "import numba"),
        ("sync", "def f():\n    import numba"),
        ("testbed", "from pyroute2 import IPRoute"),
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
        ("observe", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("wire", "from thinwire import kernels"),
        ("cli", "import typer\nfrom thinwire.testbed.launch import run_ranks"),
        ("sync", "from thinwire.sync.cost import sent_bytes"),
        ("plan.link", "import torch.distributed as dist\nfrom thinwire.lane import Lane"),
        ("fuse.cupcake", "from thinwire.plan.profile import Profile"),
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
