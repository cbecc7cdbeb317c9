"""Statistics of a method's traffic, and the interface that returns them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Account:
    """Totals of one rank since the method was attached. None stands for a value that a method cannot report.

    ``groups`` is the number of groups in which gradients travel now, and ``tensor_missing_rate`` the part of the
    tensors of which a sparsifier chose nothing. An outer loop has ``rounds``, and tells itself how long the training
    thread waited (``exposed_seconds``): its rounds end in the optimizer's step, not in backward. What sums gradients
    losslessly tells the bits of a value, push plus pull.
    """

    encode_seconds: float | None = None
    wire_seconds: float | None = None
    decode_seconds: float | None = None
    sent_bytes: float | None = None
    groups: float | None = None
    tensor_missing_rate: float | None = None
    exposed_seconds: float | None = None
    rounds: float | None = None
    lossless_bits_per_value: float | None = None

    @classmethod
    def of_stats(cls, stats: Mapping[str, float], **others: float) -> Self:
        """Return what the statistics of a `thinwire.Synchronizer` or of an outer loop say, and others."""
        encode, decode = (
            stats.get(f"compress/{what}_seconds", 0.0) + stats.get(f"lossless/{what}_seconds", 0.0)
            for what in ("encode", "decode")
        )
        wire = stats.get("compress/wire_seconds", stats["comm/seconds"] - encode - decode)
        groups, missing = stats.get("plan/groups"), stats.get("compress/tensor_missing_rate")
        bits = stats.get("lossless/bits_per_value")
        known = {"groups": groups, "tensor_missing_rate": missing, "lossless_bits_per_value": bits}
        return cls(encode, wire, decode, stats["comm/bytes_sent"], **known, **others)


class RunningMethod(ABC):
    """Base of methods attached to a model."""

    @abstractmethod
    def account(self) -> Account:
        """Return the statistics so far; called after each step."""

    def judged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the parameters to judge: its own, except under an outer loop."""
        return nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients of a plain module are added up and stay here; under DDP it is DDP's."""
        return nullcontext()

    def finish(self) -> None:  # noqa: B027  most have nothing to do
        """Give all ranks the same parameters; called on all ranks after the last step."""

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Detach the method; called on all ranks after `finish`."""


def covered_seconds(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals: simultaneous transfers count once."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def counter_of(interface: str | None) -> Callable[[], int | None]:
    """Return a function that says how many bytes an interface has sent since now; None where there is none."""
    before = 0 if interface is None else interface_bytes_sent(interface)
    return lambda: None if interface is None else interface_bytes_sent(interface) - before


def interface_bytes_sent(interface: str) -> int:
    """Return the bytes that an interface of this process's host has sent so far.

    Acknowledgements and Ethernet, IP and TCP headers are included; a segment of up to 64 KB counts one header.

    Raises:
        ValueError: there is no such interface.
    """
    return bytes_sent_in(Path("/proc/thread-self/net/dev").read_text(), interface)


def bytes_sent_in(table: str, interface: str) -> int:
    """Return the bytes that an interface has sent by the text of ``/proc/.../net/dev``; errors as above."""
    for line in table.splitlines():
        name, separator, counters = line.partition(":")
        if separator and name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"this host has no interface {interface!r}")
