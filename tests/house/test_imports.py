"""Who may import whom: the rules of the house, as data, checked on every module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from loops import for_each

SOURCE = Path(__file__).parents[2] / "src" / "thinwire"

# What a room imports of thinwire, itself aside, at run time, inside functions and for type checkers. Rooms stand above
# those that they import, so there is no circle. A room inside of another has its own row.
ROOMS = {
    "errors": set(),
    "observe": set(),
    "kernels": {"observe"},
    "rows": {"errors", "observe", "kernels"},
    "comm": {"errors", "observe", "kernels", "rows"},
    "sums": {"errors", "observe", "kernels", "rows", "comm"},
    "schemes": {"rows", "sums"},
    "compress": {"errors", "observe", "kernels", "rows"},
    "plan": {"errors", "observe", "compress"},
    "fuse": {"plan"},
    "deltas": {"errors", "kernels"},
    "tune": {"kernels", "rows", "comm", "sums"},
    "gradients": {"errors", "observe", "kernels", "rows", "comm", "sums", "compress", "plan", "tune"},
    "all_reduce": {"rows", "comm", "sums", "tune"},
    "backend": {"errors", "kernels", "rows", "comm", "sums", "tune", "all_reduce"},
    "outer": {"errors", "observe", "rows", "comm", "sums", "compress", "gradients"},
    "attach": {"comm", "sums", "compress", "plan", "gradients"},
    "reproducible": {"errors", "rows", "comm", "sums", "outer"},
    "checkpoint.holder": {"errors"},
    "checkpoint.elastic": {"errors", "checkpoint.holder"},
    "checkpoint": {"errors", "rows", "comm", "checkpoint.holder", "checkpoint.elastic"},
    "integrations": {"errors", "comm", "gradients", "outer", "attach", "checkpoint"},
    "lab": {
        "errors", "observe", "kernels", "rows", "comm", "sums", "schemes", "compress", "plan", "fuse", "tune",
        "gradients", "outer", "attach", "backend", "reproducible", "checkpoint.holder", "checkpoint", "__init__",
        "__version__",
    },
    "__main__": {"lab"},
}  # fmt: skip
INNER = {"checkpoint.holder", "checkpoint.elastic"}

# Packages that only some rooms import at all; and those that even they import inside functions, on first use.
OWNERS = {
    "numba": {"kernels"},
    "triton": {"kernels"},
    "matplotlib": {"lab"},
    "pyroute2": {"lab"},
    "typer": {"lab"},
    "rich": {"lab"},
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
    "errors", "observe", "kernels", "rows", "schemes", "compress", "plan", "fuse", "checkpoint.holder",
}  # fmt: skip

# A room that imports nothing but the standard library, and of thinwire what is said above.
STANDARD_LIBRARY_ONLY = {"errors", "checkpoint.holder"}


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
        elif isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):  # what is no expression: that has none
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports(node, lazy or inside, typing)


def room_of(module: str) -> str | None:
    """``thinwire.sums.cost`` is in the room sums, and the package itself in ``__init__``; None for what is not its."""
    package, *parts = module.split(".")
    if package != "thinwire":
        return None
    inner = ".".join(parts[:2])
    return inner if inner in INNER else (parts or ["__init__"])[0]


def violations(source: str, room: str) -> list[str]:
    found = []
    for item in imports(ast.parse(source)):
        target, package = room_of(item.module), item.module.split(".")[0]
        if package == "thinwire" and target not in {room, *ROOMS[room]}:
            found.append(f"line {item.line}: {room} does not import {item.module}")
        if item.typing:  # what others own is not there at run time
            continue
        if package in OWNERS and room.split(".")[0] not in OWNERS[package]:
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


@for_each(modules())
def test_a_module_keeps_to_its_room(path: Path) -> None:
    assert violations(path.read_text(), str(_room_of(path))) == []


def _room_of(path: Path) -> str | None:
    return room_of(".".join(("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)))


def test_rooms_stand_above_those_that_they_import() -> None:
    below = {"__init__", "__version__"}
    for room, imported in ROOMS.items():
        assert imported <= below, f"{room} imports {sorted(imported - below)}"
        below.add(room)


def test_every_room_has_its_rule() -> None:
    """A room that was renamed must not lose its rules."""
    assert {_room_of(path) for path in modules()} == set(ROOMS)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from thinwire.rows.sparse import SparseRows"),
        ("kernels", "from thinwire import rows"),
        ("sums", "def f():\n    import thinwire.attach"),
        ("sums", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from thinwire.tune.prices import Price"),
        ("sums", "import thinwire"),
        ("sums", "from thinwire.compress import top_k"),
        ("compress", "from thinwire.sums.scheme import Scheme"),
        ("comm", "from thinwire.sums.scheme import Scheme"),
        ("observe", "from torch import distributed"),
        ("observe", "import torch.distributed as dist"),
        ("observe", "import matplotlib.pyplot"),
        ("attach", "try:\n    from thinwire.lab.testbed.launch import run_ranks\nexcept ImportError:\n    pass"),
        ("plan", "from thinwire.lab.testbed import network"),
        ("plan", "import torch.distributed as dist"),
        ("plan", "from thinwire.comm.lane import Lane"),
        ("gradients", "from thinwire.checkpoint import Checkpointer"),
        ("checkpoint.holder", "import torch"),
        ("checkpoint.holder", "from thinwire.checkpoint.cycle import Cycle"),
        ("checkpoint.holder", "from thinwire.checkpoint.elastic.board import Board"),
        ("kernels", "import numba"),
        ("sums", "def f():\n    import numba"),
        ("lab", "from pyroute2 import IPRoute"),
        ("attach", "import rich.table"),
        ("rows", "import pickle"),
        ("checkpoint", "import pickle"),
        ("checkpoint", "from thinwire.compress import top_k"),
    ],
)
def test_a_breach_is_seen(room: str, source: str) -> None:
    assert violations(source, room)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "def f():\n    import numba"),
        ("lab", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("rows", "from thinwire import kernels"),
        ("lab", "import typer\nfrom thinwire.lab.testbed.launch import run_ranks"),
        ("sums", "from thinwire.sums.cost import Pricing"),
        ("gradients", "import torch.distributed as dist\nfrom thinwire.comm.lane import Lane"),
        ("plan", "from thinwire.plan.profile import Profile"),
        ("checkpoint.holder", "import socket\nfrom thinwire.errors import ThinwireError"),
    ],
)
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


@pytest.mark.slow
def test_attaching_loads_no_optional_package() -> None:
    """Beyond what torch loads by itself."""
    before = loaded("import torch, torch.distributed")
    after = loaded("import torch, torch.distributed, thinwire; thinwire.attach")
    assert "thinwire.attach" in after - before
    assert not (after - before) & set(OWNERS)


@pytest.mark.slow
def test_every_public_name_is_there() -> None:
    """Also after importing a module that has the name of a function."""
    code = "from importlib import import_module; import_module('thinwire.attach'); import thinwire; "
    code += (
        "assert all(getattr(thinwire, name) is not None for name in thinwire.__all__); assert callable(thinwire.attach)"
    )
    assert "thinwire.attach" in loaded(code)


def test_the_holder_runs_without_torch() -> None:
    found = loaded(
        "import thinwire.checkpoint.holder.daemon, thinwire.checkpoint.holder.server, thinwire.checkpoint.holder.start"
    )
    assert not {"torch", "numpy"} & found


# Names of torch that are not public are read in these files, which other rooms ask; see the tables in them.
OF_TORCH = {"comm/c10d.py", "gradients/torch_internals.py"}
# What remains elsewhere, and why a torch without it hurts nobody.
ELSEWHERE = {
    "errors.py": {"_in_exchange", "_ranks_told"},  # its own, on exceptions of others
    "observe/step.py": {
        "_ExperimentalConfig",
        "_call_end_callbacks_on_future",
        "_is_profiler_enabled",
    },  # no ranges then
    "gradients/ddp.py": {
        "_dynamo",  # in a message
        "_nnz",  # in torch's manual of sparse tensors
    },
    "gradients/parameters.py": {"_nnz"},
    "outer/loop.py": {"_nnz"},
    "gradients/module.py": {
        "_forward_pre_hooks",  # of every module
        "_dmp_wrapped_module",  # TorchRec's
        "_composable",  # asked of sys.modules
        "_set_params_and_buffers_to_ignore_for_model",  # in a message
    },
    "gradients/passes.py": {"_forward_pre_hooks", "_modules"},  # of every module
    "kernels/jit.py": {"_cache", "_rebuild"},  # numba's
}
STANDARD = {"_asdict", "_exit", "_getframe", "_replace"}


DEFINES = re.compile(
    r"(?:def |class |self\.|^ *)(_[a-z]\w*)(?=\(|\b.*=)|^ +(_[a-z]\w*): |\bas (_[a-z]\w*)", re.M | re.I
)
READS = re.compile(r"(?<=\.)_[a-z]\w*|(?<=\")_[a-z]\w*(?=\")", re.I)
IMPORTS = re.compile(r"^ *from (?!thinwire)[\w.]+ import .*", re.M)


def test_private_names_of_torch_stand_in_two_files() -> None:
    """Those of the frameworks in `integrations`, and of what the laboratory measures, are theirs."""
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in modules()}
    own = {name for text in texts.values() for names in DEFINES.findall(text) for name in names} | STANDARD
    found = {}
    for path, text in texts.items():
        imported = " ".join(IMPORTS.findall(text))
        names = {*READS.findall(text), *re.findall(r"(?<=[ ,])_[a-z]\w*", imported, re.I)} - own
        if names and path.split("/")[0] not in {"lab", "integrations"}:
            found[path] = names
    assert {path: names for path, names in found.items() if path not in OF_TORCH} == ELSEWHERE
    assert found.keys() >= OF_TORCH
