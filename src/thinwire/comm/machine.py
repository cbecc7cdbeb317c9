"""What a group of ranks runs on, in numbers: how long a message, a byte and a row take. Measured once, by all together.

All ranks measure at the same time, so that processors and links that they share are shared while they measure too, and
all take the median over the ranks: so they know the same, and decide the same.
"""

from __future__ import annotations

import logging
import math
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.comm.agree import gather_records, longest
from thinwire.comm.process_group import Exchange, ring_all_reduce_bytes
from thinwire.partition import Permutation
from thinwire.wire import Format, Header

REPEATS = 3
ATTEMPTS = 2
"""A measurement that fails is made so often."""
PROBE_BYTES = 128 * 1024
"""With probes up to this size an attempt sends less than 0.9 MB a rank. What they miss, steps mend: see `Lane.saw`."""
LONG_PROBE_BYTES = 4 * 1024 * 1024
"""For measurements that nothing mends: more than a burst that a link of 1 Gbit/s may let through at once."""
_FIRST_PROBE_BYTES = 32 * 1024
_PROBE_SECONDS = 0.03
_FASTEST_BYTE_SECONDS = 1e-10
"""80 Gbit/s: what a rank cannot exceed over TCP, and about what its memory gives it. Nothing faster is believed."""
_NARROW_ROWS, _WIDE_ROWS, _WIDTH = 8192, 2048, 64
_DENSITY = 0.05
_ASSUMED_OWNERS = 8  # the kernels of an assumed machine are measured with so many parts, whatever its world size

_log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Network:
    """What links the ranks of a group, measured or assumed.

    Args:
        round_seconds: all ranks send all others a header.
        message_seconds: a rank sends its neighbour a header while it gets one: the latency (alpha).
        byte_seconds: of a byte sent, when all ranks send to all at once (beta).
    """

    round_seconds: float
    message_seconds: float
    byte_seconds: float

    @property
    def mbit(self) -> float:
        """The link, as payload in Mbit/s of one rank."""
        return 8e-6 / self.byte_seconds

    def describe(self) -> str:
        return (
            f"{self.mbit:.0f} Mbit/s a rank, {1e3 * self.round_seconds:.2f} ms to ask all ranks,"
            f" {1e3 * self.message_seconds:.2f} ms to ask one"
        )


@dataclass(frozen=True)
class Machine(Network):
    """Seconds of the steps of which every scheme is made, on the median rank: of its network, and of its kernels.

    Args:
        reduced_byte_seconds: of a byte sent by the process group's own dense all-reduce.
        part_seconds: split off, encode, verify and decode one more message.
        send_id_seconds, send_byte_seconds: deal a row to its owner and encode it: by row, and by byte of values.
        add_id_seconds, add_byte_seconds: decode a row that arrived and add it.
        join_id_seconds, join_byte_seconds: decode a row of the sum and put it into its place.
    """

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

    def slowed(self, byte_seconds: float) -> Machine:
        """This machine after it was seen that a byte takes at least so long, whatever a short probe said.

        A link may let a burst through at once that is longer than all that a probe sends.
        """
        reduced = max(self.reduced_byte_seconds, byte_seconds)
        return replace(self, byte_seconds=max(self.byte_seconds, byte_seconds), reduced_byte_seconds=reduced)

    @property
    def is_possible(self) -> bool:
        """Whether it can be: no number is missing, and no message took no time, as where a clock stands still."""
        numbers = astuple(self)
        links = (self.round_seconds, self.message_seconds, self.byte_seconds, self.reduced_byte_seconds)
        return all(map(math.isfinite, numbers)) and min(numbers) >= 0.0 and min(links) > 0.0


def measure(
    exchange: Exchange, probe_bytes: int = PROBE_BYTES, clock: Callable[[], float] = time.perf_counter
) -> Machine | None:
    """Measure; a collective call, whose result is the same on all ranks. Its bytes are counted on ``exchange``.

    None, after a second attempt and a sentence in the log, where what was measured cannot be.

    Args:
        probe_bytes: that a rank sends to all its peers together, in the longest message.

    Raises:
        LostPeerError: see `Exchange.swap_records`.
    """
    for _ in range(ATTEMPTS):
        machine = _typical(exchange, _measured(exchange, probe_bytes, clock))
        if machine.is_possible:
            return machine
    if exchange.rank == 0:
        _log.warning("the link could not be measured, a message took no time: bytes alone decide between schemes")
    return None


def _measured(exchange: Exchange, probe_bytes: int, clock: Callable[[], float]) -> Machine:
    round_seconds = longest(exchange, _fastest(lambda: _ask_all(exchange), clock))
    message_seconds = _fastest(lambda: _ask_next(exchange), clock)
    byte_seconds = _byte_seconds(exchange, round_seconds, probe_bytes, clock)
    _ask_all(exchange)
    return Machine(
        round_seconds,
        message_seconds,
        byte_seconds,
        _reduced_byte_seconds(exchange, probe_bytes, byte_seconds, message_seconds, clock),
        *_kernel_seconds(exchange.world_size),
    )


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


def _byte_seconds(exchange: Exchange, round_seconds: float, probe_bytes: int, clock: Callable[[], float]) -> float:
    """From messages that double until they take `_PROBE_SECONDS` more than empty ones, on any rank.

    The median of a few, each as slow as its slowest rank: one lost packet stops a connection for 0.2 s, and the first
    may be a burst that the link lets through at once. Of the time at least a quarter is the bytes': that of an empty
    round comes and goes by more than a short message takes.
    """
    if exchange.world_size == 1:
        return _FASTEST_BYTE_SECONDS
    total = _FIRST_PROBE_BYTES
    while True:
        size = -(-total // (exchange.world_size - 1))
        seconds = _swap_seconds(exchange, size, clock)
        if seconds > round_seconds + _PROBE_SECONDS or total >= probe_bytes:
            break
        total *= 2
    seconds = statistics.median([seconds, *(_swap_seconds(exchange, size, clock) for _ in range(REPEATS - 1))])
    return _believed(max(seconds - round_seconds, seconds / 4) / (size * (exchange.world_size - 1)))


def _believed(byte_seconds: float) -> float:
    """No rate above what a rank can send; 0, where the clock stood still, is left for `Machine.is_possible`."""
    return max(byte_seconds, _FASTEST_BYTE_SECONDS) if byte_seconds > 0.0 else byte_seconds


def _swap_seconds(exchange: Exchange, size: int, clock: Callable[[], float]) -> float:
    outgoing = [torch.zeros(size, dtype=torch.uint8)] * exchange.world_size
    return longest(exchange, _seconds(lambda: exchange.swap(outgoing, [size] * exchange.world_size), clock))


def _reduced_byte_seconds(
    exchange: Exchange, probe_bytes: int, byte_seconds: float, message_seconds: float, clock: Callable[[], float]
) -> float:
    """Of the dense all-reduce."""
    if exchange.world_size == 1:
        return byte_seconds
    lasting = int(_PROBE_SECONDS / byte_seconds) if byte_seconds > 0 else probe_bytes  # the same on all ranks
    count = min(probe_bytes // 2, max(_FIRST_PROBE_BYTES, lasting)) // 4
    tensor = torch.zeros(count, dtype=torch.float32)
    runs = [longest(exchange, _seconds(lambda: exchange.all_reduce(tensor), clock)) for _ in range(REPEATS)]
    seconds = statistics.median(runs)
    steps = 2 * (exchange.world_size - 1) * message_seconds
    return _believed(max(seconds - steps, seconds / 4) / ring_all_reduce_bytes(4 * count, exchange.world_size))


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
    values = torch.ones(num_ids, width, dtype=torch.float32)
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


def _typical(exchange: Exchange, mine: Machine) -> Machine:
    layout = struct.Struct(f"<{len(fields(Machine))}d")
    machines = gather_records(exchange, "machine", layout.pack(*astuple(mine)))
    return Machine(*map(statistics.median, zip(*map(layout.unpack, machines), strict=True)))
