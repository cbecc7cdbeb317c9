"""What checkpoints in peers' memory need and reach on 16 to 1000 machines, as Markdown: the tables of the docs.

    python benchmarks/checkpoint_capacity.py

Computed by `thinwire.lab.bench.checkpoint.bounds` and `thinwire.checkpoint.recovery_probability`; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.checkpoint import recovery_probability
from thinwire.checkpoint.pacing.gaps import GAMMA
from thinwire.checkpoint.placement import placement
from thinwire.lab.bench.checkpoint.bounds import (
    Hardware,
    copy_seconds,
    high_frequency_wasted_seconds,
    interval_iterations,
    network_seconds,
    strawman_wasted_seconds,
    wasted_seconds,
)

MACHINES = (16, 32, 64, 128, 256, 512, 1000)
MODELS = {"100 billion parameters, 1.2 TB": 1.2e12, "540 billion parameters, 6.5 TB": 6.5e12}
STATES = {"GPT-2 100B": 1.2e12, "Gopher 280B": 3.4e12, "MT-NLG 530B": 6.4e12, "PaLM 540B": 6.5e12}
ITERATION_SECONDS, IDLE_SECONDS = 65.0, 10.0
STORE_BYTES_PER_SECOND = 20e9 / 8
COPY_BYTES_PER_SECOND = 12.6e9
VERSIONS = 2  # kept of each shard, with the one that is being written
LINKS_GBIT = (400, 100, 25, 10)
MTBF_SECONDS, REPAIR_SECONDS = 86400 / 0.015, 600.0
YEAR_SECONDS = 365 * 86400


def seconds_to_loss(machines: int, replicas: int, machine_mtbf_seconds: float, repair_seconds: float) -> float:
    """Return the mean time until all copies of some shard are lost, so that only the persistent checkpoint is left.

    As for disks in an array: a machine fails once in ``machine_mtbf_seconds``, independently of the others, and for
    ``repair_seconds`` after that its copies are missing. For 2 replicas it is MTBF^2 / (N MTTR) if N is even. Valid
    while repairs are much shorter than the time between failures.

    Example:
        1000 machines of which 1.5 % fail in a day, redundant again after 10 minutes, in days:

        >>> round(seconds_to_loss(1000, 2, 86400 / 0.015, 600) / 86400)
        640
    """
    host_sets = len({frozenset(hosts) for hosts in placement(machines, replicas)})
    rate = host_sets * replicas / machine_mtbf_seconds * (repair_seconds / machine_mtbf_seconds) ** (replicas - 1)
    return 1 / rate


def restore_local_seconds(machine_bytes: int, hardware: Hardware) -> float:
    """Return the seconds to copy the shards from host memory to the devices, all devices at once."""
    return machine_bytes / hardware.devices / hardware.copy_bytes_per_second


def restore_replaced_seconds(machine_bytes: int, hardware: Hardware) -> float:
    """Return the seconds to fetch all shards of a machine over its network and copy them to the devices."""
    return machine_bytes / hardware.network_bytes_per_second + restore_local_seconds(machine_bytes, hardware)


def hardware(link_gbit: float) -> Hardware:
    return Hardware(8, link_gbit * 1e9 / 8, COPY_BYTES_PER_SECOND)


def rows(table: Iterable[list[str]]) -> None:
    heads, *lines = table
    print(f"| {' | '.join(heads)} |\n|{'---:|' * len(heads)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")
    print()


def interval(machine_bytes: int, replicas: int, link_gbit: float) -> int:
    """Return the iterations between two checkpoints with a part `GAMMA` of the idle time, as a Checkpointer uses."""
    network, copy = (
        seconds(machine_bytes, replicas, hardware(link_gbit)) for seconds in (network_seconds, copy_seconds)
    )
    return interval_iterations(network, copy, ITERATION_SECONDS, GAMMA * IDLE_SECONDS)


def capacity(state_bytes: float) -> Iterable[list[str]]:
    intervals = (f"every, {link} Gbit/s" for link in LINKS_GBIT)
    yield ["machines", "replicas", "memory GB", "send s", "copy s", "restore s", "one lost s", *intervals]
    for machines in MACHINES:
        for replicas in (2, 3):
            size, machine = round(state_bytes / machines), hardware(LINKS_GBIT[0])
            seconds = (
                network_seconds(size, replicas, machine),
                copy_seconds(size, replicas, machine),
                restore_local_seconds(size, machine),
                restore_replaced_seconds(size, machine),
            )
            every = (interval(size, replicas, link) for link in LINKS_GBIT)
            memory = f"{VERSIONS * replicas * size / 1e9:,.0f}"
            yield [str(machines), str(replicas), memory, *(f"{value:.2f}" for value in seconds), *map(str, every)]


def wasted() -> Iterable[list[str]]:
    yield ["model", "state TB", "Strawman min", "HighFreq min", "peers' memory min"]
    for name, state_bytes in STATES.items():
        size = round(state_bytes)
        retrieval = restore_replaced_seconds(size // 64, hardware(400))
        minutes = (
            strawman_wasted_seconds(size, STORE_BYTES_PER_SECOND) / 60,
            high_frequency_wasted_seconds(size, STORE_BYTES_PER_SECOND) / 60,
            wasted_seconds(ITERATION_SECONDS, ITERATION_SECONDS, retrieval) / 60,
        )
        yield [name, f"{size / 1e12:.1f}", *(f"{value:.1f}" for value in minutes)]


def probability(replicas: int, losses: tuple[int, ...]) -> Iterable[list[str]]:
    yield ["machines", *(f"{failed} lost" for failed in losses), "years to a loss"]
    for machines in MACHINES:
        years = seconds_to_loss(machines, replicas, MTBF_SECONDS, REPAIR_SECONDS) / YEAR_SECONDS
        chances = (recovery_probability(machines, replicas, failed) for failed in losses)
        yield [str(machines), *(f"{chance:.5f}" for chance in chances), f"{years:,.{0 if years >= 100 else 1}f}"]


def main() -> None:
    for model, state_bytes in MODELS.items():
        print(f"**{model}**\n")
        rows(capacity(state_bytes))
    print("**Time that a failure costs**\n")
    rows(wasted())
    for replicas, losses in ((2, (2, 3, 4, 8, 16)), (3, (3, 4, 8, 16))):
        print(f"**Probability that every shard has a copy left, {replicas} replicas**\n")
        rows(probability(replicas, losses))


if __name__ == "__main__":
    main()
