"""The timeline: its account adds up, it is the longest path of its tasks, and it refuses what it cannot price."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
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


def test_a_group_that_is_not_compressed() -> None:
    profile, dense = Profile([2, 2], [10, 10], Linear(1, 0), Linear(1, 0.1), Linear(1, 0.2)), Linear(1, 0.5)
    groups = ((0,), (1,))
    neither = Profile([2, 2], [10, 10], FREE, FREE, dense)
    assert iteration_seconds(profile, groups, dense, (False, False)) == iteration_seconds(neither, groups)
    assert iteration_seconds(profile, groups, dense, (True, True)) == iteration_seconds(profile, groups)
    # Backward 0-4, sends 2-8 and (encoded at 5) 8-11, decoding 11-13.
    line = simulate(profile, groups, dense, (False, True))
    assert line.iteration_seconds == iteration_seconds(profile, groups, dense, (False, True)) == 13.0
    assert [event.name for event in line.events if "code" in event.name] == ["encode group 1", "decode group 1"]
    with pytest.raises(ValueError, match="dense="):
        iteration_seconds(profile, groups, compressed=(False, True))
    with pytest.raises(ValueError, match="1 choices for 2 groups"):
        simulate(profile, groups, dense, (True,))


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


@given(cases())
def test_a_profile_survives_json(case: tuple[Profile, Groups]) -> None:
    profile, _ = case
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert Linear.from_json(json.loads(json.dumps(profile.compress.to_json()))) == profile.compress


@pytest.mark.parametrize(
    "change", [{"names": None}, {"size_bytes": None}, {"extra": 1}, {"compress": {"alpha": 1}}, {"compress": None}]
)
def test_json_that_is_no_profile(change: dict[str, Any]) -> None:
    good = Profile([1], [4], FREE, FREE, FREE).to_json()
    with pytest.raises(ValueError):
        Profile.from_json(good | change)
    with pytest.raises(ValueError):
        Profile.from_json([good])


@given(
    seconds,
    st.one_of(st.just(0.0), st.floats(1e-12, 1e-3)),
    st.lists(st.integers(1, 10**6), min_size=2, unique=True),
    st.booleans(),
)
def test_a_fit_finds_the_line(alpha: float, beta: float, sizes: list[int], relative: bool) -> None:
    line = Linear(alpha, beta)
    times = [line(size) for size in sizes]
    if relative and not all(times):
        return
    fitted = Linear.fit(sizes, times, relative)
    for size, took in zip(sizes, times, strict=True):
        assert fitted(size) == pytest.approx(took, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.01, 10)), min_size=2, max_size=8), st.booleans(), st.data())
@settings(max_examples=300)
def test_no_other_line_of_positive_costs_is_nearer(
    points: list[tuple[int, float]], relative: bool, data: st.DataObject
) -> None:
    sizes, times = zip(*points, strict=True)
    if len(set(sizes)) < 2:
        return
    fitted = Linear.fit(sizes, times, relative)

    def error(line: Linear) -> float:
        return sum((line(size) - took) ** 2 / (took**2 if relative else 1) for size, took in points)

    def nearby(value: float) -> st.SearchStrategy[float]:
        return st.one_of(st.just(value), st.floats(0.0, max(2 * value, 1e-3)))

    other = Linear(data.draw(nearby(fitted.alpha)), data.draw(nearby(fitted.beta)))
    assert error(fitted) <= error(other) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (([], []), "two sizes"),
        (([1, 1], [1, 2]), "two sizes"),
        (([1, 2], [1]), "two sizes"),
        (([1, 2], [1, math.nan]), "measure again"),
        (([1, 2], [1, -1]), "measure again"),
    ],
)
def test_points_that_make_no_line(points: tuple[list[float], list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Linear.fit(*points)
    with pytest.raises(ValueError, match="relative=False"):
        Linear.fit([1, 2], [0, 1], relative=True)


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
