"""Sums of dense tensors in rank order, whose values travel by a code that gives back every bit.

Rank r owns the r-th piece of a tensor. Every rank pushes the code of each piece to its owner, which decodes and adds in
rank order, and sends the code of the sum to all. Pieces are cut into segments: while one is on the wire, the next is
encoded by the thread that sends, and an earlier one is decoded and added by the caller's.

A message says its own size, which no rank knows before: receives are posted for the size of the values themselves,
which no code exceeds. So a failure in the middle cannot be reported: the rank hangs up, and the others fail at once.

The tensor may be on a device: it stays there, is coded and added there, to the same bits, and only codes are copied to
the host and back. Both threads work on the stream of the lane.
"""

from __future__ import annotations

import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import add

import torch
from torch import Tensor

from thinwire.comm.channel import Channel, Subject
from thinwire.comm.frames import frame_bytes
from thinwire.observe.step import Phase
from thinwire.rows import floats
from thinwire.sums import owners

SEGMENT_VALUES = 2 * floats.CHUNK_VALUES
"""Number of values in a message, uncoded 256 KiB of float32. On 8 hosts at 100 Mbit/s a step of a gpt with 4.6 MB of
gradients took 0.490 s with half of it and 0.512 s with four times as many: sums start to come back later. To cut small
buckets into four segments each took 0.46 to 0.51 s where this takes 0.42 to 0.44: a message costs 0.2 ms of a core."""
SEGMENT_VALUES_OF_A_DEVICE = 128 * floats.CHUNK_VALUES
"""The same for a tensor on a device, 16 MiB of float32: a message costs both its ends ten launches and four waits, some
200 us by the assumptions of docs/gpu.md."""
LEAST_VALUES = 4096
"""Fewest values of a message that are encoded: for fewer the code takes longer than their bytes on slow links."""
_UNIT_VALUES = 64
"""Pieces begin at multiples of this many values, so that their memory is aligned to cache lines."""


@dataclass
class Half:
    """What one half of the sums took on this rank: the push of gradients, or the pull of sums.

    Args:
        values, num_bytes: values that were encoded or arrived, each counted once, and the bytes of their messages.
        encoded, encode_seconds: values that this rank encoded, and the seconds for it.
        decoded, decode_seconds: values that it decoded, and the seconds for it; a push is added too.
    """

    values: int = 0
    num_bytes: int = 0
    encoded: int = 0
    encode_seconds: float = 0.0
    decoded: int = 0
    decode_seconds: float = 0.0

    @property
    def bits(self) -> float:
        """Bits of a value on the wire, frames of messages included."""
        return 8.0 * self.num_bytes / self.values if self.values else 0.0

    def __add__(self, other: Half) -> Half:
        return Half(*map(add, vars(self).values(), vars(other).values()))  # astuple makes 50 calls


@dataclass
class SumReport:
    """What sums sent and took on this rank; each sum adds to it.

    Args:
        values, num_bytes: values that were summed, and their bytes as they are.
        predicted_bytes: bytes that this rank was to send, estimated from samples before anything was encoded.
        listener: called with phase, start and end (`time.perf_counter`) of each stretch of work and of waiting.
    """

    values: int = 0
    num_bytes: int = 0
    predicted_bytes: float = 0.0
    push: Half = field(default_factory=Half)
    pull: Half = field(default_factory=Half)
    listener: Callable[[Phase, float, float], None] | None = None

    @property
    def bits(self) -> float:
        """Bits of a value that is pushed once and pulled once: 64 for float32 as it is."""
        return self.push.bits + self.pull.bits

    def add(self, other: SumReport) -> None:
        """Add what other sums took."""
        self.values, self.num_bytes = self.values + other.values, self.num_bytes + other.num_bytes
        self.predicted_bytes += other.predicted_bytes
        self.push, self.pull = self.push + other.push, self.pull + other.pull

    def book(self, phase: Phase, started: float) -> float:
        """Return the seconds since ``started``, which were spent in a phase."""
        ended = time.perf_counter()
        if self.listener is not None:
            self.listener(phase, started, ended)
        return ended - started


@dataclass
class Loads:
    """The bytes that segments of a tensor took in its last sum: all ranks had the same messages, so all know them.

    Args:
        ends: where the segments end.
        weights: what they weigh, in bytes; to code values counts, too, so that no piece has too many that are zero.
    """

    ends: Sequence[int] = ()
    weights: Sequence[int] = ()

    def __str__(self) -> str:
        return f"cut by {zlib.crc32(repr((self.ends, self.weights)).encode()):08x}" if self.ends else "equal"

    def cut(self, numel: int, count: int) -> list[int]:
        """Return the ends of so many segments that weigh the same, in integers, on which all processors agree."""
        if not self.ends or self.ends[-1] != numel:
            return [numel * number // count for number in range(count + 1)]
        sums, ends = [*accumulate(self.weights, initial=0)], [0, *self.ends]

        def end(weight: int) -> int:
            index = bisect_right(sums, weight) - 1
            return ends[index] + (weight - sums[index]) * (ends[index + 1] - ends[index]) // self.weights[index]

        return [*(end(sums[-1] * number // count) for number in range(count)), numel]


def dealt(numel: int, world_size: int, segment: int = 0, loads: Loads | None = None) -> list[list[slice]]:
    """Return the segments of a flat tensor that each rank owns, of at most about ``segment`` values.

    They are dealt in rounds, so that all ranks get some of the values that need most bits. The sums of the first
    round are on their way back while later segments are on their way to owners. After the first sum they are cut by
    ``loads``: of a gpt under autocast the busiest of 8 ranks sent 9 % more than the mean of all.
    """
    count = world_size * max(1, -(-numel // (world_size * (segment or SEGMENT_VALUES))))
    *ends, _ = (loads or Loads()).cut(numel, count)
    ends = [*(min(numel, _UNIT_VALUES * round(end / _UNIT_VALUES)) for end in ends), numel]
    cuts = [slice(start, stop) for start, stop in pairwise(ends)]
    return [cuts[rank::world_size] for rank in range(world_size)]


def subject(name: str, description: str, tensor: Tensor, loads: object = "equal") -> Subject:
    """Return the subject of a sum of a tensor: frames travel before it is compared, so their size is part of it."""
    return Subject(name, f"{description}, in segments of {_segment_values(tensor)}, {loads}")


def _segment_values(tensor: Tensor) -> int:
    return SEGMENT_VALUES_OF_A_DEVICE if tensor.is_cuda else SEGMENT_VALUES


def begin(
    tensor: Tensor,
    channel: Channel,
    scale: float = 1.0,
    report: SumReport | None = None,
    out: Tensor | None = None,
    codes: bool = True,
    working: Callable[[], AbstractContextManager[object]] = nullcontext,
    loads: Loads | None = None,
) -> Callable[[], int]:
    """Begin to sum a contiguous tensor over all ranks in place, times ``scale``; return a function that completes it.

    All ranks get the same bits, those of a sum in rank order: of float32 and float64 ``((t0 + t1) + t2) * scale``, of
    sixteen-bit values the same in float32, rounded once. Call it on all ranks after `Channel.open`, which has compared
    dtype and shape. For what the function raises, see `owners.begin`.

    Args:
        tensor: float16, bfloat16, float32 or float64.
        report: counts what the sum takes.
        out: [k], for the part of this rank in the sum of tensors [n * k]: elements r * k to (r + 1) * k on rank r.
            The tensor is left as it is; ``out`` may be that part of it.
        codes: whether values travel coded where that pays; else as they are.
        working: returns the context in which the thread that sends may use a tensor of a device.
        loads: of the last sum of this tensor; replaced by those of this one.
    """
    flat = tensor.view(-1)
    if channel.world_size == 1:
        return lambda: _scaled(flat, scale, flat if out is None else out.view(-1))
    segment = _segment_values(flat)
    cuts = dealt(flat.numel(), channel.world_size, segment, loads)
    if out is not None:
        size = out.numel()
        assert flat.numel() == channel.world_size * size, "equal parts"
        cuts = _equal_parts(size, channel.world_size, segment)
    report, out = report or SumReport(), None if out is None else out.view(-1)
    code = _Floats(flat, cuts, channel, scale, report, out, LEAST_VALUES if codes else flat.numel() + 1, working)
    complete = owners.begin(code, channel, has_pulls=out is None)

    def finish() -> int:
        code.predict()
        sent = complete()
        report.pull += code.arrived
        if loads is not None and out is None:
            loads.ends, loads.weights = code.loads()
        return sent

    return finish


def begin_all_gather(flat: Tensor, channel: Channel) -> Callable[[], int]:
    """Begin to give all ranks the part of each, in a code that loses nothing; see `owners.begin`.

    Args:
        flat: [n * k], contiguous, on the CPU; rank r has elements r * k to (r + 1) * k, and gets the others.
    """
    cuts = _equal_parts(flat.numel() // channel.world_size, channel.world_size)
    return owners.begin(_Gathered(flat, cuts, channel), channel)


def begin_broadcast(flat: Tensor, channel: Channel, source: int) -> Callable[[], int]:
    """Begin to give all ranks what one has, in a code that loses nothing; see `owners.begin`.

    The source sends each owner its piece, and owners send theirs to all: nearly twice the tensor leaves the source
    however many ranks there are, where a tree sends it log2(n) times.

    Args:
        flat: contiguous, on the CPU.
    """
    return owners.begin(_Broadcast(flat, source, channel), channel)


def _equal_parts(size: int, world_size: int, segment: int = 0) -> list[list[slice]]:
    """Return the segments of each rank, of which each owns ``size`` values."""
    segment = segment or SEGMENT_VALUES
    ends = [slice(start, min(start + segment, size)) for start in range(0, size, segment)]
    return [[_shifted(end, rank * size) for end in ends] for rank in range(world_size)]


def _scaled(values: Tensor, scale: float, out: Tensor) -> int:
    torch.mul(values, scale, out=out)
    return 0


@dataclass(eq=False)
class _Floats:
    """The code of a sum: values by a code that loses nothing, where that pays."""

    flat: Tensor
    cuts: Sequence[Sequence[slice]]
    channel: Channel
    scale: float = 1.0
    report: SumReport = field(default_factory=SumReport)
    out: Tensor | None = None
    least_values: int = field(default_factory=lambda: LEAST_VALUES)
    working: Callable[[], AbstractContextManager[object]] = nullcontext

    def __post_init__(self) -> None:
        self.report.values += self.flat.numel()
        self.report.num_bytes += self.flat.nbytes
        self.arrived = Half()  # sums of others, counted apart: another thread counts those that it encodes
        self.rank, self.ranks = self.channel.rank, range(self.channel.world_size)
        self.segments = [len(cut) for cut in self.cuts]
        self.is_narrow = self.flat.element_size() == 2
        self.sums: dict[int, int] = {}  # bytes of the sum of each segment, by its end

    def loads(self) -> tuple[list[int], list[int]]:
        """Return where segments end, and what they weigh; once all sums are there."""
        ends = sorted(self.sums)
        sizes = [(stop - start) * self.flat.element_size() for start, stop in pairwise([0, *ends])]
        return ends, [self.sums[end] + size // 16 for end, size in zip(ends, sizes, strict=True)]

    def predict(self) -> None:
        """Estimate the bytes of the pushes."""
        bits = self._bits(self.flat)
        pushed = (cut for owner in self.ranks if owner != self.rank for cut in self.cuts[owner])
        self.report.predicted_bytes += sum(self._message_bytes(cut.stop - cut.start, bits) for cut in pushed)

    def most_pushed(self, source: int, owner: int, number: int) -> int:
        return self.most_pulled(owner, number)

    def most_pulled(self, owner: int, number: int) -> int:
        return self._values(owner, number).nbytes

    def push(self, owner: int, number: int) -> Tensor:
        with self.working():
            return self._encoded(self._values(owner, number), self.report.push)

    def add(self, number: int, arriving: owners.Arriving) -> Tensor:
        """Return the sum of a segment of this rank's piece, added as its parts arrive; scaled if it gets rounded."""
        own, parts = self._values(self.rank, number), iter(arriving)
        total = torch.empty_like(own, dtype=torch.float32 if self.is_narrow else own.dtype)
        part = torch.empty_like(own)
        for source in self.ranks:
            started = time.perf_counter()
            if source != self.rank:
                started += self._decoded(next(parts)[1], part, self.report.push)
            values = own if source == self.rank else part
            total.add_(values) if source else total.copy_(values)
            self.report.push.decode_seconds += self.report.book(Phase.DECOMPRESS, started)
        total = total.mul_(self.scale).to(own.dtype) if self.is_narrow else total
        if self.out is not None:
            cut, first = self.cuts[self.rank][number], self.cuts[self.rank][0]
            self._keep(self.out[_shifted(cut, -first.start)], total)
        return total

    def pull(self, number: int, total: Tensor) -> Tensor:
        with self.working():
            message = self._encoded(total, self.report.pull)
            self.sums[self.cuts[self.rank][number].stop] = frame_bytes(message.numel())
            bits = self._bits(total)
            self._keep(self._values(self.rank, number), total)
        self.report.predicted_bytes += (len(self.ranks) - 1) * self._message_bytes(total.numel(), bits)
        return message

    def take(self, owner: int, number: int, receive: Callable[[], Tensor]) -> None:
        total, half = self._values(owner, number), self.arrived
        started = time.perf_counter()
        before = half.num_bytes
        started += self._decoded(receive, total, half)
        self.sums[self.cuts[owner][number].stop] = half.num_bytes - before
        half.values += total.numel()
        self._keep(total, total)
        half.decode_seconds += self.report.book(Phase.DECOMPRESS, started)

    def _values(self, owner: int, number: int) -> Tensor:
        return self.flat[self.cuts[owner][number]]

    def _keep(self, out: Tensor, total: Tensor) -> None:
        """Store a sum times the scale, in one pass; what is rounded was scaled before."""
        out.copy_(total) if self.is_narrow or self.scale == 1.0 else torch.mul(total, self.scale, out=out)

    def _bits(self, values: Tensor) -> float:
        return floats.bits_per_value(values) if values.numel() >= self.least_values else 8.0 * values.element_size()

    def _message_bytes(self, numel: int, bits: float) -> float:
        num_bytes = numel * self.flat.element_size()
        coded_bytes = round(bits * numel / 8) if numel >= self.least_values else num_bytes
        return frame_bytes(min(num_bytes, coded_bytes)) if numel else 0

    def _encoded(self, values: Tensor, half: Half) -> Tensor:
        started = time.perf_counter()
        is_coded = values.numel() >= self.least_values
        message = (floats.encode(values) if is_coded else values.view(torch.uint8)).cpu()
        half.encode_seconds += self.report.book(Phase.COMPRESS, started)
        half.encoded += values.numel()
        half.values += values.numel()
        half.num_bytes += frame_bytes(message.numel())
        return message

    def _decoded(self, receive: Callable[[], Tensor], out: Tensor, half: Half) -> float:
        """Wait for a message and decode it; return the seconds of the wait."""
        started = time.perf_counter()
        message = receive()
        waited = self.report.book(Phase.EXCHANGE, started)
        floats.decode(message, out)
        half.decoded += out.numel()
        if half is self.arrived:
            half.num_bytes += frame_bytes(message.numel())
        return waited


class _Gathered(_Floats):
    """The code of parts that each rank has whole: nothing is pushed, and nothing added."""

    def most_pushed(self, source: int, owner: int, number: int) -> int:
        return 0

    def add(self, number: int, arriving: owners.Arriving) -> Tensor:
        return self._values(self.rank, number)


class _Broadcast(_Floats):
    """The code of what the source has: it alone pushes, and owners pass on the messages that they got."""

    def __init__(self, flat: Tensor, source: int, channel: Channel) -> None:
        super().__init__(flat, dealt(flat.numel(), channel.world_size), channel)
        self.source = source

    def most_pushed(self, source: int, owner: int, number: int) -> int:
        return self.most_pulled(owner, number) if source == self.source else 0

    def add(self, number: int, arriving: owners.Arriving) -> Tensor:
        if self.rank == self.source:
            return self.push(self.rank, number)
        ((_, receive),) = arriving
        message = receive()
        floats.decode(message, self._values(self.rank, number))
        return message

    def pull(self, number: int, total: Tensor) -> Tensor:
        return total


def _shifted(cut: slice, by: int) -> slice:
    return slice(cut.start + by, cut.stop + by)
