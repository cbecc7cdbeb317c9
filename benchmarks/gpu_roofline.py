"""The expected time of each route of a table on GPUs, for links and devices, as Markdown: the tables of docs/gpu.md.

    python benchmarks/gpu_roofline.py

Three ways of a table on hosts with one GPU, as `thinwire.attach` has them: a dense all-reduce by the model's own group;
ZEN by the collectives of that group; and ZEN staged through pinned memory and the lane's Gloo group. Then hosts with
eight GPUs: dense, by collectives in one level, and in two. Last, a bucket of dense gradients, as it is and coded on the
device. Bytes on the wire are those of the library's own formulas,
with rows dealt evenly. Nothing overlaps here, and nothing was measured on a GPU: these are lower bounds for a way
alone, to compare ways and links, not promises.

Bandwidths of devices are 85 % of the data sheets', which is what copies reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from thinwire import schemes
from thinwire.comm.machine import DEVICE_KERNELS, Machine
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.gradients.collective import CANDIDATES
from thinwire.lab.bench.recipes import RECIPES
from thinwire.sums.collective import TablePlan, plan, sent_bytes
from thinwire.sums.cost import Demand
from thinwire.sums.scheme import Scheme
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.lossless import Code, Ranks, Verdict, decide
from thinwire.tune.prices import (
    LEVEL_LAUNCHES,
    STAGED_LAUNCHES,
    SUM_LAUNCHES,
    TABLE_LAUNCHES,
    Route,
    busiest_rank_bytes,
    work_seconds,
)
from thinwire.tune.routes import Routes


@dataclass(frozen=True)
class Gpu:
    """One device and its host.

    Args:
        memory_bytes_per_second: what a kernel that only copies reaches, reads and writes together.
        host_bytes_per_second: of copies between the device and pinned memory, in one direction.
        launch_seconds: host time of an operation. Backward has ended, so nothing hides it.
        wait_seconds: from the end of a copy on the device until the waiting thread has launched the next kernel.
    """

    name: str
    memory_bytes_per_second: float
    host_bytes_per_second: float
    launch_seconds: float = 8e-6
    wait_seconds: float = 30e-6


A100 = Gpu("A100", 0.85 * 2.039e12, 24e9)
H100 = Gpu("H100", 0.85 * 3.352e12, 50e9)


@dataclass(frozen=True)
class Fabric:
    """The link of one rank: the payload that it carries, and latencies.

    Args:
        message_seconds: of one step of a ring.
        round_seconds: of a small all-to-all.
    """

    name: str
    bytes_per_second: float
    message_seconds: float
    round_seconds: float


ETHERNET_SHARE = 0.92
"""Payload in the bytes of a link."""
FABRICS = (
    *(Fabric(f"{gbit} Gbit/s", ETHERNET_SHARE * gbit * 1e9 / 8, 25e-6, 60e-6) for gbit in (10, 25)),  # TCP
    *(Fabric(f"{gbit} Gbit/s", ETHERNET_SHARE * gbit * 1e9 / 8, 10e-6, 25e-6) for gbit in (100, 400)),  # RDMA
    Fabric("NVLink", 350e9, 3e-6, 10e-6),
)
LANE_BYTES_PER_SECOND = 3e9
"""What the lane's thread gets through Gloo's TCP at most, whatever the link."""
HOST_COPY_BYTES_PER_SECOND = 8e9
"""Copies of one thread on the host between pageable and pinned memory."""
PROCESSOR = Machine(
    round_seconds=0.0,
    message_seconds=0.0,
    byte_seconds=0.0,
    reduced_byte_seconds=0.0,
    part_seconds=0.12e-3,
    send_id_seconds=17e-9,
    send_byte_seconds=0.27e-9,
    add_id_seconds=35e-9,
    add_byte_seconds=0.45e-9,
    join_id_seconds=55e-9,
    join_byte_seconds=1.2e-9,
)
"""Work on rows on the host: the median of three calls of `thinwire.comm.machine.kernel_seconds` for 8 ranks on one core
of a server of 2026, with other work beside it."""


@dataclass(frozen=True)
class Census:
    """Operations launched and waits of the host for the device, in a step in which one table is summed.

    A test compares them with what the simulated device counts.
    """

    launches: int
    waits: int


NATIVE = Census(launches=2, waits=0)
COLLECTIVE = Census(launches=SUM_LAUNCHES + TABLE_LAUNCHES, waits=2)
STAGED = Census(launches=STAGED_LAUNCHES, waits=2)
"""On the lane's thread: training does not wait."""


@dataclass(frozen=True)
class Estimate:
    """The expected cost of one way.

    Args:
        sent_bytes: by a rank, on its link.
        memory_bytes: read and written by kernels on the device.
        staged_bytes: copied between the device and the host, both ways.
        seconds: of all of it, one after the other.
        wire_seconds: the part of ``seconds`` on the link.
    """

    way: str
    sent_bytes: float
    memory_bytes: float
    staged_bytes: float
    census: Census
    seconds: float
    wire_seconds: float


def native(demand: Demand, gpu: Gpu, link: Fabric) -> Estimate:
    """Return the cost of the dense all-reduce."""
    dense = demand.num_rows * demand.row_bytes
    sent = ring_all_reduce_bytes(dense, demand.world_size)
    wire = sent / link.bytes_per_second + 2 * (demand.world_size - 1) * link.message_seconds
    memory = 2 * dense + 3 * sent / 2  # scaled; and each byte that arrives is added or stored
    return _estimate("native", sent, memory, 0.0, NATIVE, wire, gpu)


def collective(demand: Demand, gpu: Gpu, link: Fabric, census: Census = COLLECTIVE) -> Estimate:
    """Return the cost of ZEN on the model's own group: two rounds of counts, an all-to-all and an all-gather."""
    n, held, union = demand.world_size, demand.held, demand.union
    table = plan(schemes.ZEN, demand.num_rows, demand.width, _dtype(demand), n)
    pushed = [[round(held / n)] * n] * n
    sent = sent_bytes([table], [pushed], [[round(union / n)] * n], rank=0)
    wire = sent / link.bytes_per_second + 4 * link.round_seconds
    return _estimate("collective", sent, _rows_memory(demand), 0.0, census, wire, gpu)


def _rows_memory(demand: Demand) -> float:
    """Return the bytes that kernels of a sum of rows read and write."""
    n, held, union, row = demand.world_size, demand.held, demand.union, demand.row_bytes
    return (
        demand.num_rows * row  # searched
        + 4 * held * row  # gathered, and put behind one another
        + 4 * held * row + 2 * union / n * row  # what arrives is cut out and added up
        + 5 * union * row  # the sum is gathered, cut out and scattered
        + 60 * (held + union)  # ids, of 8 bytes, sorted and searched
    )  # fmt: skip


def staged(demand: Demand, gpu: Gpu, link: Fabric, census: Census = STAGED) -> Estimate:
    """Return the cost of ZEN through pinned memory and the lane."""
    sent = busiest_rank_bytes(schemes.ZEN, demand)
    row = demand.row_bytes
    memory = demand.num_rows * row + 3 * demand.held * row + 3 * demand.union * row
    copied = (demand.held + demand.union) * (row + 8)
    wire = sent / min(link.bytes_per_second, LANE_BYTES_PER_SECOND) + 4 * link.round_seconds
    host = work_seconds(schemes.ZEN, demand, PROCESSOR) + demand.union * row / HOST_COPY_BYTES_PER_SECOND
    return _estimate("staged", sent, memory, copied, census, wire, gpu, host)


def taken(demand: Demand, link: Fabric) -> Route:
    """Return the way that "auto" takes for a dense gradient, once it knows the demand and has measured such a link.

    It prices with constants of one device until it has timed real sums: `thinwire.tune.prices.route_prices`.
    """
    own = Machine(
        link.round_seconds,
        link.message_seconds,
        1 / link.bytes_per_second,
        1 / link.bytes_per_second,
        *DEVICE_KERNELS,
    )
    byte_seconds = 1 / min(link.bytes_per_second, LANE_BYTES_PER_SECOND)
    lane = replace(
        PROCESSOR,
        round_seconds=link.round_seconds,
        message_seconds=link.message_seconds,
        byte_seconds=byte_seconds,
        reduced_byte_seconds=byte_seconds,
    )
    return Routes((own,), lane, (), CANDIDATES).choose({"table": (demand, False)})["table"][0].route


def _estimate(
    way: str, sent: float, memory: float, copied: float, census: Census, wire: float, gpu: Gpu, host: float = 0.0
) -> Estimate:
    seconds = (
        wire
        + host
        + memory / gpu.memory_bytes_per_second
        + copied / gpu.host_bytes_per_second
        + census.launches * gpu.launch_seconds
        + census.waits * gpu.wait_seconds
    )
    return Estimate(way, sent, memory, copied, census, seconds, wire)


def _dtype(demand: Demand) -> torch.dtype:
    return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[demand.itemsize]


GPUS = 8
"""Of a host that has several."""
INSIDE = FABRICS[-1]


@dataclass(frozen=True)
class Cluster:
    """Hosts of `GPUS` GPUs.

    Args:
        host_bytes_per_second: what all network cards of a host carry in one direction.
    """

    name: str
    num_hosts: int
    host_bytes_per_second: float
    message_seconds: float
    round_seconds: float

    @property
    def world_size(self) -> int:
        return GPUS * self.num_hosts

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(GPUS * host, GPUS * host + GPUS)) for host in range(self.num_hosts))

    def seconds(self, between_bytes: float, inside_bytes: float) -> float:
        """Return those of the bytes that leave a host, and of those that a GPU sends inside of it."""
        return between_bytes / self.host_bytes_per_second + inside_bytes / INSIDE.bytes_per_second


def clusters(num_hosts: int) -> list[Cluster]:
    """Return hosts with one network card for all GPUs, and with one for each."""
    made = []
    for cards, gbit in ((1, 25), (1, 100), (1, 400), (GPUS, 100), (GPUS, 400)):
        link = FABRICS[1] if gbit == 25 else FABRICS[-2]
        name = f"{cards} x {gbit} Gbit/s"
        rate = cards * ETHERNET_SHARE * gbit * 1e9 / 8
        made.append(Cluster(name, num_hosts, rate, link.message_seconds, link.round_seconds))
    return made


TWO_LEVELS = Census(launches=SUM_LAUNCHES + LEVEL_LAUNCHES + TABLE_LAUNCHES, waits=3)


def native_on_hosts(demand: Demand, gpu: Gpu, cluster: Cluster) -> Estimate:
    """Return the cost of a dense all-reduce that adds inside of hosts, then between them, as NCCL does at best."""
    dense, h = demand.num_rows * demand.row_bytes, cluster.num_hosts
    inside, between = ring_all_reduce_bytes(dense, GPUS), 2 * (h - 1) / h * dense
    steps = 2 * (h - 1) * cluster.message_seconds + 2 * (GPUS - 1) * INSIDE.message_seconds
    wire = cluster.seconds(between, inside) + steps
    return _estimate("native", between, 2 * dense + 3 * inside / 2, 0.0, NATIVE, wire, gpu)


def one_level(demand: Demand, gpu: Gpu, cluster: Cluster) -> Estimate:
    """Return the cost of ZEN among all GPUs: rows go straight to their owners, sums around in a ring."""
    n, (push, pull) = cluster.world_size, _pieces(plan(schemes.ZEN, *_kind(demand), cluster.world_size), demand)
    between = GPUS * (n - GPUS) * push + (n - 1) * pull
    wire = cluster.seconds(between, (GPUS - 1) * push + (n - 1) * pull) + 4 * cluster.round_seconds
    return _estimate("one level", between, _rows_memory(demand), 0.0, COLLECTIVE, wire, gpu)


def two_levels(demand: Demand, gpu: Gpu, cluster: Cluster) -> Estimate:
    """Return the cost of ZEN in two levels; two hosts send each other all that they have, more of them ZEN's shares."""
    table = plan(TwoLevel(_between(cluster), cluster.hosts), *_kind(demand), cluster.world_size)
    share, (push, pull) = table.between(0), _pieces(table, demand)
    of_share = replace(demand, held=of_host(demand, cluster) / GPUS, union=demand.union / GPUS)
    out, back = _pieces(share, of_share)
    between = GPUS * (cluster.num_hosts - 1) * (out + back)
    wire = cluster.seconds(between, (GPUS - 1) * (push + pull)) + 7 * cluster.round_seconds
    memory = _rows_memory(demand) + 12 * (of_share.held + of_share.union) * demand.row_bytes
    return _estimate("two levels", between, memory, 0.0, TWO_LEVELS, wire, gpu)


def of_host(demand: Demand, cluster: Cluster) -> float:
    """Return the rows that the GPUs of a host hold together."""
    if demand.num_rows == UNIFORM_ROWS:
        return uniform(GPUS)
    return demand.held * (demand.union / demand.held) ** (math.log(GPUS) / math.log(cluster.world_size))


def _between(cluster: Cluster) -> Scheme:
    return schemes.AGSPARSE_CODED if cluster.num_hosts == 2 else schemes.ZEN


def _kind(demand: Demand) -> tuple[int, int, torch.dtype]:
    return demand.num_rows, demand.width, _dtype(demand)


def _pieces(table: TablePlan, demand: Demand) -> tuple[int, int]:
    """Return the bytes of one rank's rows for one owner, and of the sum of one part; rows are dealt evenly."""
    owners, size = len(table.sizes), table.sizes[0]
    push = table.push.piece(round(demand.held / owners), size).num_bytes
    return push, 0 if table.partition is None else table.pull.piece(round(demand.union / owners), size).num_bytes


def taken_on_hosts(demand: Demand, cluster: Cluster) -> str:
    """Return the way that "auto" takes once it knows the demand and has measured such links."""
    n, mine = cluster.world_size, cluster.host_bytes_per_second / GPUS
    dense = native_on_hosts(demand, H100, cluster)
    away = (n - GPUS) / (n - 1)
    every = Machine(
        cluster.round_seconds, cluster.message_seconds, away / mine + (1 - away) / INSIDE.bytes_per_second,
        dense.wire_seconds / ring_all_reduce_bytes(demand.num_rows * demand.row_bytes, n), *DEVICE_KERNELS,
    )  # fmt: skip
    own = every, replace(every, byte_seconds=1 / INSIDE.bytes_per_second), replace(every, byte_seconds=1 / mine)
    points = (*CANDIDATES, *(TwoLevel(point, cluster.hosts) for point in CANDIDATES))
    choice = Routes(own, None, cluster.hosts, points).choose({"table": (demand, False)})["table"][0]
    if choice.route is Route.NATIVE:
        return "native"
    return "two levels" if isinstance(choice.price.scheme, TwoLevel) else "one level"


RANKS = 8
UNIFORM_ROWS, UNIFORM_DENSITY = 1_000_000, 0.052
"""A table whose ranks hold rows at random. Of the others n ranks hold n^0.6 as many as one (`Demand.of`)."""


def uniform(ranks: int) -> float:
    """Return the rows that some ranks of the first table hold together."""
    return UNIFORM_ROWS * (1 - (1 - UNIFORM_DENSITY) ** ranks)


def tables(ranks: int) -> dict[str, Demand]:
    held = UNIFORM_DENSITY * UNIFORM_ROWS
    return {
        "1M x 64, 5.2 %": Demand(ranks, UNIFORM_ROWS, 64, 4, held, uniform(ranks)),
        **{
            f"{recipe.name}: {recipe.num_rows / 1e6:.2f}M x {recipe.width}, {recipe.density:.1%}": Demand.of(
                [recipe.density * recipe.num_rows] * ranks, recipe.num_rows, recipe.width, 4
            )
            for recipe in (RECIPES[name] for name in ("lstm", "nmt", "bert", "deepfm"))
        },
        "20,000 x 16, 5 %": Demand.of([1000] * ranks, 20_000, 16, 4),
    }


TABLES = tables(RANKS)


def rows(table: Iterable[list[str]]) -> None:
    heads, *lines = table
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")
    print()


def work(demand: Demand) -> Iterable[list[str]]:
    yield ["way", "sent MB", "device memory MB", "to and from the host MB", "launches", "waits", "A100 ms", "H100 ms"]
    for way in (native, collective, staged):
        old, new = (way(demand, gpu, FABRICS[-1]) for gpu in (A100, H100))
        yield [
            new.way,
            f"{new.sent_bytes / 1e6:.1f}",
            f"{new.memory_bytes / 1e6:.0f}",
            f"{new.staged_bytes / 1e6:.0f}",
            str(new.census.launches),
            str(new.census.waits),
            *(f"{1e3 * (each.seconds - each.wire_seconds):.2f}" for each in (old, new)),
        ]


def times() -> Iterable[list[str]]:
    yield ["table, 8 ranks, H100", *(fabric.name for fabric in FABRICS)]
    for name, demand in TABLES.items():
        cells = []
        for fabric in FABRICS:
            route = taken(demand, fabric)
            each = [way(demand, H100, fabric) for way in (native, collective, staged)]
            cells.append(" / ".join(f"**{milliseconds(one.seconds)}**" if one.way == route else milliseconds(one.seconds) for one in each))  # fmt: skip # noqa: E501
        yield [name, *cells]


def on_hosts(num_hosts: int) -> Iterable[list[str]]:
    there = clusters(num_hosts)
    yield [f"table, {num_hosts} hosts of {GPUS} H100", "MB out of a host", *(cluster.name for cluster in there)]
    for name, demand in tables(GPUS * num_hosts).items():
        ways = [[way(demand, H100, cluster) for way in (native_on_hosts, one_level, two_levels)] for cluster in there]
        cells = [" / ".join(megabytes(one.sent_bytes) for one in ways[0])]
        for cluster, each in zip(there, ways, strict=True):
            route = taken_on_hosts(demand, cluster)
            cells.append(" / ".join(f"**{milliseconds(one.seconds)}**" if one.way == route else milliseconds(one.seconds) for one in each))  # fmt: skip # noqa: E501
        yield [name, *cells]


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g}" if num_bytes < 1e8 else f"{num_bytes / 1e6:.0f}"


ENCODE, DECODE = Census(launches=12, waits=2), Census(launches=7, waits=2)
"""Of a message: kernels, memory that is zeroed, a sum; waits for its size or verdict, and for its copy. A test counts
the kernels and the first wait."""
CODE_PASSES = 5
"""Times that the bytes of values are read or written to encode them, or to decode and add them."""
BITS = {"bf16 autocast": 20.0, "no autocast": 27.0}
"""Bits of a float32 value on the wire, of a gradient or a sum: see the guide to lossless sums."""


def lossless(num_bytes: int, gpu: Gpu, bits: float) -> Estimate:
    """Return the cost of a sum by the lane whose values are coded and added on the device, without the link."""
    others, part = RANKS - 1, num_bytes / RANKS
    encoded, decoded = (others + 1) * part, 2 * others * part
    sent, copied = 2 * others * part * bits / 32, (encoded + decoded) * bits / 32
    census = Census(
        ENCODE.launches * (others + 1) + DECODE.launches * 2 * others,
        ENCODE.waits * (others + 1) + DECODE.waits * 2 * others,
    )
    host = copied / HOST_COPY_BYTES_PER_SECOND  # messages are not in pinned memory
    return _estimate("lossless", sent, CODE_PASSES * (encoded + decoded), copied, census, 0.0, gpu, host)


def priced(num_bytes: int, bits: float, fabric: Fabric) -> Verdict:
    """Return the verdict of "auto", in whose price coding overlaps the wire."""
    lane = min(fabric.bytes_per_second, LANE_BYTES_PER_SECOND)
    link = replace(
        PROCESSOR, round_seconds=fabric.round_seconds, message_seconds=fabric.message_seconds, byte_seconds=1 / lane,
        reduced_byte_seconds=1 / fabric.bytes_per_second,
    )  # fmt: skip
    rate = lossless(num_bytes, H100, bits).seconds / (num_bytes * (3 * RANKS - 2) / RANKS)
    return decide(num_bytes, Ranks(RANKS), link, Code(bits, bits, rate, rate, rate, rate))


def codes(num_bytes: int) -> Iterable[list[str]]:
    heads = "launches", "waits", "coding ms", *(fabric.name for fabric in FABRICS)
    yield [f"{num_bytes >> 20} MiB of float32, 8 ranks, H100", *heads]
    for name, bits in BITS.items():
        alone, cells = lossless(num_bytes, H100, bits), []
        for fabric in FABRICS:
            one = priced(num_bytes, bits, fabric)
            first, second = milliseconds(one.native_seconds), milliseconds(one.lossless_seconds)
            cells.append(f"{first} / **{second}**" if one.is_lossless else f"**{first}** / {second}")
        counts = str(alone.census.launches), str(alone.census.waits), milliseconds(alone.seconds)
        yield [f"{bits:.0f} bits a value: {name}", *counts, *cells]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def main() -> None:
    print("**What a way does besides sending: 1M x 64 float32, 5.2 % of the rows on each of 8 ranks**\n")
    rows(work(next(iter(TABLES.values()))))
    print("**Milliseconds by native / collective / staged; bold is what `auto` takes**\n")
    rows(times())
    for num_hosts in (2, 8):
        ways = "native / one level / two levels"
        print(f"**{num_hosts} hosts of {GPUS}: milliseconds by {ways}; bold is what `auto` takes**\n")
        rows(on_hosts(num_hosts))
    print("**A bucket of dense gradients: milliseconds by native / lossless; bold is what `auto` takes**\n")
    rows(codes(25 << 20))


if __name__ == "__main__":
    main()
