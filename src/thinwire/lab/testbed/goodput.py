"""The two ends of a TCP stream that measures a link."""

import contextlib
import socket
import time

_WARM_UP_SECONDS = 0.3  # empties the token buckets


def send_until_closed(sender: socket.socket) -> None:
    payload = bytes(256 * 1024)
    with contextlib.suppress(OSError):  # hung up: the measurement is over
        while True:
            sender.sendall(payload)


def hang_up(sender: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sender.shutdown(socket.SHUT_RDWR)


def receive_rate_mbit(receiver: socket.socket, seconds: float) -> float:
    buffer = bytearray(1024 * 1024)
    start = now = time.perf_counter()
    warm = start + _WARM_UP_SECONDS
    while now < warm:
        receiver.recv_into(buffer)
        now = time.perf_counter()
    begin, received = now, 0
    while now < begin + seconds:
        received += receiver.recv_into(buffer)
        now = time.perf_counter()
    return received * 8 / 1e6 / (now - begin)
