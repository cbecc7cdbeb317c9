"""The network is busy when the counters of sent bytes rise fast, whoever sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import FakeClock, wait_until
from thinwire.checkpoint.pacing import gaps
from thinwire.checkpoint.pacing.counters import BusySampler, TransmitCounters, busy_periods, interface_to
from thinwire.checkpoint.pacing.gaps import PROFILED_ITERATIONS, Pacer, profile

TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 111 1 0 0 0 0 0 0 {lo} 1 0 0 0 0 0 0
  eth0: 222 2 0 0 0 0 0 0 {eth0} 2 0 0 0 0 0 0
 eth10: 333 3 0 0 0 0 0 0 {eth10} 3 0 0 0 0 0 0
"""


def tree(root: Path, lo: int = 0, eth0: int = 0, eth10: int = 0, ports: tuple[int, ...] = ()) -> None:
    """A host's counters, as the kernel shows them; written in place, because they are read through open files."""
    table = root / "proc/thread-self/net/dev"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(TABLE.format(lo=lo, eth0=eth0, eth10=eth10))
    for number, words in enumerate(ports):
        port = root / f"sys/class/infiniband/mlx5_{number}/ports/1/counters/port_xmit_data"
        port.parent.mkdir(parents=True, exist_ok=True)
        port.write_text(f"{words}\n")


@pytest.fixture
def counters(tmp_path: Path) -> Iterator[Callable[[str], TransmitCounters]]:
    with ExitStack() as stack:

        def make(interface: str) -> TransmitCounters:
            made = TransmitCounters(interface, tmp_path)
            stack.callback(made.close)
            return made

        yield make


def test_only_the_interface_asked_for_counts_and_all_ports_of_infiniband(
    tmp_path: Path, counters: Callable[[str], TransmitCounters]
) -> None:
    tree(tmp_path, lo=7, eth0=1000, eth10=50)
    eth0, others = counters("eth0"), counters("")
    assert (eth0.read(), others.read(), counters("lo").read()) == (1000, 1050, 7)
    tree(tmp_path, lo=8, eth0=2000, eth10=60)
    assert (eth0.read(), others.read()) == (2000, 2060), "an open counter goes on counting"
    assert eth0.name == "the transmit counters of eth0"
    tree(tmp_path, eth0=1, ports=(10, 20))
    with_ports = counters("eth0")
    assert with_ports.read() == 1 + 4 * 30
    assert with_ports.name == "the transmit counters of eth0 and 2 InfiniBand ports"


def test_a_host_without_counters_has_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="net/dev"):
        TransmitCounters("eth0", tmp_path)


def test_the_counters_of_this_host_rise_by_what_is_sent() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no such host.invalid") == ""
    loopback = TransmitCounters("lo")
    before = loopback.read()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(bytes(5000), ("127.0.0.1", 9))
    assert loopback.read() - before >= 5000
    loopback.close()


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(10**6, 10**10), st.integers(0, 499))
def test_bursts_are_found_and_little_traffic_is_none(bursts: list[bool], speed: int, other: int) -> None:
    samples, total = [(0.0, 0)], 0  # a burst has 2,000 bytes and more in 2 ms, and 500 are the least that counts
    for number, burst in enumerate(bursts):
        total += speed // 500 if burst else other
        samples.append((2e-3 * (number + 1), total))
    busy = busy_periods(samples)
    wanted = [(2e-3 * n, 2e-3 * (n + 1)) for n, burst in enumerate(bursts) if burst]
    assert [edge for period in busy for edge in period] == pytest.approx([edge for each in wanted for edge in each])
    assert busy_periods(samples[:1]) == busy_periods([]) == []


class FakeSampler(BusySampler):
    """What a sampler saw of iterations of 1 s, busy in their last 0.4 s."""

    def __init__(self, clock: FakeClock, counters: TransmitCounters) -> None:
        self.counters, self.clock, self.on = counters, clock, True

    def switch(self, on: bool) -> None:
        self.on = on

    def take(self) -> list[tuple[float, int]]:
        now = self.clock.now
        return [(now - 1 + 0.01 * n, 10**7 * max(0, n - 60)) for n in range(101)] if self.on else []

    def close(self) -> None:
        pass


def test_the_pacer_profiles_by_the_counters_without_the_bytes_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters: Callable[[str], TransmitCounters]
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(gaps, "time", clock)
    tree(tmp_path)
    sampler = FakeSampler(clock, counters("eth0"))
    pacer = Pacer(lambda num_bytes: None, every=1, watched=False, revoke=lambda: 0, sampler=sampler)
    try:
        pacer.note_step()
        for number in range(2 * PROFILED_ITERATIONS):
            assert pacer.profile is None
            assert pacer.is_profiling
            clock.pass_by(1.0)
            pacer.note_step(loaded=number % 2 == 0)
        assert pacer.profile is not None
        assert pacer.profile.spans == pytest.approx([0.6])
        assert not pacer.is_profiling
        assert not sampler.on, "it costs nothing from now on"
        assert pacer.how == "in 1 idle timespans of each iteration, by the transmit counters of eth0"
    finally:
        pacer.close()


class FakeLink:
    """A holder that sends at some speed while it has grants, by a clock that the test moves."""

    def __init__(self, to_send: int) -> None:
        self.to_send, self.granted, self.withdrawn = to_send, 0, 0
        self.lock = threading.Lock()

    def grant(self, num_bytes: int) -> None:
        with self.lock:
            self.granted += num_bytes

    def send(self, at_most: int) -> int:
        with self.lock:
            sent = min(at_most, self.granted, self.to_send)
            self.granted, self.to_send = self.granted - sent, self.to_send - sent
            return sent

    def revoke(self) -> int:
        with self.lock:
            self.withdrawn, self.granted = self.withdrawn + self.granted, 0
            return self.to_send


def test_what_a_gap_did_not_send_waits_for_the_next_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link has half the speed that was measured: nothing is granted while the network is busy, and all arrives."""
    clock = FakeClock()
    monkeypatch.setattr(gaps, "time", clock)
    link = FakeLink(1000)
    pacer = Pacer(link.grant, every=1, watched=True, revoke=link.revoke)
    pacer.profile = profile([[(0.0, 1.0), (2.0, 1.0)]])  # of 4 s; at 400 bytes/s 360 fit into a gap
    pacer._profiled_seconds, pacer._lengths = 4.0, [4.0] * 5
    try:
        pacer.note_step()
        pacer.offer(1000, bytes_per_second=400.0)
        assert pacer.iterations_needed == 2
        sent_busy = 0
        for _ in range(6):
            for quarter in range(16):
                in_gap = quarter % 8 < 4
                if quarter % 8 == 0 and link.to_send:
                    wait_until(lambda: link.granted > 0)
                if quarter % 8 == 4:
                    wait_until(lambda: link.granted == 0)
                sent = link.send(50)
                sent_busy += 0 if in_gap else sent
                clock.pass_by(0.25)
                with pacer._changed:
                    pacer._changed.notify_all()
            pacer.note_step()
        assert (link.to_send, sent_busy) == (0, 0)
        assert link.withdrawn > 0
    finally:
        pacer.close()


def test_a_newer_offer_is_not_replaced_by_the_end_of_an_older_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(gaps, "time", clock)
    granted: list[int] = []
    entered, go_on = threading.Event(), threading.Event()

    def revoke() -> int:
        entered.set()
        assert go_on.wait(20)
        return 77

    pacer = Pacer(granted.append, every=1, watched=True, revoke=revoke)
    pacer.profile = profile([[(0.0, 1.0), (2.0, 1.0)]])
    pacer._profiled_seconds, pacer._lengths = 4.0, [4.0] * 5
    try:
        pacer.note_step()
        pacer.offer(100, bytes_per_second=1000.0)
        wait_until(lambda: granted == [100])
        clock.pass_by(1.5)
        with pacer._changed:
            pacer._changed.notify_all()
        assert entered.wait(20)
        pacer.offer(0, bytes_per_second=1000.0)
        go_on.set()
        clock.pass_by(10)
        with pacer._changed:
            pacer._changed.notify_all()
        wait_until(lambda: not pacer._grants)
        assert granted == [100]
    finally:
        pacer.close()
