"""What a method tells of its traffic, and how to ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Account:
    """Totals of one rank since the method was attached. None is what a method cannot tell.

    ``groups`` is how many groups gradients travel in now, and ``tensor_missing_rate`` the part of the tensors of which
    a sparsifier chose nothing.
    """

    encode_seconds: float | None = None
    wire_seconds: float | None = None
    decode_seconds: float | None = None
    sent_bytes: float | None = None
    groups: float | None = None
    tensor_missing_rate: float | None = None


class Attached(Protocol):
    """A method on a model."""

    def account(self) -> Account:
        """Asked after each step."""
        ...

    def close(self) -> None:
        """Called on all ranks after the last step."""
        ...


def covered_seconds(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals: what is in flight together counts once."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def interface_bytes_sent(interface: str) -> int:
    """Bytes that an interface of this process's host has sent so far: acknowledgements and Ethernet, IP and TCP headers
    included, of which a segment of up to 64 KB counts one.

    Raises:
        ValueError: there is no such interface.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, found, counters = line.partition(":")
        if found and name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"this host has no interface {interface!r}")
