"""The measured cost of a message, a byte and a row on a group of ranks.

All ranks measure once and at the same time, so that processors and links that they share are shared while they measure
too. All use the median over the ranks, so they know the same numbers and decide the same.
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.agree import gather_records, longest
from thinwire.comm.collectives import Collectives
from thinwire.comm.hosts import has_levels, ranks_of_hosts
from thinwire.comm.process_group import Exchange, ring_all_reduce_bytes
from thinwire.errors import logger
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format, Header
from thinwire.rows.partition import Permutation

REPEATS = 3
ATTEMPTS = 2
"""Number of attempts at a measurement before it counts as failed."""
PROBE_BYTES = 128 * 1024
"""Largest probe, with which an attempt sends less than 0.9 MB a rank."""
LONG_PROBE_BYTES = 4 * 1024 * 1024
"""Largest probe where no step corrects the result: more than a burst that a link of 1 Gbit/s may let through."""
COLLECTIVE_PROBE_BYTES = 4 * 1024 * 1024
"""Largest probe on the group of the model, with which a rank sends less than 60 MB, and as much again where hosts have
several ranks: NCCL moves 60 MB in 1 s at 0.5 Gbit/s, where smaller probes suffice."""
_COLLECTIVE_PROBE_SECONDS = 0.01
_BURST = 8
_FIRST_PROBE_BYTES = 32 * 1024
_PROBE_SECONDS = 0.03
_FASTEST_BYTE_SECONDS = 1e-10
"""Lower bound of a byte's cost, 80 Gbit/s: more than a rank reaches over TCP, and about the rate of its memory."""
_NARROW_ROWS, _WIDE_ROWS, _WIDTH = 8192, 2048, 64
_DENSITY = 0.05


@dataclass(frozen=True)
class Machine:
    """Costs in seconds of the steps of which every scheme is made, on the median rank's network and kernels.

    Args:
        round_seconds: cost of a round in which all ranks send all others a header.
        message_seconds: cost of sending a neighbour a header while receiving one: the latency (alpha).
        byte_seconds: cost of a byte sent, when all ranks send to all at once (beta).
        reduced_byte_seconds: cost of a byte sent by the process group's own dense all-reduce.
        part_seconds: cost of splitting off, encoding, verifying and decoding one more message.
        send_id_seconds, send_byte_seconds: cost of dealing a row to its owner and encoding it, by row and by byte of
            values.
        add_id_seconds, add_byte_seconds: cost of decoding a row that arrived and adding it.
        join_id_seconds, join_byte_seconds: cost of decoding a row of the sum and writing it to its index.
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

    def slowed(self, byte_seconds: float) -> Machine:
        """Return this machine with a byte costing at least ``byte_seconds``, whatever a short probe measured.

        A link may let a burst through at once that is longer than everything that a probe sends.
        """
        reduced = max(self.reduced_byte_seconds, byte_seconds)
        return replace(self, byte_seconds=max(self.byte_seconds, byte_seconds), reduced_byte_seconds=reduced)

    @property
    def is_possible(self) -> bool:
        """Whether the numbers are possible: finite, not negative, and no message free, as if a clock stood still."""
        numbers = astuple(self)
        links = (self.round_seconds, self.message_seconds, self.byte_seconds, self.reduced_byte_seconds)
        return all(map(math.isfinite, numbers)) and min(numbers) >= 0.0 and min(links) > 0.0


def measure(
    exchange: Exchange, probe_bytes: int = PROBE_BYTES, clock: Callable[[], float] = time.perf_counter
) -> Machine | None:
    """Measure the machine of a group, in a collective call with the same result on all ranks.

    It returns None, and logs why, if the numbers of a second attempt are impossible too. Its bytes are counted on
    ``exchange``.

    Args:
        probe_bytes: most bytes that one probe of a rank sends to all its peers together.
        clock: source of seconds.

    Raises:
        LostPeerError: see `Exchange.swap_records`.
    """
    for _ in range(ATTEMPTS):
        machine = _typical(exchange, _measured(exchange, probe_bytes, clock))
        if machine.is_possible:
            return machine
    if exchange.rank == 0:
        logger.warning("the link could not be measured, a message took no time: bytes alone decide between schemes")
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
        *kernel_seconds(exchange.world_size),
    )


def _fastest(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of the fastest run after a first one, which may open connections and does not count."""
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
    """Return the cost of a byte, from messages that double until they cost `_PROBE_SECONDS` more than empty ones.

    It is the median of a few, each as slow as its slowest rank: one lost packet stops a connection for 0.2 s, and the
    first may be a burst that the link lets through at once. At least a quarter of the time is attributed to the bytes,
    because the time of an empty round varies by more than a short message costs.
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
    """Clamp to what a rank can send; 0, where the clock stood still, is left for `Machine.is_possible`."""
    return max(byte_seconds, _FASTEST_BYTE_SECONDS) if byte_seconds > 0.0 else byte_seconds


def _swap_seconds(exchange: Exchange, size: int, clock: Callable[[], float]) -> float:
    outgoing = [torch.zeros(size, dtype=torch.uint8)] * exchange.world_size
    return longest(exchange, _seconds(lambda: exchange.swap(outgoing, [size] * exchange.world_size), clock))


def _reduced_byte_seconds(
    exchange: Exchange, probe_bytes: int, byte_seconds: float, message_seconds: float, clock: Callable[[], float]
) -> float:
    """Return the cost of a byte sent by the dense all-reduce."""
    if exchange.world_size == 1:
        return byte_seconds
    lasting = int(_PROBE_SECONDS / byte_seconds) if byte_seconds > 0 else probe_bytes  # the same on all ranks
    count = min(probe_bytes // 2, max(_FIRST_PROBE_BYTES, lasting)) // 4
    tensor = torch.zeros(count, dtype=torch.float32)
    runs = [longest(exchange, _seconds(lambda: exchange.all_reduce(tensor), clock)) for _ in range(REPEATS)]
    seconds = statistics.median(runs)
    steps = 2 * (exchange.world_size - 1) * message_seconds
    return _believed(max(seconds - steps, seconds / 4) / ring_all_reduce_bytes(4 * count, exchange.world_size))


DEVICE_KERNELS = 0.0, 5e-10, 7e-13, 5e-10, 7e-13, 5e-10, 7e-13
"""Fields of `Machine` from ``part_seconds`` on, for a GPU: rows are read and written at 3 TB/s, and 2e9 ids are sorted
in a second. That is the roofline of an H100; seconds of real steps correct it: `thinwire.tune.routes.Routes`."""


def measure_collectives(exchange: Collectives, device: torch.device) -> tuple[Machine, ...]:
    """Measure the links of a model's own group, in a collective call with the same result on all ranks.

    A round is one for which the host waits, a message an all-to-all for which it does not. The thread that issues the
    group's other collectives calls this. Its bytes are counted on ``exchange``.

    Returns:
        The machine, in which all ranks send to all. Where several hosts have as many ranks each, two more: one whose
        bytes are sent inside of hosts, and one whose bytes are sent by all ranks of a host to those of the same index
        on the others. Nothing if the numbers are impossible.

    Raises:
        LostPeerError: see `Collectives`.
    """
    world_size = exchange.world_size
    kernels = DEVICE_KERNELS if device.type != "cpu" else kernel_seconds(world_size)
    if world_size == 1:
        return ()
    record = torch.zeros(world_size, Header.NUM_BYTES // 8, dtype=torch.int64, device=device)

    def gathered(*numbers: float) -> list[list[float]]:
        mine = torch.tensor([numbers] * world_size, dtype=torch.float64).view(torch.int64).to(device)
        return exchange.numbers(mine)[1].view(torch.float64).tolist()

    def seconds(work: Callable[[], object]) -> float:
        """Return the seconds of the slowest rank for some work and a round, in which the host waits for both."""
        return max(gathered(_fastest(lambda: (work(), exchange.numbers(record)))))[0]

    def send(num_bytes: int, peers: Collection[int]) -> None:
        sizes = [num_bytes if peer in peers else 0 for peer in range(world_size)]
        exchange.all_to_all(torch.zeros(sum(sizes), dtype=torch.uint8, device=device), sizes, sizes)

    def sending(peers: Collection[int]) -> tuple[float, int]:
        """Return the seconds of a byte that all ranks send to so many peers each, and how many the last probe had."""
        most = max(1, COLLECTIVE_PROBE_BYTES // len(peers))
        size = min(_FIRST_PROBE_BYTES, most)
        while (
            spent := seconds(partial(send, size, peers))
        ) < round_seconds + _COLLECTIVE_PROBE_SECONDS and size < most:
            size = min(4 * size, most)
        return max(spent - round_seconds, spent / 4) / (size * len(peers)), size * len(peers)

    others = [peer for peer in range(world_size) if peer != exchange.rank]
    round_seconds = seconds(lambda: None)
    burst = seconds(lambda: [send(Header.NUM_BYTES, others) for _ in range(_BURST)])
    byte_seconds, num_bytes = sending(others)
    tensor = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    reducing = seconds(lambda: exchange.all_reduce(tensor))
    mine = Machine(
        round_seconds,
        max((burst - round_seconds) / _BURST, round_seconds / 10),
        byte_seconds,
        max(reducing - round_seconds, reducing / 4) / ring_all_reduce_bytes(tensor.nbytes, world_size),
        *kernels,
    )
    machines, hosts = [mine], ranks_of_hosts(exchange.hosts)
    if has_levels(hosts):
        for groups in (hosts, tuple(zip(*hosts, strict=True))):
            peers = {*next(ranks for ranks in groups if exchange.rank in ranks)} - {exchange.rank}
            machines.append(replace(mine, byte_seconds=sending(peers)[0]))
    typical = [Machine(*map(statistics.median, zip(*gathered(*astuple(machine)), strict=True))) for machine in machines]
    return tuple(typical) if all(machine.is_possible for machine in typical) else ()


def kernel_seconds(world_size: int) -> tuple[float, ...]:
    """Return the fields of `Machine` from ``part_seconds`` on, as measured on this thread alone.

    They solve three equations for each of three jobs: few rows, many narrow rows, wide rows.
    """
    few = _three_jobs(world_size, world_size, width=1)  # about a row for each owner: what is left is the messages
    narrow = _three_jobs(_NARROW_ROWS, world_size, width=1)
    wide = _three_jobs(_WIDE_ROWS, world_size, width=_WIDTH)
    part = sum(few) / world_size
    rates: list[float] = [part]
    for base, slim, broad in zip(few, narrow, wide, strict=True):
        id_seconds = max(0.0, slim - base) / _NARROW_ROWS
        rates += [id_seconds, max(0.0, broad - base - _WIDE_ROWS * id_seconds) / (4 * _WIDE_ROWS * _WIDTH)]
    return tuple(rates)


def _three_jobs(num_ids: int, world_size: int, width: int) -> tuple[float, float, float]:
    """Return the seconds of dealing and encoding rows for their owners, of adding them up, and of joining the sums.

    They are processor time of this thread: with 16 ranks on two cores that all measure at once, wall time is five
    times what the same work costs in a synchronization, where some ranks work while others wait for the wire.
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
    formats: tuple[Format, ...], part: wire.Part, positions: Tensor, order: Tensor, values: Tensor
) -> tuple[Format, int, Tensor]:
    row_bytes = values.shape[1] * values.element_size()
    format = wire.smallest(formats, positions.numel(), row_bytes, part.size, part.num_rows)
    payload = wire.encode(format, part, positions, values, order)
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
