"""Sums of dense tensors in rank order, whose values travel by a code that gives back every bit.

Rank r owns the r-th piece of a tensor. Every rank pushes the code of each piece to its owner, which decodes and adds in
rank order, and sends the code of the sum to all. Pieces are cut into segments: while one is on the wire, the next is
encoded by the thread that sends, and an earlier one is decoded and added by the caller's.

A message says its own size, which no rank knows before: receives are posted for the size of the values themselves,
which no code exceeds. So a failure in the middle cannot be reported: the rank hangs up, and the others fail at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import chain, pairwise
from operator import add

import torch
from torch import Tensor

from thinwire.codes import floats
from thinwire.comm.channel import Channel
from thinwire.comm.parcels import Parcels, sized_parcel_bytes
from thinwire.errors import CorruptMessageError
from thinwire.observe.step import Phase

SEGMENT_VALUES = 2 * floats.CHUNK_VALUES
"""Number of values in a message, uncoded 256 KiB of float32. On 8 hosts at 100 Mbit/s a step of a gpt with 4.6 MB of
gradients took 0.490 s with half of it and 0.512 s with four times as many: sums start to come back later."""
LEAST_VALUES = 4096
"""Fewest values of a message that are encoded: for fewer the code takes longer than their bytes on slow links."""
PLAIN_VALUES = 1 << 20
"""Number of values from which tensors travel as they are until kernels are compiled, once a machine in a minute or two,
and on machines without numba: the plain code encodes 5 MB/s."""
POSTED_BYTES = 64 * 1024 * 1024
"""Bytes up to which receives are posted ahead; they are memory only as far as messages fill it."""
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
        return Half(*map(add, astuple(self), astuple(other)))


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


def pieces(numel: int, world_size: int) -> list[slice]:
    """Return the piece of a flat tensor that each rank owns; of a tiny tensor some are empty."""
    units = -(-numel // _UNIT_VALUES)
    ends = [min(numel, _UNIT_VALUES * (units * rank // world_size)) for rank in range(world_size + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def all_reduce(tensor: Tensor, channel: Channel, scale: float = 1.0, report: SumReport | None = None) -> None:
    """Sum a contiguous tensor over all ranks in place, times ``scale``, to the same bits on every rank.

    They are the bits of a sum in rank order: of float32 and float64 ``((t0 + t1) + t2) * scale``, of sixteen-bit values
    the same in float32, rounded once. Call it on all ranks after `Channel.open`, which has compared dtype and shape.

    Args:
        tensor: float16, bfloat16, float32 or float64, on the CPU.
        report: counts what the sum takes.

    Raises:
        CorruptMessageError: a message was altered, or is no code of its values.
        LostPeerError: a peer died, did not take part within the timeout, or hung up.
    """
    flat = tensor.view(-1)
    if channel.world_size == 1:
        flat.mul_(scale)
    elif flat.numel():
        with channel.stream() as stream:
            run = _CodedSum(
                flat, pieces(flat.numel(), channel.world_size), channel, Parcels(channel, stream), scale, report
            )
            run.all_reduce()


def reduce_scatter(
    tensor: Tensor, out: Tensor, channel: Channel, scale: float = 1.0, report: SumReport | None = None
) -> None:
    """Sum a contiguous tensor over all ranks; ``out`` gets the part of this rank, with the bits of `all_reduce`.

    Args:
        tensor: [n * k], of which rank r gets the sum of elements r * k to (r + 1) * k. It is left as it is.
        out: [k], contiguous, of the same dtype; it may be that part of ``tensor``.
        report: counts what the sum takes.

    Raises:
        CorruptMessageError, LostPeerError: as for `all_reduce`.
    """
    flat, size = tensor.view(-1), out.numel()
    assert flat.numel() == channel.world_size * size, "equal parts"
    bounds = [slice(rank * size, (rank + 1) * size) for rank in range(channel.world_size)]
    if channel.world_size == 1:
        torch.mul(flat, scale, out=out.view(-1))
    elif size:
        with channel.stream() as stream:
            _CodedSum(flat, bounds, channel, Parcels(channel, stream), scale, report).reduce_scatter(out.view(-1))


@dataclass(frozen=True)
class _Expected:
    """A message to come: from whom, its number, and the values that it is the code of."""

    source: int
    place: int
    values: slice


Arriving = Iterator[tuple[_Expected, Callable[[], Tensor]]]


class _CodedSum:
    """One sum. Messages are numbered by segment: even for a push, odd for a pull."""

    def __init__(
        self,
        flat: Tensor,
        bounds: Sequence[slice],
        channel: Channel,
        parcels: Parcels,
        scale: float,
        report: SumReport | None,
    ) -> None:
        self.flat, self.channel, self.parcels, self.scale = flat, channel, parcels, scale
        self.report = report or SumReport()
        self.report.values, self.report.num_bytes = (
            self.report.values + flat.numel(),
            self.report.num_bytes + flat.nbytes,
        )
        self.rank, self.ranks = channel.rank, range(channel.world_size)
        self.others = [(self.rank + step) % channel.world_size for step in self.ranks[1:]]
        self.segments = [_cut(piece) for piece in bounds]
        self.mine = self.segments[self.rank]
        self.is_narrow = flat.element_size() == 2
        is_fast = flat.numel() < PLAIN_VALUES or floats.is_compiled()
        self.least_values = LEAST_VALUES if is_fast else flat.numel() + 1

    def all_reduce(self) -> None:
        arriving = self._ahead(chain(self._pushes(), self._pulls()))
        self._push()
        for number, place in enumerate(self.mine):
            total = self.flat[place]
            total.copy_(self._sum(place, arriving))
            self._send_back(number, total)
        for expected, receive in arriving:
            self._take(expected, receive)

    def reduce_scatter(self, out: Tensor) -> None:
        arriving = self._ahead(self._pushes())
        self._push()
        start = self.mine[0].start
        for place in self.mine:
            total = self._sum(place, arriving)
            target = out[place.start - start : place.stop - start]
            target.copy_(total) if self.is_narrow else torch.mul(total, self.scale, out=target)

    def _pushes(self) -> Iterator[_Expected]:
        """Yield the messages that are added here, in the order in which they are added."""
        for number, place in enumerate(self.mine):
            yield from (_Expected(source, 2 * number, place) for source in self.ranks if source != self.rank)

    def _pulls(self) -> Iterator[_Expected]:
        """Yield the sums of others, first segments first, in the order in which owners send them here."""
        for number in range(max(map(len, self.segments))):
            for owner in reversed(self.others):
                if number < len(self.segments[owner]):
                    yield _Expected(owner, 2 * number + 1, self.segments[owner][number])

    def _ahead(self, expected: Iterator[_Expected]) -> Arriving:
        """Yield each message with a function that waits for it; receives of later ones are posted before.

        A sender cannot begin before it knows that a receive is posted.
        """
        posted: deque[tuple[_Expected, Callable[[], Tensor]]] = deque()
        room = POSTED_BYTES

        def post() -> None:
            nonlocal room
            while room > 0 and (one := next(expected, None)) is not None:
                room -= self._most_bytes(one.values)
                posted.append((one, self.parcels.receive_sized(one.source, one.place, self._most_bytes(one.values))))

        def arriving() -> Arriving:
            nonlocal room
            while posted:
                one, receive = posted.popleft()
                yield one, receive
                room += self._most_bytes(one.values)
                post()

        post()
        return arriving()

    def _most_bytes(self, values: slice) -> int:
        return (values.stop - values.start) * self.flat.element_size()

    def _is_coded(self, values: Tensor) -> bool:
        return values.numel() >= self.least_values

    def _bits(self, values: Tensor) -> float:
        return floats.bits_per_value(values) if self._is_coded(values) else 8.0 * values.element_size()

    def _message_bytes(self, values: Tensor, bits: float) -> float:
        coded_bytes = round(bits * values.numel() / 8) if self._is_coded(values) else values.nbytes
        return sized_parcel_bytes(min(values.nbytes, coded_bytes))

    def _push(self) -> None:
        """Queue the pushes of all segments, the first of every owner first."""
        bits = self._bits(self.flat)
        for number in range(max(map(len, self.segments))):
            for owner in self.others:
                if number < len(self.segments[owner]):
                    values = self.flat[self.segments[owner][number]]
                    self.report.predicted_bytes += self._message_bytes(values, bits)
                    self._send((owner,), 2 * number, values, self.report.push)

    def _send_back(self, number: int, total: Tensor) -> None:
        """Queue the sum of a segment for all others. Once it is encoded it is scaled, unless it was before."""
        self.report.predicted_bytes += len(self.others) * self._message_bytes(total, self._bits(total))
        self._send(self.others, 2 * number + 1, total, self.report.pull, 1.0 if self.is_narrow else self.scale)

    def _send(self, targets: Sequence[int], place: int, values: Tensor, half: Half, scale_after: float = 1.0) -> None:
        def make() -> Tensor:
            started = time.perf_counter()
            message = floats.encode(values) if self._is_coded(values) else values.view(torch.uint8)
            if scale_after != 1.0:
                message = message.clone() if message.data_ptr() == values.data_ptr() else message
                values.mul_(scale_after)
            half.encode_seconds += self.report.book(Phase.COMPRESS, started)
            half.encoded += values.numel()
            half.values += values.numel()
            half.num_bytes += sized_parcel_bytes(message.numel())
            return message

        self.parcels.send_sized(targets, place, make)

    def _sum(self, place: slice, arriving: Arriving) -> Tensor:
        """Return the sum of a segment of this rank's piece, added as its parts arrive; scaled if it gets rounded."""
        own = self.flat[place]
        total = torch.empty_like(own, dtype=torch.float32 if self.is_narrow else own.dtype)
        part = torch.empty_like(own)
        for source in self.ranks:
            if source == self.rank:
                total.copy_(own) if source == 0 else total.add_(own)
                continue
            expected, receive = next(arriving)
            into = total if source == 0 and not self.is_narrow else part
            started = self._decode(expected, receive, into, self.report.push)
            if source > 0:
                total.add_(part)
            elif self.is_narrow:
                total.copy_(part)
            self.report.push.decode_seconds += self.report.book(Phase.DECOMPRESS, started)
        return total.mul_(self.scale) if self.is_narrow else total

    def _take(self, expected: _Expected, receive: Callable[[], Tensor]) -> None:
        """Store the sum of a segment that another rank owns."""
        total, half = self.flat[expected.values], self.report.pull
        started = self._decode(expected, receive, total, half)
        half.values += total.numel()
        if not self.is_narrow and self.scale != 1.0:
            total.mul_(self.scale)
        half.decode_seconds += self.report.book(Phase.DECOMPRESS, started)

    def _decode(self, expected: _Expected, receive: Callable[[], Tensor], out: Tensor, half: Half) -> float:
        """Wait for a message and decode it; return when decoding began."""
        started = time.perf_counter()
        message = receive()
        started += self.report.book(Phase.EXCHANGE, started)
        try:
            floats.decode(message, out)
        except CorruptMessageError as error:
            raise CorruptMessageError(f"{self.channel.where(expected.source)}: {error}") from error
        half.decoded += out.numel()
        if half is self.report.pull:
            half.num_bytes += sized_parcel_bytes(message.numel())
        return started


def _cut(piece: slice) -> list[slice]:
    """Return a piece as segments; an empty one has none."""
    starts = range(piece.start, piece.stop, SEGMENT_VALUES)
    return [slice(start, min(start + SEGMENT_VALUES, piece.stop)) for start in starts]
