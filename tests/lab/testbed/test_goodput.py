"""The two ends of a stream that measures a link, on a clock that stands until bytes arrive."""

from __future__ import annotations

import socket
import threading

import pytest

from thinwire.lab.testbed import goodput


def test_the_rate_is_of_what_arrived_behind_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read ends 0.1 s after the one before: the bytes of the warm-up and its seconds do not count."""
    now, sizes = 0.0, []

    class Receiver:
        def recv_into(self, buffer: bytearray) -> int:
            nonlocal now
            now += 0.1
            sizes.append(10**9 if now < goodput._WARM_UP_SECONDS + 0.05 else 125_000)
            return sizes[-1]

    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now)
    rate = goodput.receive_rate_mbit(Receiver(), 1.0)  # type: ignore[arg-type]
    assert rate == pytest.approx(10.0), "1 Mbit every 0.1 s"
    assert 10**9 in sizes


def test_a_sender_ends_when_its_stream_is_hung_up_at_either_end() -> None:
    for ends_here in (True, False):
        sender, receiver = socket.socketpair()
        thread = threading.Thread(target=goodput.send_until_closed, args=(sender,), daemon=True)
        thread.start()
        assert receiver.recv(1000)
        if ends_here:
            goodput.hang_up(sender)
        else:
            receiver.close()
        thread.join(60.0)
        assert not thread.is_alive()
        goodput.hang_up(sender)  # again is no error
        sender.close()
        receiver.close()
