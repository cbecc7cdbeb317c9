"""What a lossless sum of dense gradients costs, and whether it pays. Pure numbers.

A coded sum has two halves: every rank pushes the code of a piece of its gradient to the
owner of the piece, and pulls the code of each sum. All seconds are of one rank, all ranks working at once.
"""

import math
from dataclasses import dataclass

from thinwire.comm.machine import Machine

TAKEN = 1.10
"""Least ratio of native to lossless seconds at which a native bucket becomes lossless."""
KEPT = 1.05
"""Least ratio at which a lossless bucket stays so: a bucket whose bits vary by a few per cent keeps its way."""
SEGMENT_BYTES = 1 << 20
"""Bytes of a piece, uncoded, that are coded while those before them travel."""


@dataclass(frozen=True)
class Code:
    """What the code of one kind of gradients achieves, as measured on samples of them.

    Args:
        push_bits, pull_bits: bits of a value of a rank's gradient, and of a sum.
        encode_byte_seconds, decode_byte_seconds: processor seconds of a byte, uncoded, of a rank's gradient; decoding
            includes the addition.
        encode_sum_byte_seconds, decode_sum_byte_seconds: the same of a sum.
        value_bits: bits of a value uncoded.
    """

    push_bits: float
    pull_bits: float
    encode_byte_seconds: float
    decode_byte_seconds: float
    encode_sum_byte_seconds: float
    decode_sum_byte_seconds: float
    value_bits: int = 32

    def sent_bytes(self, num_bytes: float, world_size: int) -> float:
        """Return the bytes that a rank sends for a bucket of ``num_bytes``, without frames of messages."""
        values = 8 * num_bytes / self.value_bits
        return (world_size - 1) / world_size * values * (self.push_bits + self.pull_bits) / 8

    def coding_seconds(self, num_bytes: float, world_size: int, cores: float = 1.0) -> float:
        """Return the seconds in which a rank with so many cores encodes and decodes, each on a thread of its own.

        It pushes and decodes n - 1 pieces of n, encodes one sum and decodes n - 1.
        """
        share, others = num_bytes / world_size, world_size - 1
        encoding = share * (others * self.encode_byte_seconds + self.encode_sum_byte_seconds)
        decoding = share * others * (self.decode_byte_seconds + self.decode_sum_byte_seconds)
        return max(encoding, decoding, (encoding + decoding) / cores)

    def describe(self) -> str:
        return f"{self.push_bits:.1f} + {self.pull_bits:.1f} of {2 * self.value_bits} bits a value"


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, the ranks of a host, which share its link, and the cores that these share."""

    world_size: int
    ranks_per_host: int = 1
    cores: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """Whether a bucket takes the lossless way, and why in one line; seconds of both ways, 0 if they do not matter."""

    is_lossless: bool
    reason: str
    native_seconds: float = 0.0
    lossless_seconds: float = 0.0


def native_seconds(num_bytes: float, world_size: int, link: Machine) -> float:
    """Return the seconds of the process group's own all-reduce."""
    sent_bytes = 2 * (world_size - 1) / world_size * num_bytes
    return sent_bytes * link.reduced_byte_seconds + 2 * (world_size - 1) * link.message_seconds


def lossless_seconds(num_bytes: float, ranks: Ranks, link: Machine, code: Code) -> float:
    """Return the seconds of a lossless sum.

    Coding overlaps the wire: the longer of the two counts, and of the other what its first and last segment need.
    """
    coding = code.coding_seconds(num_bytes, ranks.world_size, ranks.cores / ranks.ranks_per_host)
    wire = code.sent_bytes(num_bytes, ranks.world_size) * link.byte_seconds
    segments = max(1, math.ceil(num_bytes / ranks.world_size / SEGMENT_BYTES))
    return max(coding, wire) + min(coding, wire) / segments + 2 * link.round_seconds


def decide(num_bytes: float, ranks: Ranks, link: Machine, code: Code, was_lossless: bool = False) -> Verdict:
    """Return whether a bucket should be summed losslessly; the same on all ranks that know the same numbers."""
    if ranks.ranks_per_host >= ranks.world_size:
        return Verdict(False, "all ranks are on one host, where bytes cost nothing")
    native = native_seconds(num_bytes, ranks.world_size, link)
    return verdict(native, lossless_seconds(num_bytes, ranks, link, code), code, was_lossless)


def verdict(native: float, lossless: float, code: Code, was_lossless: bool = False) -> Verdict:
    """Return the verdict on two predicted or measured times, in seconds."""
    is_lossless = native >= (KEPT if was_lossless else TAKEN) * lossless
    gain = "" if is_lossless else f", less than {100 * (TAKEN - 1):.0f} % to gain" if native > lossless else ", slower"
    seconds = f"{_format(lossless)} instead of {_format(native)} on this link"
    return Verdict(is_lossless, f"{code.describe()}; {seconds}{gain}", native, lossless)


def _format(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
