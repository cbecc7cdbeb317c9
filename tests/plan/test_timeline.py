"""The timeline: its account adds up, it is the longest path of its tasks, and it refuses what it cannot price."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import calls_of
from tests.plan.profiles import cases
from thinwire.observe.trace import Event, chrome_trace
from thinwire.plan import Groups, Linear, Profile, iteration_seconds, simulate


def longest_path(profile: Profile, groups: Groups) -> float:
    """The same semantics as a graph of tasks, each of which starts when all that it needs are done."""
    done: dict[Any, float] = {None: 0.0}

    def run(task: Any, needs: list[Any], takes: float) -> Any:
        done[task] = max(done[need] for need in needs) + takes
        return task

    computing = channel = None
    for group in groups:
        size = sum(profile.size_bytes[tensor] for tensor in group)
        for tensor in group:
            computing = run(("backward", tensor), [computing], profile.backward_seconds[tensor])
        computing = run(("encode", group), [computing], profile.compress(size))
        channel = run(("send", group), [computing, channel], profile.communicate(size))
    for group in groups:
        size = sum(profile.size_bytes[tensor] for tensor in group)
        computing = run(("decode", group), [computing, ("send", group)], profile.decompress(size))
    return done[computing]


@given(cases())
def test_the_iteration_is_the_longest_path(case: tuple[Profile, Groups]) -> None:
    assert iteration_seconds(*case) == pytest.approx(longest_path(*case), rel=1e-12)
    assert simulate(*case).iteration_seconds == iteration_seconds(*case)


@given(cases(), st.sampled_from(["compress", "decompress", "communicate"]))
def test_what_costs_more_is_never_faster(case: tuple[Profile, Groups], cost: str) -> None:
    profile, groups = case
    line: Linear = getattr(profile, cost)
    values = {name: getattr(profile, name) for name in ("compress", "decompress", "communicate")}
    dearer = Profile(
        profile.backward_seconds, profile.size_bytes, **values | {cost: Linear(line.alpha + 0.5, 2 * line.beta)}
    )
    assert iteration_seconds(dearer, groups) >= iteration_seconds(profile, groups)


@pytest.mark.parametrize(("price", "calls"), [(iteration_seconds, 10), (simulate, 100)])
def test_pricing_a_large_model_takes_no_time(price: Callable[[Profile, Groups], Any], calls: int) -> None:
    """A few calls a tensor: 0.3 and 3 ms for 314."""
    profile = Profile([0.001] * 314, [1000] * 314, *[Linear(1e-4, 1e-9)] * 3)
    groups = tuple((tensor,) for tensor in range(314))
    assert calls_of(lambda: price(profile, groups)) < calls * len(groups)


@given(cases(), cases())
def test_a_trace_opens_anywhere(predicted: tuple[Profile, Groups], measured: tuple[Profile, Groups]) -> None:
    lines = {"predicted": simulate(*predicted).events, "measured": simulate(*measured).events}
    trace = json.loads(json.dumps(chrome_trace(lines), allow_nan=False))
    records = trace["traceEvents"]
    names = {record["pid"]: record["args"]["name"] for record in records if record["name"] == "process_name"}
    assert list(names.values()) == list(lines)
    for process, name in names.items():
        works = [record for record in records if record["ph"] == "X" and record["pid"] == process]
        assert len(works) == len(lines[name])
        starts = [work["ts"] for work in works]
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert all(work["dur"] >= 0 for work in works)
        threads = {
            record["tid"]: record["args"]["name"]
            for record in records
            if record["name"] == "thread_name" and record["pid"] == process
        }
        assert sorted(threads.values()) == ["channel", "compute"]
        for work in works:
            assert {"name", "args", "tid"} <= set(work)
            assert work["tid"] in threads


def test_each_process_of_a_trace_begins_at_zero() -> None:
    """Measured steps have the clock of their machine; a predicted one begins at 0."""
    late = [Event("backward", "compute", 1000.5, 0.25), Event("send", "channel", 1000.625, 0.5, {"bytes": 8})]
    works = [record for record in chrome_trace({"measured": late})["traceEvents"] if record["ph"] == "X"]
    assert [(work["ts"], work["dur"], work["args"]) for work in works] == [
        (0.0, 250_000.0, {}),
        (125_000.0, 500_000.0, {"bytes": 8}),
    ]
    assert chrome_trace({"nothing": []})["traceEvents"]
    with pytest.raises(ValueError, match="no event"):
        chrome_trace({"measured": [Event("backward", "compute", 0.0, -1.0)]})
