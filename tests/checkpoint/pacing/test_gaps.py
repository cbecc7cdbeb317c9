"""Grants: all bytes, none twice, at the times when the network is idle."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import PATIENCE, FakeClock, wait_until
from references.transfer_schedule import Budget, spread
from thinwire.checkpoint.pacing import gaps
from thinwire.checkpoint.pacing.gaps import PROFILED_ITERATIONS, Pacer, even_grants, gap_grants, idle_timespans, profile
from thinwire.checkpoint.registration import holders_of, room_bytes

periods = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


@given(periods)
def test_gaps_are_where_nothing_is_busy(busy: list[tuple[float, float]]) -> None:
    """And, with what is busy, they are the whole iteration."""
    gaps = idle_timespans(busy, 0.0, 14.0, least_gap=0.0)
    for start, length in gaps:
        assert 0 <= start <= start + length <= 14.0 + 1e-9
        middle = start + length / 2
        assert not any(begin < middle < end for begin, end in busy)
    points = [i * 14 / 1000 + 0.007 for i in range(1000)]
    idle = sum(not any(begin <= point <= end for begin, end in busy) for point in points)
    assert sum(length for _, length in gaps) == pytest.approx(idle * 0.014, abs=0.4)


def test_short_pauses_are_no_gaps() -> None:
    assert idle_timespans([(1.0, 2.0), (2.1, 3.0)], 0.0, 4.0) == [(0.0, 1.0), (3.0, 1.0)]
    assert idle_timespans([(0.0, 4.0)], 0.0, 4.0) == []


@given(st.integers(0, 10**9), st.floats(0, 100), st.integers(1, 40))
def test_even_grants_are_all_bytes_within_the_iteration(num_bytes: int, seconds: float, count: int) -> None:
    grants = even_grants(num_bytes, seconds, count)
    assert sum(grant.num_bytes for grant in grants) == num_bytes
    assert all(0 <= grant.seconds <= seconds for grant in grants)
    assert max(g.num_bytes for g in grants) - min(g.num_bytes for g in grants) <= 1


@given(st.lists(st.floats(0.01, 2), min_size=1, max_size=5), st.integers(1, 10**6), st.sampled_from([0.0, 1e-4, 0.003]))
def test_gap_grants_are_all_bytes_in_gaps(lengths: list[float], num_bytes: int, alpha: float) -> None:
    """A gap never gets more than fits into it at that speed."""
    iteration = [(3.0 * place, length) for place, length in enumerate(lengths)]
    found, speed = profile([iteration]), 1e5
    grants = gap_grants(found, num_bytes, speed, alpha)
    assert sum(grant.num_bytes for grant in grants) == num_bytes
    room = {start: (length - alpha) * speed for start, length in iteration}
    for grant in grants:
        assert grant.num_bytes <= room[grant.seconds]
    places = [(grant.iteration, grant.seconds) for grant in grants]
    assert places == sorted(set(places))
    published = spread(found.spans, num_bytes, 2, Budget(speed, alpha, gamma=found.gamma))
    assert [grant.num_bytes for grant in grants] == [
        sum(chunk.length for chunk in span) for span in published.spans if span
    ]


def test_a_network_that_is_never_idle_has_no_grants() -> None:
    for length in (0.0, 1e-9):
        with pytest.raises(ValueError, match="never idle"):
            gap_grants(profile([[(0.0, length)]]), 10**6, 1e5)
    assert gap_grants(profile([[(0.0, 0.0)]]), 0, 1e5) == []


def test_even_grants_begin_when_they_are_offered() -> None:
    """And end as early as if they had been offered before."""
    grants = even_grants(100, 10.0, count=4, past_seconds=4.0)
    assert [grant.seconds for grant in grants] == [4.0, 5.0, 6.0, 7.0]
    assert [grant.seconds for grant in even_grants(3, 1.0, count=2, past_seconds=9.0)] == [9.0, 9.0]


def test_the_pacer_grants_what_is_offered_and_no_more() -> None:
    granted: list[int] = []
    done = threading.Event()

    def grant(num_bytes: int) -> None:
        granted.append(num_bytes)
        if sum(granted) >= 1600:
            done.set()

    pacer = Pacer(grant, every=1, watched=False)
    try:
        assert "evenly" in pacer.how
        pacer.offer(1600, None)
        assert done.wait(PATIENCE)
        time.sleep(0.02)
        assert sum(granted) == 1600
        pacer.offer(0, None)
        time.sleep(0.02)
        assert sum(granted) == 1600
    finally:
        pacer.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(gaps, "time", clock)
    return clock


def iterate(pacer: Pacer, clock: FakeClock, times: int, seconds: float) -> None:
    """Half of each iteration the lane is busy."""
    for _ in range(times):
        started = clock.perf_counter()
        clock.pass_by(seconds)
        pacer.note_busy(started, started + seconds / 2)
        pacer.note_step()


def test_the_pacer_profiles_the_lane(clock: FakeClock) -> None:
    pacer = Pacer(lambda num_bytes: None, every=1, watched=True)
    try:
        pacer.note_step()
        iterate(pacer, clock, PROFILED_ITERATIONS, 4.0)
        assert pacer.profile is not None
        assert pacer.idle_seconds == pytest.approx(2.0)
        assert pacer.iteration_seconds == pytest.approx(4.0)
        assert "idle timespans" in pacer.how
        iterate(pacer, clock, 20, 1.0)
        assert pacer.idle_seconds == pytest.approx(1.0), "no more than there is of an iteration by now"
    finally:
        pacer.close()


def test_iterations_that_take_another_time_are_profiled_anew(clock: FakeClock) -> None:
    pacer = Pacer(lambda num_bytes: None, every=1, watched=True)
    try:
        pacer.note_step()
        iterate(pacer, clock, PROFILED_ITERATIONS, 2.0)
        first = pacer.profile
        iterate(pacer, clock, 2 * PROFILED_ITERATIONS, 8.0)
        assert "anew" in pacer.how or pacer.profile is not first
        iterate(pacer, clock, PROFILED_ITERATIONS, 8.0)
        assert first is not None
        assert pacer.profile is not None
        assert sum(pacer.profile.spans) > 1.5 * sum(first.spans)
    finally:
        pacer.close()


def test_what_does_not_fit_an_iteration_waits_for_the_next_and_is_said_once(
    caplog: pytest.LogCaptureFixture, clock: FakeClock
) -> None:
    granted: list[int] = []
    pacer = Pacer(granted.append, every=1, watched=True)
    try:
        pacer.note_step()
        iterate(pacer, clock, PROFILED_ITERATIONS, 4.0)
        for _ in range(2):
            granted.clear()
            pacer.offer(1_000_000, bytes_per_second=1_000_000 / 4.0)  # 2 s are idle
            needed = pacer.iterations_needed
            assert needed >= 2
            time.sleep(0.02)
            assert sum(granted) < 1_000_000
            iterate(pacer, clock, needed, 4.0)
            wait_until(lambda: sum(granted) == 1_000_000)
        assert "of iteration 2" in pacer.schedule
        assert len([record for record in caplog.records if "versions in between are skipped" in record.message]) == 1
    finally:
        pacer.close()


def test_a_holder_that_has_no_shard_yet_ends_an_offer_and_not_the_pacer(clock: FakeClock) -> None:
    """One that came back refuses to say what is left, until this rank has registered: nothing was sent from then on."""
    granted: list[int] = []

    def revoke() -> int:
        raise ValueError("no shard is registered on this connection: call hello first")

    pacer = Pacer(granted.append, every=1, watched=True, revoke=revoke)
    try:
        pacer.note_step()
        iterate(pacer, clock, PROFILED_ITERATIONS, 4.0)
        for times in (1, 2):
            pacer.offer(100, bytes_per_second=1e6)
            clock.pass_by(2.0)  # the gap of 2 s begins in the middle
            pacer.note_step()
            wait_until(lambda times=times: granted == [100] * times or not pacer._thread.is_alive())
            iterate(pacer, clock, 1, 4.0)
            wait_until(lambda: not (pacer._grants and pacer._thread.is_alive()))
        assert granted == [100, 100]
        assert pacer._thread.is_alive()
    finally:
        pacer.close()


def test_ranks_with_one_holder_are_one_machine() -> None:
    holders = ["a:1", "a:1", "b:1", "b:1"]
    assert [holders_of(holders, 2)[rank][1:] for rank in range(4)] == [["b:1"], ["b:1"], ["a:1"], ["a:1"]]
    assert holders_of(["a:1", "a:1"], 1)[0] == ["a:1"]
    with pytest.raises(ValueError, match="3 replicas need 3 machines"):
        holders_of(holders, 3)


@given(st.integers(0, 10**9))
def test_what_fits_a_slot_asks_for_the_same_slot(num_bytes: int) -> None:
    room = room_bytes(num_bytes)
    assert room >= num_bytes
    assert room_bytes(room) == room


def test_a_pacer_knows_when_an_offer_should_be_through(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(gaps, "time", clock)
    grants: list[int] = []
    pacer = Pacer(grants.append, every=1, watched=False)
    assert pacer.seconds_left == 0.0
    pacer.note_step()
    clock.pass_by(1.0)
    pacer.note_step()
    pacer.offer(1_000_000, 500_000.0)
    assert pacer.seconds_left == pytest.approx(0.8 * 15 / 16 + 2.0 / 16), "the last even grant, and sending that"
    pacer.offer(0, 500_000.0)
    assert pacer.seconds_left == 0.0
    pacer.close()
