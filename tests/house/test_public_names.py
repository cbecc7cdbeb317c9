"""What a package offers is what `dir` lists, and no name that is not there."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire import compress, errors, fuse, schemes
from thinwire.compress.named import NAMES, construct
from thinwire.lab.bench.design_space import points
from thinwire.plan import Group, Plan
from thinwire.plan.plan import fingerprint
from thinwire.plan.policy import POLICIES

PACKAGES = ("thinwire", "thinwire.plan", "thinwire.checkpoint")
SETTINGS = {
    name: {"value": 1e-3} if name == "threshold" else {"density": 0.01}
    for name in NAMES
    if {"density", "value"} & {*inspect.signature(getattr(compress, name)).parameters}
}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_lists_all_public_names_and_each_is_there(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    assert not {"Any", "TYPE_CHECKING", "import_module", "sys"} & set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = package.nonsense


def test_the_package_is_shipped_by_its_name() -> None:
    """As Ray does with what a training function uses."""
    assert pickle.loads(pickle.dumps(thinwire)) is thinwire


def test_values_that_are_public_can_be_pickled() -> None:
    for value in (thinwire.schemes.ZEN, thinwire.compress.top_k(0.01), thinwire.compress.power_sgd(4)):
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.slow
def test_every_exception_of_the_library_is_public() -> None:
    """Those that only a command meets, or the holder, are theirs."""
    found = set()
    for info in pkgutil.walk_packages(thinwire.__path__, "thinwire."):
        if not info.name.startswith(("thinwire.lab", "thinwire.checkpoint.holder", "thinwire.__main__")):
            for value in vars(_imported(info.name)).values():
                if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == info.name:
                    found.add(value)
    assert {error.__module__ for error in found} == {"thinwire.errors"}
    assert {error.__name__ for error in found} == set(errors.__all__)
    assert all(issubclass(error, errors.ThinwireError) and error.__doc__ for error in found)
    assert all(f" {name}" in errors.__doc__ for name in errors.__all__), "the hierarchy"
    assert thinwire.LostPeerError is thinwire.errors.LostPeerError


def _imported(name: str) -> object:
    try:
        with warnings.catch_warnings():  # of frameworks
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:  # a kernel of a GPU, or a framework that is not here
        return object.__new__(type("Nothing", (), {}))


def test_a_scheme_is_shown_as_the_text_that_makes_it() -> None:
    for name in ("ZEN", "AGSPARSE", "DENSE", "OMNIREDUCE"):
        assert repr(getattr(schemes, name)) == name
    assert compress.top_k(0.1).by(schemes.ZEN) == compress.top_k(0.1).by("zen"), "by its name"
    assert repr(schemes.TwoLevel(schemes.ZEN)) == "TwoLevel(between=ZEN, hosts=None)"
    for scheme in (*schemes.NAMED.values(), *points()):
        assert eval(repr(scheme), vars(schemes).copy()) == scheme
        assert len(repr(scheme)) < 400


def test_a_policy_is_shown_as_the_text_that_makes_it() -> None:
    without = [construct() for name, construct in POLICIES.items() if name != "equal_count"]
    for policy in (*without, fuse.byte_cap(8), fuse.safusion(align=False), fuse.equal_count(3)):
        assert eval(repr(policy), vars(fuse).copy()) == policy
    assert repr(fuse.byte_cap(8)) == "byte_cap(mb=8)"


def test_a_compressor_is_shown_by_its_name_and_settings() -> None:
    for name in NAMES:
        compressor = construct(name, SETTINGS.get(name, {}))
        assert repr(compressor) == compressor.name
        assert str({"fc": compressor}) == f"{{'fc': {compressor.name}}}"
    assert repr(compress.error_feedback(compress.top_k(0.01))) == "error_feedback(top_k(0.01))"


def test_a_plan_is_shown_in_a_line() -> None:
    groups = (Group(("a", "b"), 8), Group(("c",), 4, "top_k:density=0.01", "all_gather"))
    assert repr(Plan(4, "f", groups, 0.0123, 0.2, choice="cupcake")) == (
        "<Plan cupcake for 4 ranks: 3 parameters in 2 groups, 12.3 ms predicted, 200.0 ms with stock DDP>"
    )


@pytest.mark.usefixtures("alone")
def test_a_synchronizer_says_what_it_synchronizes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    sync = thinwire.attach(model)
    assert repr(sync) == "<Synchronizer of Sequential: 4 parameters by auto on 1 ranks, 0 steps>"
    model(torch.ones(2, 64)).sum().backward()
    assert "1 steps>" in repr(sync)
    sync.detach()
    assert repr(sync) == "<Synchronizer of Sequential, detached>"
    sync = thinwire.attach(model, dense=compress.top_k(0.01), rows=schemes.ZEN)
    assert "4 parameters (1 compressed) by ZEN on 1 ranks" in repr(sync)
    sync.detach()


@pytest.mark.usefixtures("alone")
def test_how_each_parameter_travels_is_printed_before_the_first_step_and_can_be_passed_on(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(90, 64, sparse=True), *(nn.Linear(64, 64) for _ in range(3)))
    rules = {"1.*": "auto", "2.weight": compress.top_k(0.01).by("two_shot"), "*": "native"}
    sync = thinwire.attach(model, dense=rules)
    rows = {row["name"]: (row["kind"], row["scheme"], row["bytes"]) for row in sync.table()}
    auto, native = ("all-reduce", "auto", 0), ("all-reduce", "native", 0)
    assert rows == {"1.weight": auto, "1.bias": auto, "2.bias": native, "3.weight": native, "3.bias": native}
    methods = sync.methods
    assert methods["2.weight"] == compress.error_feedback(compress.top_k(0.01)).by("two_shot")
    sync.detach()
    again = thinwire.attach(model, dense=methods)
    assert again.methods == methods
    again.detach()
    how = {name: one for name, one in methods.items() if name != "0.weight"}  # a table
    groups = [Group.of([name], model.get_parameter(name).nbytes, one) for name, one in how.items()]
    shapes = [compress.Parameter(name, tuple(model.get_parameter(name).shape)) for name in how]
    Plan(1, fingerprint(shapes), tuple(groups), 0.1, 0.2).save(tmp_path / "plan.json")
    planned = thinwire.attach(model, dense=Plan.load(tmp_path / "plan.json"))
    assert {name: planned.methods[name] for name in how} == how
    planned.detach()
    alike = thinwire.attach(model, dense={"2.weight": compress.bf16()})
    assert alike.table() == [], "of all that is summed alike there is one row"
    alike.detach()


@pytest.mark.usefixtures("alone")
def test_a_compressor_of_ones_own_is_written_as_the_docstring_says() -> None:
    example = (compress.__doc__ or "").split("::\n\n", 1)[1]
    names = {"torch": torch, "dataclass": dataclass} | {name: getattr(compress, name) for name in compress.__all__}
    exec(textwrap.dedent(example), names)
    mine = names["ScaledSign"]()
    assert repr(mine) == "scaled_sign_of_mine"
    linear = nn.Linear(64, 64)
    sync = thinwire.attach(linear, dense=mine)
    linear(torch.randn(8, 64)).square().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.abs().unique().numel() == 1, "a sign with one scale"
    (row,) = [row for row in sync.table() if row["name"] == "weight"]
    assert row["formats"] == "error_feedback(scaled_sign_of_mine)"
    sync.detach()
