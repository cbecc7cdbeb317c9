"""Under deterministic algorithms nothing that is decided by the clock changes bits; what could not obey is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire
from thinwire.comm.hosts import has_levels
from thinwire.comm.machine import Machine
from thinwire.compress.base import Parameter
from thinwire.gradients.exact import GradientSync
from thinwire.outer.pace import RoundPace
from thinwire.plan import Group, Plan
from thinwire.plan.plan import fingerprint
from thinwire.sums.cost import Demand
from thinwire.sums.named import AGSPARSE_CODED, DENSE, ZEN
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import Route, adds_in_rank_order, choose, route_prices
from thinwire.tune.window import Window

COSTS = st.floats(1e-12, 1e-2)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    return Machine(*[draw(COSTS) for _ in range(11)])


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    world_size, num_rows, width = draw(st.integers(2, 64)), draw(st.integers(1, 100_000)), draw(st.integers(1, 512))
    held = draw(st.integers(0, num_rows))
    union = draw(st.integers(held, num_rows))
    return Demand(world_size, num_rows, width, 4, held, union, in_rank_order=True)


@given(demands(), machines(), st.booleans())
def test_every_choice_adds_in_rank_order_whatever_a_link_costs(demand: Demand, machine: Machine, shared: bool) -> None:
    half = demand.world_size // 2
    hosts = (tuple(range(half)), tuple(range(half, demand.world_size))) if shared else ()
    point = choose(demand, machine, hosts=hosts)
    assert adds_in_rank_order(point)
    own, points = (machine,), [ZEN, AGSPARSE_CODED]
    if has_levels(hosts):
        own, points = (machine, machine, machine), [TwoLevel(ZEN, hosts), *points]
    ways = route_prices(demand, points, own, machine, hosts, is_sparse=False, is_host=False)
    assert all(way.route is not Route.NATIVE and adds_in_rank_order(way.price.scheme) for way in ways)


@given(demands(), st.lists(st.tuples(st.sampled_from([1, 3, 40]), machines()), min_size=2, max_size=20))
def test_no_measured_seconds_lead_out_of_rank_order(demand: Demand, steps: list[tuple[int, Machine]]) -> None:
    window = Window()
    for shrinks, machine in steps:
        held = demand.held // shrinks
        window.know(machine, ())
        assert adds_in_rank_order(window.observe(replace(demand, held=held, union=max(held, demand.union // shrinks))))


def test_what_was_chosen_by_a_clock_is_not_taken_over_if_it_adds_in_another_order(deterministic: None) -> None:
    windows = {"a": [[3, 1000, 16, 4, 10.0, 20.0, False]], "b": [[3, 1000, 16, 4, 10.0, 20.0]]}  # as saved before
    gradients = GradientSync("auto")
    gradients.choices = {"a": "sparcml_coded", "b": "zen"}
    gradients.recall({"windows": windows, "left": {}, "dense_runs": {}})
    assert gradients.choices == {"b": "zen"}
    assert gradients.windows["a"].choice is None
    assert gradients.windows["b"].choice == ZEN


def test_a_dense_table_is_left_by_its_shape_alone(deterministic: None) -> None:
    gradients = GradientSync("auto")
    gradients.may_leave = True
    gradients.left = {"large": 10}
    assert gradients.leaves("small", torch.zeros(100, 8))
    assert not gradients.leaves("large", torch.zeros(100_000, 8))


@pytest.mark.usefixtures("one_rank", "deterministic")
def test_what_is_decided_by_the_clock_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plan = plan_for(model, "native", "native")
    for dense in (thinwire.fuse.cupcake(), replace(plan, fallback=True)):
        with pytest.raises(ValueError, match="measured times"):
            thinwire.attach(model, dense=dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no two runs are alike"):
        thinwire.outer.attach(model, optimizer, thinwire.outer.shadow_sync())
    thinwire.attach(model, dense=plan).detach()


@pytest.mark.usefixtures("one_rank")
def test_deterministic_algorithms_after_attach_are_said_to_be_late() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    sync = thinwire.attach(model, dense=thinwire.fuse.cupcake())
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="came after attach"):
            model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()  # once
    finally:
        torch.use_deterministic_algorithms(False)
        sync.detach()


def plan_for(model: nn.Module, *dense: str) -> Plan:
    parameters = [Parameter(name, tuple(one.shape)) for name, one in model.named_parameters()]
    names = [[one.name for one in parameters if one.name.startswith(part)] for part in ("1", "0")]
    groups = [Group(tuple(group), 100, dense=how) for group, how in zip(names, dense, strict=True)]
    return Plan(1, fingerprint(parameters), tuple(groups), 0.1, 0.2)


@pytest.mark.usefixtures("one_rank")
def test_each_group_of_a_plan_has_its_own_exact_sum() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for ways in (("lossless", "native"), ("lossless", "lossless")):
        sync = thinwire.attach(model, dense=plan_for(model, *ways))
        assert [sync._methods.exact[name] for name in ("1.weight", "1.bias", "0.weight", "0.bias")] == [
            ways[0], ways[0], ways[1], ways[1]
        ]  # fmt: skip
        sync.detach()


@pytest.mark.usefixtures("one_rank")
def test_a_refused_attach_leaves_the_running_one_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sync = thinwire.attach(model, exclude="1.*")
    for more in ({}, {"exclude": "0.*"}, {"exclude": "nothing"}, {"rows": "zenith"}):
        with pytest.raises(ValueError):  # several
            thinwire.attach(model, **more)
        model.register_forward_pre_hook(lambda module, args: None)  # as a profiler does
        sync._passes._structure.check()  # as several ranks do before each forward
        assert set(sync._names.values()) == {"0.weight", "0.bias"}
    sync.detach()


@pytest.mark.usefixtures("one_rank")
def test_a_model_may_keep_its_synchronizer() -> None:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2))
    model.sync = sync = thinwire.attach(model)  # type: ignore[assignment]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for one in copies:
        assert one.sync is None
        assert torch.equal(one[1].weight, model[1].weight)
        thinwire.attach(one).detach()
    assert model.sync is sync
    sync.detach()


def test_what_each_scheme_says_of_its_order() -> None:
    assert adds_in_rank_order(ZEN)
    assert not adds_in_rank_order(DENSE)


def test_continuous_rounds_leave_out_the_pause_that_spares_the_processor() -> None:
    paused = []
    for recipe in (thinwire.outer.shadow_sync(), thinwire.outer.shadow_sync(every_seconds=0)):
        pace = RoundPace(recipe.every_seconds, timeout_seconds=400.0)
        pace._hurry = MagicMock(wait=paused.append)
        pace.end_round(cpu_seconds=10.0)
        with pace.changed:
            pace.step()
        pace.wait()
    assert paused[0] == 100.0
    assert paused[1] <= 1e-3
