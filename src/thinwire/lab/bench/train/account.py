"""Statistics of a method's traffic, and the interface that returns them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path


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
