"""Expected time of each way to sum an embedding table's gradients on GPUs, from bytes, launches, waits and links.

Three ways, as `thinwire.attach` has them: a dense all-reduce by the model's own group; ZEN by the collectives of that
group; and ZEN staged through pinned memory and the lane's Gloo group. Bytes on the wire are those of the library's own
formulas, with rows dealt evenly. Nothing overlaps here, and nothing was measured on a GPU: these are lower bounds for a
way alone, to compare ways and links, not promises.

Bandwidths of devices are 85 % of the data sheets', which is what copies reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import schemes
from thinwire.comm.machine import DEVICE_KERNELS, Machine
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.gradients.collective import CANDIDATES
from thinwire.sync.choose import Demand, Route, busiest_rank_bytes, work_seconds
from thinwire.sync.collective import plan, sent_bytes
from thinwire.sync.experience import Routes


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
COLLECTIVE = Census(launches=180, waits=2)
STAGED = Census(launches=20, waits=2)
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
    row = demand.row_bytes
    memory = (
        demand.num_rows * row  # searched
        + 4 * held * row  # gathered, and put behind one another
        + 4 * held * row + 2 * union / n * row  # what arrives is cut out and added up
        + 5 * union * row  # the sum is gathered, cut out and scattered
        + 60 * (held + union)  # ids, of 8 bytes, sorted and searched
    )  # fmt: skip
    return _estimate("collective", sent, memory, 0.0, census, wire, gpu)


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

    It prices with constants of one device until it has timed real sums: `thinwire.sync.choose.route_prices`.
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
    return Routes(own, lane, (), CANDIDATES).choose({"table": (demand, False)})["table"][0].route


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
