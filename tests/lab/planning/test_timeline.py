"""The statistics of a simulated step: they add up, and its events keep to their order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from tests.plan.profiles import cases
from thinwire.plan import Groups, Linear, Profile, simulate

FREE = Linear(0.0, 0.0)


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


def test_by_hand() -> None:
    """Backward 0-2, 3-5 after an encoding of 1; sends 3-6 and 6-9; decoding waits for arrivals: 6-8, 9-11."""
    profile = Profile([2, 2], [10, 10], Linear(1, 0), Linear(1, 0.1), Linear(1, 0.2), other_seconds=100.0)
    line = simulate(profile, ((0,), (1,)))
    assert (line.iteration_seconds, line.exposed_seconds, line.overlapped_seconds) == (11.0, 1.0, 5.0)
    together = simulate(profile, ((0, 1),))
    assert (together.iteration_seconds, together.exposed_seconds, together.bubbles) == (13.0, 5.0, ())
    waiting = simulate(Profile([2, 9], [10, 10], FREE, FREE, Linear(1, 0.1)), ((0,), (1,)))
    assert waiting.bubbles == ((4.0, 7.0),)
