"""What a group of ranks runs on, in numbers: how long a message, a byte and a row take. Measured once, by all together.

All ranks measure at the same time, so that processors and links that they share are shared while they measure too, and
all take the median over the ranks: so they know the same, and decide the same.
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import cache

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.sync.exchange import Exchange, ring_all_reduce_bytes
from thinwire.sync.partition import Permutation
from thinwire.sync.records import swap_record
from thinwire.wire import Format, Header

REPEATS = 3
_FIRST_PROBE_BYTES = 4 * 1024  # for each peer
_LAST_PROBE_BYTES = 1024 * 1024
_PROBE_SECONDS = 0.03
_NARROW_ROWS, _WIDE_ROWS, _WIDTH = 8192, 2048, 64
_DENSITY = 0.05
_ASSUMED_OWNERS = 8  # the kernels of an assumed machine are measured with so many parts, whatever its world size


@dataclass(frozen=True)
class Machine:
    """Seconds of the steps of which every scheme is made, on the median rank.

    Args:
        round_seconds: all ranks send all others a header.
        message_seconds: a rank sends its neighbour a header while it gets one.
        byte_seconds: of a byte sent, when all ranks send to all at once (beta).
        reduced_byte_seconds: of a byte sent by the process group's own dense all-reduce.
        part_seconds: split off, encode, verify and decode one more message.
        send_id_seconds, send_byte_seconds: deal a row to its owner and encode it: by row, and by byte of values.
        add_id_seconds, add_byte_seconds: decode a row that arrived and add it.
        join_id_seconds, join_byte_seconds: decode a row of the sum and put it into its place.
    """

    round_seconds: float
    message_seconds: float
    byte_seconds: float
    reduced_byte_seconds: float
    part_seconds: float
    send_id_seconds: float
    send_byte_seconds: float
    add_id_seconds: float
    add_byte_seconds: float
    join_id_seconds: float
    join_byte_seconds: float

    @classmethod
    def assumed(cls, mbit: float, latency_seconds: float, world_size: int) -> Machine:
        """What nobody measured: ranks as fast as this process, on links of ``mbit``, of a network without contention.

        A message takes the latency; a round takes it ceil(log2 of ``world_size``) times, at least once: all messages
        leave at once, but more ranks wait longer for their last. Bytes take what the link needs, those of the dense
        all-reduce too. Kernels are measured here, once in a process, so machines of several sizes differ in rounds
        only.

        Args:
            mbit: the link of a rank, as payload in Mbit/s.
            latency_seconds: from one rank to another.

        Raises:
            ValueError: numbers that are not positive and finite, or no rank at all.

        Example:
            >>> round(Machine.assumed(1000, 50e-6, world_size=8).round_seconds, 9)
            0.00015
        """
        if not all(math.isfinite(value) and value > 0 for value in (mbit, latency_seconds)):
            raise ValueError(f"a link needs a rate and a latency above 0; got {mbit} Mbit/s and {latency_seconds} s")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1; got {world_size}")
        waits = max(1, math.ceil(math.log2(world_size)))
        byte_seconds = 8e-6 / mbit
        return cls(waits * latency_seconds, latency_seconds, byte_seconds, byte_seconds, *_own_kernel_seconds())

    @property
    def mbit(self) -> float:
        """The link, as payload in Mbit/s of one rank."""
        return 8e-6 / self.byte_seconds

    def describe(self) -> str:
        return (
            f"{self.mbit:.0f} Mbit/s a rank, {1e3 * self.round_seconds:.2f} ms to ask all ranks,"
            f" {1e3 * self.message_seconds:.2f} ms to ask one"
        )


def measure(exchange: Exchange) -> Machine:
    """Measure; a collective call, whose result is the same on all ranks. Its bytes are counted on ``exchange``.

    Raises:
        LostPeerError: see `Exchange.swap_records`.
    """
    round_seconds = max(told(exchange, _fastest(lambda: _ask_all(exchange))))  # all must choose the same probes
    message_seconds = _fastest(lambda: _ask_next(exchange))
    byte_seconds = _byte_seconds(exchange, round_seconds)
    _ask_all(exchange)
    mine = Machine(
        round_seconds,
        message_seconds,
        byte_seconds,
        _reduced_byte_seconds(exchange, byte_seconds, message_seconds),
        *_kernel_seconds(exchange.world_size),
    )
    return _typical(exchange, mine)


def _fastest(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The first run, which may open connections, does not count."""
    work()
    return min(_seconds(work, clock) for _ in range(REPEATS))


def _seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    work()
    return clock() - started


def _ask_all(exchange: Exchange) -> None:
    exchange.swap_records([torch.zeros(Header.NUM_BYTES, dtype=torch.uint8)] * exchange.world_size)


def _ask_next(exchange: Exchange) -> None:
    rank, world_size = exchange.rank, exchange.world_size
    if world_size > 1:
        record = torch.zeros(Header.NUM_BYTES, dtype=torch.uint8)
        exchange.swap_with((rank + 1) % world_size, record, (rank - 1) % world_size, Header.NUM_BYTES)


def _byte_seconds(exchange: Exchange, round_seconds: float) -> float:
    """From messages that double until they take `_PROBE_SECONDS` more than empty ones, on any rank.

    The best of a few, each as slow as its slowest rank: one lost packet stops a connection for 0.2 s.
    """
    size = _FIRST_PROBE_BYTES
    while True:
        seconds = _swap_seconds(exchange, size)
        if seconds > round_seconds + _PROBE_SECONDS or size >= _LAST_PROBE_BYTES or exchange.world_size == 1:
            break
        size *= 2
    seconds = min(seconds, *(_swap_seconds(exchange, size) for _ in range(REPEATS - 1)))
    return max(seconds - round_seconds, 1e-9) / (max(1, exchange.world_size - 1) * size)


def _swap_seconds(exchange: Exchange, size: int) -> float:
    outgoing = [torch.zeros(size, dtype=torch.uint8)] * exchange.world_size
    return max(told(exchange, _seconds(lambda: exchange.swap(outgoing, [size] * exchange.world_size))))


def _reduced_byte_seconds(exchange: Exchange, byte_seconds: float, message_seconds: float) -> float:
    """Of the dense all-reduce, by one that takes about `_PROBE_SECONDS`."""
    if exchange.world_size == 1:
        return byte_seconds
    count = min(_LAST_PROBE_BYTES, max(_FIRST_PROBE_BYTES, int(_PROBE_SECONDS / byte_seconds))) // 4
    tensor = torch.zeros(count)
    seconds = min(max(told(exchange, _seconds(lambda: exchange.all_reduce(tensor)))) for _ in range(REPEATS))
    steps = 2 * (exchange.world_size - 1) * message_seconds
    return max(seconds - steps, seconds / 4) / ring_all_reduce_bytes(4 * count, exchange.world_size)


@cache
def _own_kernel_seconds() -> tuple[float, ...]:
    return _kernel_seconds(_ASSUMED_OWNERS)


def _kernel_seconds(world_size: int) -> tuple[float, ...]:
    """Three equations for each of the three jobs: few rows, many narrow rows, wide rows."""
    few = _three_jobs(world_size, 1)
    narrow = _three_jobs(_NARROW_ROWS, world_size=world_size, width=1)
    wide = _three_jobs(_WIDE_ROWS, world_size=world_size, width=_WIDTH)
    part = sum(few) / world_size
    rates: list[float] = [part]
    for base, slim, broad in zip(few, narrow, wide, strict=True):
        id_seconds = max(0.0, slim - base) / _NARROW_ROWS
        rates += [id_seconds, max(0.0, broad - base - _WIDE_ROWS * id_seconds) / (4 * _WIDE_ROWS * _WIDTH)]
    return tuple(rates)


def _three_jobs(num_ids: int, world_size: int, width: int = 1) -> tuple[float, float, float]:
    """Seconds to deal and encode rows for their owners, to add them up, and to put them together again.

    Of this thread's processor time: with 16 ranks on two cores that all measure at once the clock on the wall says five
    times what the same work takes in a synchronization, where some ranks work while others wait for the wire.
    """
    ids = torch.arange(num_ids) * round(1 / _DENSITY)
    values = torch.ones(num_ids, width)
    partition = Permutation(round(num_ids / _DENSITY), world_size, seed=0)
    formats = tuple(Format)

    def send() -> list[tuple[Format, int, Tensor]]:
        return [_encoded(formats, part, *placed, values) for part, placed in zip(partition.parts, partition.split(ids), strict=True)]  # fmt: skip # noqa: E501

    sent = send()

    def received() -> list[tuple[Tensor, Tensor]]:
        return [_decoded(part, message, width) for part, message in zip(partition.parts, sent, strict=True)]

    def add() -> None:
        kernels.sum_rows(received())

    def join() -> None:
        pieces = received()
        order = partition.join([positions for positions, _ in pieces]).sort().indices
        torch.cat([piece for _, piece in pieces]).index_select(0, order)

    return _fastest(send, time.thread_time), _fastest(add, time.thread_time), _fastest(join, time.thread_time)


def _encoded(
    formats: tuple[Format, ...], part: wire.Part, positions: Tensor, places: Tensor, values: Tensor
) -> tuple[Format, int, Tensor]:
    row_bytes = values.shape[1] * values.element_size()
    format = wire.smallest(formats, positions.numel(), row_bytes, part.size, part.num_rows)
    payload = wire.encode(format, part, positions, values, places)
    kernels.checksum(payload)
    return format, positions.numel(), payload


def _decoded(part: wire.Part, message: tuple[Format, int, Tensor], width: int) -> tuple[Tensor, Tensor]:
    format, count, payload = message
    kernels.checksum(payload)
    return wire.decode(format, part, count, payload, width, torch.float32)


def told(exchange: Exchange, number: float) -> list[float]:
    """The number of each rank, on all of them; a collective call."""
    return [struct.unpack("<d", other)[0] for other in swap_record(exchange, "number", struct.pack("<d", number))]


def _typical(exchange: Exchange, mine: Machine) -> Machine:
    layout = struct.Struct(f"<{len(fields(Machine))}d")
    told = swap_record(exchange, "machine", layout.pack(*astuple(mine)))
    return Machine(*map(statistics.median, zip(*map(layout.unpack, told), strict=True)))
