"""Schedule of a checkpoint's chunks over the network-idle timespans: Algorithm 2 of GEMINI (SOSP'23), as published.

Timespans are filled with chunks no larger than a sub-buffer, each of which costs a latency. A holder cuts and pipelines
what it sends by itself, so a training grants whole timespans: `thinwire.checkpoint.pacing.gaps.gap_grants`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.checkpoint.pacing.gaps import GAMMA

MAX_CHUNKS = 100_000


@dataclass(frozen=True)
class Budget:
    """Costs of sending, and limits on the part of a timespan and of memory to use.

    Sending n bytes costs alpha_seconds + n / bytes_per_second.

    Args:
        bytes_per_second: bandwidth of the link, in one direction.
        alpha_seconds: latency of each chunk of any size.
        gamma: the part of each timespan that is used, in (0, 1].
        buffer_bytes: buffer of the receiver, for chunks on their way to host memory.
        sub_buffers: parts of that buffer: one is received into while another is copied. A chunk fits into one.

    Raises:
        ValueError: a value that is not positive (alpha_seconds may be 0), or gamma above 1.
    """

    bytes_per_second: float
    alpha_seconds: float = 0.0
    gamma: float = GAMMA
    buffer_bytes: int = 128 << 20
    sub_buffers: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < math.inf or not 0 <= self.alpha_seconds < math.inf:
            raise ValueError(
                f"a link of {self.bytes_per_second} bytes/s and {self.alpha_seconds} s a chunk: measure it"
            )
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma}: the used part of a timespan is above 0 and at most 1")
        if not 1 <= self.sub_buffers <= self.buffer_bytes:
            raise ValueError(f"{self.buffer_bytes} bytes cannot be cut into {self.sub_buffers} sub-buffers")

    @property
    def chunk_bytes(self) -> int:
        """Size of the largest chunk in bytes."""
        return self.buffer_bytes // self.sub_buffers

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds to send one chunk."""
        return self.alpha_seconds + num_bytes / self.bytes_per_second

    def bytes_within(self, seconds: float) -> int:
        """Return the size of the largest chunk that is sent within ``seconds``; 0 if there is none."""
        sending = min(seconds - self.alpha_seconds, self.seconds(self.chunk_bytes))
        return min(self.chunk_bytes, max(0, math.floor(sending * self.bytes_per_second)))


@dataclass(frozen=True)
class Chunk:
    """A range of a payload on its way to one holder.

    ``replica`` is the index of the receiver among the holders of the shard (`placement`): 1 is the first peer.
    """

    replica: int
    offset: int
    length: int


@dataclass(frozen=True)
class TransferPlan:
    """The chunks of every timespan, in sending order, and the number of iterations in which they are sent."""

    spans: tuple[tuple[Chunk, ...], ...]
    iterations: int = 1

    @property
    def num_bytes(self) -> int:
        return sum(chunk.length for chunks in self.spans for chunk in chunks)

    def seconds(self, budget: Budget) -> tuple[float, ...]:
        """Return the seconds that the chunks of each timespan cost."""
        return tuple(sum(budget.seconds(chunk.length) for chunk in chunks) for chunks in self.spans)


def partition(spans: Sequence[float], payload_bytes: int, replicas: int, budget: Budget) -> TransferPlan:
    """Plan one checkpoint within one iteration: Algorithm 2.

    The last timespan gets all remaining bytes, even if they exceed its length, so that a checkpoint is always complete
    when the iteration ends. `spread` never lets one run over.

    Args:
        spans: seconds of each network-idle timespan of an iteration, in their order.
        payload_bytes: size of the shard.
        replicas: copies of it, including the machine's own, which is not sent.

    Returns:
        a plan with ``len(spans)`` timespans: every byte once for each of the replicas 1 to ``replicas - 1``.

    Raises:
        ValueError: no timespan or a negative one, a negative size, less than one replica, or more than 100,000 chunks.

    Example:
        >>> partition([1.0, 1.0], payload_bytes=150, replicas=2, budget=Budget(bytes_per_second=100, gamma=1.0)).spans
        ((Chunk(replica=1, offset=0, length=100),), (Chunk(replica=1, offset=100, length=50),))
    """
    _check(spans, payload_bytes, replicas, budget)
    return _fill((*spans[:-1], math.inf), payload_bytes, replicas, budget)[0]


def spread(spans: Sequence[float], payload_bytes: int, replicas: int, budget: Budget) -> TransferPlan:
    """Plan one checkpoint over the iterations that it needs, without any timespan running over.

    Returns:
        a plan with ``iterations`` times ``len(spans)`` timespans; 1 iteration if all fits into one.

    Raises:
        ValueError: as `partition` does; or no timespan is long enough for a single byte: the network is never idle.

    Example:
        >>> spread([1.0, 1.0], payload_bytes=450, replicas=2, budget=Budget(bytes_per_second=100, gamma=1.0)).iterations
        3
    """
    _check(spans, payload_bytes, replicas, budget)
    chunks: list[tuple[Chunk, ...]] = []
    sent, num_chunks, to_send = 0, 0, (replicas - 1) * payload_bytes
    while True:
        plan, sent = _fill(spans, payload_bytes, replicas, budget, sent)
        chunks.extend(plan.spans)
        num_chunks += sum(map(len, plan.spans))
        iterations = len(chunks) // len(spans)
        if sent == to_send:
            return TransferPlan(tuple(chunks), iterations)
        if plan.num_bytes == 0:
            raise ValueError(
                f"none of the {len(spans)} timespans, {max(spans):.2g} s at most, is long enough to send anything:"
                " the network is never idle; send without gaps, or make checkpoints rarer"
            )
        if num_chunks > MAX_CHUNKS:
            raise ValueError(
                f"{to_send:,} bytes need more than {MAX_CHUNKS:,} chunks: {iterations} iterations sent {sent:,};"
                " make sub-buffers larger or send without gaps"
            )


def _check(spans: Sequence[float], payload_bytes: int, replicas: int, budget: Budget) -> None:
    if not spans or min(spans) < 0 or not all(map(math.isfinite, spans)):
        raise ValueError(f"timespans {list(spans)[:8]}: at least one, in seconds, none negative")
    if payload_bytes < 0 or replicas < 1:
        raise ValueError(f"{replicas} replicas of {payload_bytes} bytes: at least 1 of at least 0")
    if (replicas - 1) * -(-payload_bytes // budget.chunk_bytes) > MAX_CHUNKS:
        raise ValueError(
            f"{payload_bytes:,} bytes in chunks of {budget.chunk_bytes:,} are more than {MAX_CHUNKS:,} chunks:"
            " pass larger buffer_bytes"
        )


def _fill(
    spans: Sequence[float], payload_bytes: int, replicas: int, budget: Budget, sent: int = 0
) -> tuple[TransferPlan, int]:
    """Chunks from byte ``sent`` on, replica after replica; and the index of the first byte that is left."""
    filled = []
    for span in spans:
        chunks, seconds = [], budget.gamma * span
        while sent < (replicas - 1) * payload_bytes:
            peer, offset = divmod(sent, payload_bytes)
            length = min(budget.bytes_within(seconds), payload_bytes - offset)
            if length == 0:
                break
            chunks.append(Chunk(peer + 1, offset, length))
            sent += length
            seconds -= budget.seconds(length)
        filled.append(tuple(chunks))
    return TransferPlan(tuple(filled)), sent
