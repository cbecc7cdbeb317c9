"""The timeline: its account adds up, it is the longest path of its tasks, and it refuses what it cannot price."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import calls_of
from thinwire.observe.trace import Event, chrome_trace
from thinwire.plan import Groups, Linear, Profile, check_groups, iteration_seconds, simulate

FREE = Linear(0.0, 0.0)
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))
lines = st.builds(Linear, seconds, st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, Groups]:
    count = draw(st.integers(1, 9))
    backward = draw(st.lists(seconds, min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    cuts = draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
    groups = tuple(tuple(range(start, end)) for start, end in pairwise([0, *sorted(cuts), count]))
    return Profile(backward, sizes, draw(lines), draw(lines), draw(lines)), groups


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


@given(cases())
def test_the_account_adds_up(case: tuple[Profile, Groups]) -> None:
    profile, groups = case
    line = simulate(profile, groups)
    sizes = [sum(profile.size_bytes[tensor] for tensor in group) for group in groups]
    sending, coding = sum(map(profile.communicate, sizes)), sum(map(profile.compress, sizes))
    decoding = sum(map(profile.decompress, sizes))

    def close(expected: float) -> Any:
        return pytest.approx(expected, rel=1e-9, abs=1e-12)

    assert line.compute_busy_seconds == close(sum(profile.backward_seconds) + coding + decoding)
    assert line.channel_busy_seconds == close(sending)
    assert line.iteration_seconds == close(line.compute_busy_seconds + line.exposed_seconds)
    assert line.channel_busy_seconds == close(line.exposed_seconds + line.overlapped_seconds)
    # Cupcake: f = A + sum of B + sum of h + sum of g - P, where P is what overlaps, and A is left out.
    assert line.iteration_seconds == close(
        line.compute_busy_seconds + line.channel_busy_seconds - line.overlapped_seconds
    )
    assert min(line.exposed_seconds, line.overlapped_seconds) >= 0
    for track, busy in line.busy_seconds.items():
        assert sum(event.seconds for event in line.events if event.track == track) == close(busy)


@given(cases())
def test_events_keep_to_their_order(case: tuple[Profile, Groups]) -> None:
    profile, groups = case
    line = simulate(profile, groups)
    tracks = {track: [event for event in line.events if event.track == track] for track in line.busy_seconds}
    for events in tracks.values():
        for earlier, later in pairwise(events):
            assert later.start_seconds >= earlier.end_seconds - 1e-9
    sends = tracks["channel"]
    assert len(sends) == len(groups)
    gaps = [later.start_seconds - earlier.end_seconds for earlier, later in pairwise(sends)]
    assert sum(duration for _, duration in line.bubbles) == pytest.approx(sum(gaps), abs=1e-9)
    assert all(duration > 0 for _, duration in line.bubbles)
    arrival = sends[0].start_seconds + line.channel_busy_seconds + sum(duration for _, duration in line.bubbles)
    assert arrival == pytest.approx(sends[-1].end_seconds, rel=1e-9)
    assert line.iteration_seconds >= sends[-1].end_seconds
    for send, group in zip(sends, groups, strict=True):
        assert send.arguments["bytes"] == sum(profile.size_bytes[tensor] for tensor in group)
    decodes = [event for event in tracks["compute"] if event.name.startswith("decode")]
    computed = max(event.end_seconds for event in tracks["compute"] if not event.name.startswith("decode"))
    assert all(event.start_seconds >= computed - 1e-9 for event in decodes)
    arrivals = {f"decode{send.name.removeprefix('communicate')}": send.end_seconds for send in sends}
    assert all(event.start_seconds >= arrivals[event.name] for event in decodes)


@given(cases(), st.sampled_from(["compress", "decompress", "communicate"]))
def test_what_costs_more_is_never_faster(case: tuple[Profile, Groups], cost: str) -> None:
    profile, groups = case
    line: Linear = getattr(profile, cost)
    values = {name: getattr(profile, name) for name in ("compress", "decompress", "communicate")}
    dearer = Profile(
        profile.backward_seconds, profile.size_bytes, **values | {cost: Linear(line.alpha + 0.5, 2 * line.beta)}
    )
    assert iteration_seconds(dearer, groups) >= iteration_seconds(profile, groups)


def test_by_hand() -> None:
    """Backward 0-2, 3-5 after an encoding of 1; sends 3-6 and 6-9; decoding waits for arrivals: 6-8, 9-11."""
    profile = Profile([2, 2], [10, 10], Linear(1, 0), Linear(1, 0.1), Linear(1, 0.2), other_seconds=100.0)
    line = simulate(profile, ((0,), (1,)))
    assert (line.iteration_seconds, line.exposed_seconds, line.overlapped_seconds) == (11.0, 1.0, 5.0)
    together = simulate(profile, ((0, 1),))
    assert (together.iteration_seconds, together.exposed_seconds, together.bubbles) == (13.0, 5.0, ())
    waiting = simulate(Profile([2, 9], [10, 10], FREE, FREE, Linear(1, 0.1)), ((0,), (1,)))
    assert waiting.bubbles == ((4.0, 7.0),)


@given(cases())
def test_sparsification_ahead_is_that_of_every_tensor_alone(case: tuple[Profile, Groups]) -> None:
    profile, groups = case
    alone = tuple((tensor,) for tensor in range(profile.num_tensors))
    ahead = profile.ahead()
    assert iteration_seconds(ahead, alone) == pytest.approx(iteration_seconds(profile, alone), rel=1e-12)
    selecting = sum(map(profile.compress, profile.size_bytes))
    assert sum(ahead.backward_seconds) == pytest.approx(sum(profile.backward_seconds) + selecting)
    assert simulate(ahead, groups).channel_busy_seconds == simulate(profile, groups).channel_busy_seconds


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "groups of 0 tensors for a profile of 3"),
        (((0, 1),), "groups of 2 tensors for a profile of 3"),
        (((0, 1), (2,), (3,)), "groups of 4 tensors for a profile of 3"),
        (((0,), (), (1, 2)), "group 1 is empty"),
        (((1,), (0,), (2,)), "group 0 has tensor 1 where tensor 0 belongs"),
        (((0, 2), (1,)), "tensor 2 where tensor 1"),
        (((0, 1), (1, 2)), "tensor 1 where tensor 2"),
    ],
)
def test_groups_that_are_none(groups: Groups, message: str) -> None:
    profile = Profile([1, 1, 1], [4, 4, 4], FREE, FREE, FREE)
    for refuse in (check_groups, iteration_seconds, simulate):
        with pytest.raises(ValueError, match=message):
            refuse(profile, groups)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backward_seconds": [], "size_bytes": []}, "at least one tensor"),
        ({"backward_seconds": [1.0]}, "1 backward times, 2 sizes"),
        ({"names": ["a"]}, "1 names"),
        ({"names": ["a", "a"]}, "same name"),
        ({"backward_seconds": [1.0, -1.0]}, r"backward_seconds\[1\] is -1.0"),
        ({"backward_seconds": [math.nan, 1.0], "names": ["a", "b"]}, r"backward_seconds\[0\] \(a\) is nan"),
        ({"size_bytes": [4, math.inf]}, r"size_bytes\[1\] is inf"),
        ({"size_bytes": [-4, 4]}, "measure again"),
        ({"other_seconds": -1.0}, "other_seconds is -1.0"),
        ({"communicate": 1e-9}, "give a Linear"),
    ],
)
def test_profiles_that_are_none(change: dict[str, Any], message: str) -> None:
    good = {"backward_seconds": [1.0, 1.0], "size_bytes": [4, 4], "names": []}
    costs = dict.fromkeys(("compress", "decompress", "communicate"), FREE)
    with pytest.raises(ValueError, match=message):
        Profile(**good | costs | change)


@pytest.mark.parametrize("numbers", [(-1e-9, 0), (0, -1.0), (math.inf, 0), (0, math.nan), ("1", 0), (None, 0)])
def test_a_cost_is_not_negative(numbers: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be 0 or more seconds"):
        Linear(*numbers)


def test_any_sequence_makes_a_profile() -> None:
    profile = Profile(np.array([1.0, 2.0], np.float32), np.array([4, 8]), FREE, FREE, Linear(np.float32(1), 0))
    assert profile == Profile((1.0, 2.0), (4, 8), FREE, FREE, Linear(1.0, 0.0))
    assert [type(size) for size in profile.size_bytes] == [int, int]
    assert (profile.ready_seconds, profile.end_bytes) == ((0.0, 1.0, 3.0), (0, 4, 12))
    assert hash(profile) == hash(Profile([1, 2], [4, 8], FREE, FREE, Linear(1, 0)))


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
