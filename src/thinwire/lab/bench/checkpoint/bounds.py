"""Bounds of checkpoints in peers' memory: seconds, interval, and the time lost to failures.

The cost model of GEMINI (Wang et al., SOSP'23), section 2, and bounds that follow from bandwidths. A machine sends and
receives at once (full duplex). Bytes of a machine are the sum over its devices; every device copies its own
shard to host memory and also the shards that it received for its peers.
"""

import math
from dataclasses import dataclass

PERSISTENT_SECONDS = 3 * 3600.0  # between two checkpoints in the remote store, as for BLOOM: the Strawman


@dataclass(frozen=True)
class Hardware:
    """One machine of a cluster of equal machines.

    Args:
        devices: accelerators (or processes of a CPU job) per machine, each with a shard of its own.
        network_bytes_per_second: bandwidth of the machine, in one direction.
        copy_bytes_per_second: bandwidth of one device between its memory and the host's (A100, pinned memory: 12.6e9).
    """

    devices: int
    network_bytes_per_second: float
    copy_bytes_per_second: float


def network_seconds(machine_bytes: int, replicas: int, hardware: Hardware) -> float:
    """Return the seconds to send one checkpoint of a machine to ``replicas - 1`` peers.

    Example:
        GPT-2 100B on 16 machines of 8 A100, 400 Gbit/s:

        >>> a100 = Hardware(devices=8, network_bytes_per_second=50e9, copy_bytes_per_second=12.6e9)
        >>> network_seconds(75_000_000_000, 2, a100)
        1.5
    """
    return (replicas - 1) * machine_bytes / hardware.network_bytes_per_second


def copy_seconds(machine_bytes: int, replicas: int, hardware: Hardware) -> float:
    """Return the seconds to copy, on all devices at once, each own shard and ``replicas - 1`` received ones."""
    return replicas * machine_bytes / hardware.devices / hardware.copy_bytes_per_second


def interval_iterations(
    network_seconds: float, copy_seconds: float, iteration_seconds: float, idle_seconds: float
) -> int:
    """Return the iterations between two checkpoints such that sending fits into the seconds in which the network is
    idle, and copying between two steps: 1 is a checkpoint in every iteration.

    Raises:
        ValueError: there is something to send and the network is never idle, or the idle time is not within an
            iteration of more than 0 seconds.
    """
    if not 0 <= idle_seconds <= iteration_seconds or iteration_seconds == 0:
        raise ValueError(f"{idle_seconds} s idle of {iteration_seconds} s: what cannot be was measured")
    if network_seconds > 0 and idle_seconds == 0:
        raise ValueError(
            "the network is never idle: no interval lets checkpoints through without slowing down training"
        )
    sending = network_seconds / idle_seconds if network_seconds > 0 else 0.0
    return max(1, math.ceil(max(sending, copy_seconds / iteration_seconds)))


def wasted_seconds(checkpoint_seconds: float, interval_seconds: float, retrieval_seconds: float) -> float:
    """Return the training time that one failure costs on average: t_ckpt + 1 / (2 f) + t_rtvl.

    It is the time until a checkpoint is complete, half the interval between two, and the time to read it back.
    Detecting the failure, replacing machines and starting processes come on top, for every method alike.

    Example:
        A checkpoint in each iteration of 65 s, complete within the next one:

        >>> wasted_seconds(65, 65, 0)
        97.5
    """
    return checkpoint_seconds + interval_seconds / 2 + retrieval_seconds


def strawman_wasted_seconds(state_bytes: int, store_bytes_per_second: float) -> float:
    """Return the wasted time with a shared remote store: a checkpoint every 3 hours, or at the store's speed."""
    transfer = state_bytes / store_bytes_per_second
    return wasted_seconds(transfer, max(PERSISTENT_SECONDS, transfer), transfer)


def high_frequency_wasted_seconds(
    state_bytes: int, store_bytes_per_second: float, iteration_seconds: float = 0.0
) -> float:
    """Return the wasted time with checkpoints as often as a remote store allows: the paper's HighFreq.

    With ``iteration_seconds`` the interval is a whole number of iterations.
    """
    transfer = state_bytes / store_bytes_per_second
    iterations = max(1, math.ceil(transfer / iteration_seconds)) if iteration_seconds > 0 else 1
    return wasted_seconds(transfer, iterations * iteration_seconds or transfer, transfer)
