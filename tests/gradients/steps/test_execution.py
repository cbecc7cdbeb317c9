"""Groups of a plan or a policy in execution: followed, agreed, regrouped, dropped; and nothing is lost. On threads."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loopback import LoopbackExchange, run_ranks
from tests.gradients.steps.costs import step_of
from thinwire import compress
from thinwire.comm.channel import Subject
from thinwire.compress.base import Parameter
from thinwire.compress.memory import with_memory
from thinwire.errors import CorruptMessageError, MismatchError
from thinwire.gradients.compressed import FLUSH_STEPS
from thinwire.gradients.compression import Methods
from thinwire.gradients.parameters import Trained, with_others
from thinwire.gradients.steps.execution import Execution
from thinwire.gradients.steps.grouping import Following, Intent, Pace
from thinwire.gradients.steps.steps import Trace
from thinwire.observe.step import Load
from thinwire.plan.plan import Group, Plan, fingerprint
from thinwire.plan.profile import Groups, Profile
from thinwire.tune import playing
from threaded import ALONE, ONE, PAIRS, LoopbackLane, Network, Rank, on_ranks

GROUPINGS = {"alone": ALONE, "pairs": PAIRS, "one": ONE, "default": None}
WEIGHTS = ("first.weight", "middle.weight", "quiet.weight", "last.weight")


def top_k_everywhere(parameter: Parameter) -> compress.Compressor:
    return compress.top_k(0.05)


def summed(steps: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((step[name].double() for step in steps), torch.zeros(())) for name in steps[0]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


# --- groups are followed


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_exact_sums_travel_in_the_groups_asked_for(grouping: str) -> None:
    """The same bits on all ranks, the sum to rounding, and one job a group with the bytes of its members."""
    groups = GROUPINGS[grouping]

    def run(network: LoopbackExchange) -> Any:
        rank = Rank(network, groups=groups)
        local, means = rank.local(0), rank.step(0)
        sizes = {name: 4 * parameter.numel() + 4 for name, parameter in rank.module.named_parameters()}
        return local, means, [job.load for job in rank.times.jobs], sizes

    results = on_ranks(3, run)
    total = {name: sum(result[0][name].double() for result in results) / 3 for name in results[0][0]}
    for _, means, loads, sizes in results:
        assert same(means, results[0][1])
        for name, mean in means.items():
            torch.testing.assert_close(mean.double(), total[name], atol=1e-6, rtol=1e-5)
        expected = groups or ONE
        assert [load.exact_bytes for load in loads] == [sum(sizes[name] for name in group) for group in expected]


@pytest.mark.slow
@settings(max_examples=8)
@given(st.permutations(range(8)), st.sets(st.integers(1, 7)))
def test_compression_ahead_is_the_same_bits_in_whatever_groups(order: list[int], cuts: set[int]) -> None:
    names = [ALONE[place][0] for place in order]
    groups = [names[start:stop] for start, stop in pairwise([0, *sorted(cuts), 8])]

    def run(network: LoopbackExchange) -> list[dict[str, Tensor]]:
        rank = Rank(network, top_k_everywhere, groups=groups)
        return [rank.step(step) for step in range(2)]

    def alone(network: LoopbackExchange) -> list[dict[str, Tensor]]:
        rank = Rank(network, top_k_everywhere, groups=ALONE)
        return [rank.step(step) for step in range(2)]

    for mine, theirs in zip(on_ranks(2, run), on_ranks(2, alone), strict=True):
        assert all(same(one, other) for one, other in zip(mine, theirs, strict=True))


def test_small_tensors_are_exact_and_in_the_job_of_their_group() -> None:
    def run(network: LoopbackExchange) -> Any:
        rank = Rank(network, compress.top_k(0.05), groups=PAIRS)
        local, means = rank.local(0), rank.step(0)
        assert [(load.num_compressed, load.exact_bytes > 0) for load in (job.load for job in rank.times.jobs)] == [
            (1, True), (1, True), (2, True),
        ]  # fmt: skip
        return local["last.bias"], means["last.bias"]

    results = on_ranks(2, run)
    for _, mean in results:
        torch.testing.assert_close(mean, (results[0][0] + results[1][0]) / 2)


def test_dtypes_of_a_group_are_summed_by_one_job() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(20, 64)
            self.norm = nn.LayerNorm(64, dtype=torch.float64)

    names = (("norm.bias", "norm.weight", "wide.bias", "wide.weight"),)

    def run(network: LoopbackExchange) -> Any:
        results = []
        for how in ("native", compress.top_k(1.0)):
            rank = Rank(network, how, groups=names, module=Halves())
            local, means = rank.local(0), rank.step(0)
            assert len(rank.times.jobs) == 1
            results.append((local, means))
        return results

    ranks = on_ranks(2, run)
    for place in range(2):
        for name, mean in ranks[0][place][1].items():
            expected = (ranks[0][place][0][name].double() + ranks[1][place][0][name].double()) / 2
            torch.testing.assert_close(mean.double(), expected, atol=1e-5, rtol=1e-5)


def trained(sizes: Sequence[int], tables: Sequence[int] = (), sparse: Sequence[int] = ()) -> list[Trained]:
    return [
        Trained(str(place), nn.Parameter(torch.empty(size, device="meta")), place in sparse, place in tables)
        for place, size in enumerate(sizes)
    ]


def test_tables_go_where_no_group_waits_for_them() -> None:
    entries = trained([10] * 7, tables=[0, 5, 6], sparse=[3])
    order = [6, 5, 4, 3, 2, 1, 0]
    planned = ((4, 2), (1,))
    assert with_others(entries, planned, order) == ((6, 5), (3,), (4, 2), (1,), (0,))
    assert with_others(entries, ((4,), (2, 1)), order) == ((6, 5), (4,), (3,), (2, 1), (0,))


# --- alignment of ranks


def test_ranks_that_select_differently_close_their_groups_at_the_same_tensors() -> None:
    """A threshold lets another number of elements through on each rank. Bytes differ, groups do not."""

    def run(network: LoopbackExchange) -> Any:
        rank = Rank(network, {"*.weight": compress.threshold(0.5)}, groups=PAIRS, loudness=1.0 + network.rank)
        means = [rank.step(step) for step in range(3)]
        assert rank.sync is not None
        densities = [rank.sync.statistics.records[name].density for name in WEIGHTS]
        return means, [job.load for job in rank.times.jobs], densities

    results = on_ranks(3, run)
    assert len({tuple(result[1]) for result in results}) == 1
    assert len({tuple(result[2]) for result in results}) == 3, "counts differ by rank, or the test is about nothing"
    for means, _, _ in results:
        assert all(same(one, other) for one, other in zip(means, results[0][0], strict=True))


# --- numbers that ranks tell each other


def test_gathered_numbers_are_those_of_all_ranks() -> None:
    def run(network: LoopbackExchange) -> Any:
        return LoopbackLane(network).channel(Subject("seconds", "2 numbers")).gather_numbers([network.rank + 0.25, 1.0])

    assert on_ranks(3, run) == [[[0.25, 1.0], [1.25, 1.0], [2.25, 1.0]]] * 3


@pytest.mark.parametrize(("numbers", "error"), [([float("nan")], CorruptMessageError), ([1.0, 2.0], MismatchError)])
def test_what_are_not_so_many_finite_numbers_is_refused(numbers: list[float], error: type[Exception]) -> None:
    def run(network: LoopbackExchange) -> Any:
        mine = numbers if network.rank == 1 else [0.0]
        return LoopbackLane(network).channel(Subject("seconds", f"{len(mine)} numbers")).gather_numbers(mine)

    assert all(isinstance(outcome.error, error) for outcome in run_ranks(2, run))


def test_what_rank_0_passes_is_broadcast_exactly() -> None:
    def run(network: LoopbackExchange) -> Any:
        mine = [[[0, 1], [2]], 0.1 + 0.2] if network.rank == 0 else [[[0], [1, 2]], 0.3]
        return LoopbackLane(network).channel(Subject("groups", "of 3")).broadcast(mine)

    assert on_ranks(3, run) == [[[[0, 1], [2]], 0.1 + 0.2]] * 3


# --- execution: measured, planned anew, dropped


@dataclass(frozen=True)
class Halves:
    """Two groups; which, depends on the profile."""

    name: str = "halves"

    def groups(self, profile: Profile) -> Groups:
        half = sum(profile.size_bytes) / 2
        cut = next(place for place, end in enumerate(profile.end_bytes) if end >= half)
        return tuple(range(cut)), tuple(range(cut, profile.num_tensors))


class Now(threading.local):
    """The clock of a rank, which is a thread: it runs while a step does."""

    seconds = 0.0


NOW = Now()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "time", SimpleNamespace(perf_counter=lambda: NOW.seconds))


@dataclass
class Driven:
    """A rank whose steps take what the test says."""

    rank: Rank
    execution: Execution

    @classmethod
    def made(cls, network: LoopbackExchange, pace: Pace, how: Any = "native", **intent: Any) -> Driven:
        rank = Rank(network, how, groups=intent.get("groups"))
        hooks: Any = rank.hooks
        wanted = Intent(rank.names, pace=pace, **intent)
        following = Following(rank.names, intent.get("groups"), hooks, rank.sync)
        return cls(rank, Execution(wanted, rank.lane, following, rank.buckets.take_formed))

    def step(self, number: int, seconds: float | None = None) -> dict[str, Tensor]:
        """Jobs that take what `COSTS` says, and a rank's own waiting; or a step of so many seconds."""
        means = self.rank.step(number)
        order = [Load(name, 4) for name in self.rank.times.ready]
        own = 1e-4 * self.rank.exchange.rank
        times = step_of([job.load for job in self.rank.times.jobs], order, waits=own, late=own)
        if seconds is not None:
            times.ended = times.started + seconds
        NOW.seconds += times.seconds
        self.execution.finish_step(times)
        return means

    def names(self) -> list[list[str]]:
        return [[self.rank.hooks.trained[place].name for place in group] for group in self.rank.hooks.groups]


PACE = Pace(skipped_steps=1, measured_steps=4, window_steps=3)


@pytest.mark.parametrize("how", ["native", compress.top_k(0.05)])
def test_a_policy_is_followed_after_some_measured_steps(how: Any) -> None:
    def run(network: LoopbackExchange) -> Any:
        driven = Driven.made(network, PACE, how, policies=(Halves(),))
        jobs = []
        for number in range(7):
            driven.step(number)
            jobs.append(len(driven.rank.times.jobs))
        assert driven.execution.profile is not None
        return jobs, driven.names(), driven.execution.stats(), driven.execution.predicted_events()

    results = on_ranks(3, run)
    for jobs, names, stats, events in results:
        assert jobs == [1, 1, 1, 8, 8, 2, 2], "as it was, each gradient alone, and the groups of the policy"
        assert names == results[0][1]
        assert len(names) == 2
        assert sorted(name for group in names for name in group) == sorted(ONE[0])
        assert (stats["plan/groups"], stats["plan/replans"]) == (2.0, 0.0)
        assert stats["plan/predicted_seconds"] == results[0][2]["plan/predicted_seconds"] > 0.0
        assert sum(event.track == "channel" for event in events) == 2


def test_a_plan_that_drifts_is_made_anew_by_all_ranks_at_the_same_step() -> None:
    def run(network: LoopbackExchange) -> Any:
        driven = Driven.made(network, PACE, policies=(Halves(),), groups=PAIRS, predicted_seconds=1.0)
        groups = []
        for number in range(24):
            slow = 1.09 if number < 8 else 1.2  # seconds: within 10 %, then not
            driven.step(number, slow + 0.01 * network.rank if driven.execution.replans == 0 else None)
            groups.append(len(driven.rank.times.jobs))
        return groups, driven.names(), driven.execution.stats()

    results = on_ranks(3, run)
    for groups, names, stats in results:
        assert groups == results[0][0]
        assert groups[:8] == [3] * 8, "a window of 3 steps after 1 that does not count, twice"
        assert 8 in groups
        assert groups[-1] == 2
        assert names == results[0][1]
        assert stats["plan/replans"] >= 1.0


def test_groups_that_stay_the_best_are_not_measured_for_ever() -> None:
    """What the model cannot predict is no drift of the plan: from then on it is held against what was measured."""

    def run(network: LoopbackExchange) -> Any:
        driven = Driven.made(network, PACE, policies=(Halves(),))
        replans = []
        for number in range(60):
            driven.step(number, 5.0)
            replans.append(driven.execution.replans)
        return replans

    for replans in on_ranks(2, run):
        assert replans[-1] == 1


def slower(network: LoopbackExchange, dense_seconds: float, fallback: bool, steps: int = 3 + FLUSH_STEPS + 12) -> Any:
    """A plan of 1 s a step, where stock DDP was predicted to take half of that, and takes ``dense_seconds``."""
    driven = Driven.made(
        network,
        PACE,
        compress.top_k(0.02),
        policies=(Halves(),),
        groups=PAIRS,
        predicted_seconds=1.0,
        dense_seconds=0.5,
        fallback=fallback,
    )
    assert driven.rank.sync is not None
    local, means, compressed = [], [], []
    for number in range(steps):
        is_compressed = driven.rank.buckets.compresses("first.weight")
        local.append(driven.rank.local(number))
        means.append(driven.step(number, 1.0 if is_compressed else dense_seconds))
        compressed.append(is_compressed)
    left = {name: driven.rank.sync.memories.outstanding(name) for name in WEIGHTS}
    return local, means, compressed, left, driven


def test_a_plan_that_does_not_pay_is_dropped_and_its_memories_are_handed_out() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = on_ranks(3, lambda network: slower(network, 0.3, fallback=True))
    told = [str(warning.message) for warning in seen if "dropped" in str(warning.message)]
    assert len(told) == 1, "by rank 0, once"
    assert "a step with the plan takes 3.33 times as long; exact synchronization won 3 of 3 pairs" in told[0]
    assert f"added to the gradients of the next {FLUSH_STEPS} steps" in told[0]
    for local, means, compressed, left, driven in results:
        assert compressed == results[0][2]
        assert compressed[:4] == [True] * 4
        assert compressed[4:10].count(False) == 3, "three pairs of steps"
        assert compressed[10:] == [False] * (len(compressed) - 10), "and then it is dropped"
        assert all(float(memory.abs().max()) == 0.0 for memory in left.values())
        assert driven.execution.stats()["plan/dropped"] == 1.0
        for name in WEIGHTS:
            gradient = sum(summed(of_rank[0])[name] for of_rank in results) / 3
            torch.testing.assert_close(summed(means)[name], gradient, atol=1e-5, rtol=1e-5)
        last = {name: sum(of_rank[0][-1][name].double() for of_rank in results) / 3 for name in local[-1]}
        for name, mean in means[-1].items():
            torch.testing.assert_close(mean.double(), last[name], atol=1e-6, rtol=1e-5)


def test_a_plan_that_does_not_pay_is_only_reported_unless_asked_for() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = on_ranks(2, lambda network: slower(network, 0.3, fallback=False))
    told = [str(warning.message) for warning in seen if "fallback=True" in str(warning.message)]
    assert len(told) == 1
    for _, _, compressed, _, driven in results:
        assert compressed[-1]
        assert compressed.count(False) == 3, "tested once"
        assert driven.execution.stats()["plan/dropped"] == 0.0


@pytest.mark.slow
def test_a_plan_stays_where_exact_synchronization_is_slower_than_predicted() -> None:
    """A link that got slower makes both slower: that is no reason to drop the plan."""
    for _, _, compressed, _, driven in on_ranks(2, lambda network: slower(network, 1.5, fallback=True)):
        assert compressed[-1]
        assert 2 <= compressed.count(False) <= 6
        assert driven.execution.stats()["plan/dropped"] == 0.0


def test_a_plan_is_compared_by_whole_steps() -> None:
    """Here its backward is the shorter one, and its forward and optimizer take so much longer that it loses."""

    def run(network: LoopbackExchange) -> bool:
        driven = Driven.made(
            network, PACE, compress.top_k(0.02), groups=PAIRS, predicted_seconds=1.0, dense_seconds=0.5, fallback=True
        )
        for number in range(14):
            is_compressed = driven.rank.buckets.compresses("first.weight")
            NOW.seconds += 9.0 if is_compressed else 1.0  # beside backward
            driven.step(number, 1.0 if is_compressed else 1.5)
        return driven.execution.dropped

    with pytest.warns(UserWarning, match="It is dropped"):
        assert on_ranks(2, run) == [True, True]


def test_a_state_goes_on_where_it_was() -> None:
    def run(network: LoopbackExchange) -> Any:
        torch.manual_seed(0)
        driven = Driven.made(network, PACE, compress.top_k(0.05), policies=(Halves(),))
        for number in range(7):
            driven.step(number)
        assert driven.rank.sync is not None
        state = json.loads(json.dumps(driven.execution.state_dict()))
        torch.manual_seed(0)
        again = Driven.made(network, PACE, compress.top_k(0.05), policies=(Halves(),))
        assert again.rank.sync is not None
        again.execution.check_state(state)
        again.execution.load_state_dict(state)
        again.rank.sync.memories.load_state_dict(driven.rank.sync.memories.state_dict())
        assert same(again.step(7), driven.step(7))
        with pytest.raises(ValueError, match="are of other parameters"):
            again.execution.check_state(state | {"groups": [["first.weight"]]})
        return again.names() == driven.names() and len(again.rank.times.jobs) == 2

    assert on_ranks(2, run) == [True, True]


def test_a_state_that_is_loaded_during_a_test_ends_its_pause() -> None:
    """A run that goes back while the plan is tested would never compress again."""

    def run(network: LoopbackExchange) -> bool:
        driven = Driven.made(
            network, PACE, compress.top_k(0.02), groups=PAIRS, predicted_seconds=1.0, dense_seconds=0.5
        )
        state = json.loads(json.dumps(driven.execution.state_dict()))
        number = 0
        while driven.rank.buckets.compresses("first.weight"):
            driven.step(number, 1.0)
            number += 1
        driven.execution.load_state_dict(state)
        return driven.rank.buckets.compresses("first.weight")

    assert on_ranks(2, run) == [True, True]


# --- what was measured, as events


def test_a_trace_has_every_gradient_every_job_and_its_phases(tmp_path: Path) -> None:
    def run(network: LoopbackExchange) -> Any:
        rank = Rank(network, compress.top_k(0.05), groups=PAIRS)
        assert rank.sync is not None
        stopped: list[bool] = []
        trace = Trace(lambda: stopped.append(True), 2, lambda: ())
        rank.sync.statistics.stopwatch.listener = rank.clock.phase
        for number in range(2):
            assert not stopped
            rank.step(number)
            trace.add(rank.times)
        assert stopped
        trace.save(tmp_path / f"{network.rank}.json")
        return trace.steps

    for rank, steps in enumerate(on_ranks(2, run)):
        for events in steps:
            assert sum(event.name.startswith("backward ") for event in events) == 8
            jobs = [event for event in events if event.track == "channel"]
            assert [event.name for event in jobs] == [f"communicate group {number}" for number in range(3)]
            phases = [event for event in events if event.track == "phases"]
            assert {event.name for event in phases} == {"encode", "wire", "decode"}
            for phase in phases:
                inside = [job for job in jobs if job.start_seconds <= phase.start_seconds <= job.end_seconds]
                assert len(inside) == 1
                assert phase.end_seconds <= inside[0].end_seconds + 1e-9
        written = json.loads((tmp_path / f"{rank}.json").read_text())
        names = [event["name"] for event in written["traceEvents"]]
        assert names.count("backward last.weight") == 2


# --- what a plan asks for


def test_a_plan_says_what_is_compressed_and_how() -> None:
    """Small parameters of a compressed group are summed exactly."""
    parameters = [Parameter(name, tuple(entry.shape)) for name, entry in Network().named_parameters()]
    groups = (
        Group(PAIRS[0], compressor="top_k:density=0.1", exchange="two_shot"),
        Group(PAIRS[1], dense="lossless"),
        Group(PAIRS[2], compressor="bf16", exchange="all_reduce"),
    )
    methods = Methods.of(Plan(2, fingerprint(parameters), groups, 1.0, 1.0).dense(), parameters, (), 2)
    found = methods.compressed
    assert set(found) == {name for name in (*PAIRS[0], *PAIRS[2]) if name.endswith("weight")}
    assert {name for name, how in methods.exact.items() if how == "lossless"} == set(PAIRS[1])
    for name, planned in found.items():
        assert planned.parameter.name == name
        assert planned.reduction.name == ("two_shot" if name in PAIRS[0] else "all_reduce")
    assert found["last.weight"].compressor == with_memory(compress.top_k(0.1)), "with error feedback"
