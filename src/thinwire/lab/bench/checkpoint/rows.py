"""Rows of `thinwire bench checkpoint`, computed from the ranks' records. Pure functions."""

import statistics
from collections.abc import Sequence
from typing import Any

from thinwire.lab.bench.checkpoint import bounds
from thinwire.lab.bench.checkpoint.methods import NONE, THINWIRE
from thinwire.lab.bench.checkpoint.overhead import Block, OverheadRecord
from thinwire.lab.bench.checkpoint.recovery import Recovery


def row_of(
    method: str, records: Sequence[OverheadRecord], recovery: Recovery | None, link_mbit: float | None
) -> dict[str, Any]:
    """Return one row, as documented in docs/evidence/bench-checkpoint.md."""
    seconds = _seconds(records, method, "iterations")
    ratios = turn_ratios(seconds, _seconds(records, NONE, "iterations"))
    blocking = None if method == NONE else _median(_seconds(records, method, "blocking"))
    state_bytes = max(record.state_bytes for record in records)
    return {
        "method": method,
        "hosts": len(records),
        "link_mbit": link_mbit,
        "state_bytes": state_bytes,
        "iteration_seconds_median": _median(seconds),
        "overhead_ratio": statistics.median(ratios) if ratios else None,
        "overhead_spread": [min(ratios), max(ratios)] if ratios else None,
        "interval_iterations": interval_iterations(method, records),
        "cpu_seconds": cpu_seconds_of_one(method, records),
        "blocking_ms_per_gb": None if blocking is None else 1e3 * blocking / (state_bytes / 1e9),
        "wasted_seconds": _wasted(method, records, recovery),
        "recovery_seconds_processes": statistics.median(recovery.processes_seconds) if recovery else None,
        "recovery_seconds_host": recovery.host_seconds if recovery else None,
        "recovery_link_share": _link_share(recovery, link_mbit),
        "iterations_lost": max(recovery.iterations_lost) if recovery else None,
        "restore_bitwise_equal": recovery.bitwise_equal if recovery else None,
        "version_bytes": max(float(record.gaps.get("checkpoint/coded_bytes", 0)) for record in records)
        if method == THINWIRE
        else None,
        "checkpoint_seconds": checkpoint_seconds(method, records),
    }


def turn_ratios(turns: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> list[float]:
    """Return iteration time over that without checkpoints, turn by turn: the ratio of their means.

    So disturbances of the machine longer than a turn cancel out. Means, because not every iteration need have a
    checkpoint. Empty without the plain turns.

    Example:
        >>> turn_ratios([[1.1, 1.1], [2.2, 2.4]], [[1.0, 1.0], [2.0, 2.0]])
        [1.1, 1.15]
    """
    if not plain:
        return []
    return [statistics.fmean(own) / statistics.fmean(other) for own, other in zip(turns, plain, strict=True)]


def cpu_seconds_of_one(method: str, records: Sequence[OverheadRecord]) -> float | None:
    """Return the CPU time of one checkpoint of a rank: what a turn takes more than one without, over its versions."""
    turns, plain = _turns(records, method), _turns(records, NONE)
    versions = sum(min(block.versions for block in turn) for turn in turns)
    if not plain or not versions:
        return None
    more = [
        statistics.fmean(block.cpu_seconds for block in own) - statistics.fmean(block.cpu_seconds for block in other)
        for own, other in zip(turns, plain, strict=True)
    ]
    return statistics.median(more) * len(turns) / versions


def checkpoint_seconds(method: str, records: Sequence[OverheadRecord]) -> float | None:
    """Return the seconds from the call of `step` to a safe checkpoint: median over turns of the slowest rank."""
    if method == NONE:
        return None
    turns = _turns(records, method)
    if any(block.checkpoint_seconds is None for turn in turns for block in turn):
        return _median(_seconds(records, method, "blocking"))
    return statistics.median(max(block.checkpoint_seconds or 0.0 for block in turn) for turn in turns)


def interval_iterations(method: str, records: Sequence[OverheadRecord]) -> float | None:
    """Return the average number of iterations between two checkpoints; None if there was none."""
    turns = _turns(records, method)
    versions = sum(min(block.versions for block in turn) for turn in turns)
    return sum(len(turn[0].iterations) for turn in turns) / versions if versions else None


def _wasted(method: str, records: Sequence[OverheadRecord], recovery: Recovery | None) -> float | None:
    """Includes the time to recover after a host was lost."""
    interval, seconds = interval_iterations(method, records), checkpoint_seconds(method, records)
    if recovery is None or interval is None or seconds is None:
        return None
    iteration = _median(_seconds(records, method, "iterations"))
    return bounds.wasted_seconds(seconds, interval * iteration, recovery.host_seconds)


def bounds_of(
    records: Sequence[OverheadRecord], methods: Sequence[str], replicas: int, link_mbit: float | None
) -> dict[str, Any] | None:
    """Return the lower bounds of checkpoints in peers' memory, and the measured values; None without a link.

    The idle time of the network is the one measured on the lane of the gradients, and the speed of a copy is that of
    the fastest copy.
    """
    if link_mbit is None or THINWIRE not in methods:
        return None
    gaps, state_bytes = records[0].gaps, max(record.state_bytes for record in records)
    plain = _seconds(records, NONE if NONE in methods else THINWIRE, "iterations")
    iteration = _median(plain)
    idle = min(iteration, float(statistics.median(float(record.gaps["checkpoint/idle_seconds"]) for record in records)))
    hardware = bounds.Hardware(1, link_mbit * 1e6 / 8, state_bytes / max(1e-9, float(gaps["checkpoint/copy_seconds"])))
    network = bounds.network_seconds(state_bytes, replicas, hardware)
    copy = bounds.copy_seconds(state_bytes, replicas, hardware)
    return {
        "iteration_seconds": iteration,
        "idle_seconds": idle,
        "network_seconds": network,
        "copy_seconds": copy,
        "interval_iterations": bounds.interval_iterations(network, copy, iteration, idle),
        "reached_interval_iterations": interval_iterations(THINWIRE, records),
        "reached_checkpoint_seconds": checkpoint_seconds(THINWIRE, records),
        "grants": gaps["checkpoint/grants"],
    }


def baselines(
    records: Sequence[OverheadRecord], methods: Sequence[str], link_mbit: float | None
) -> dict[str, float | None]:
    """Return the wasted time with a remote store that all hosts together reach at the speed of one link."""
    if link_mbit is None:
        return {"strawman_wasted_seconds": None, "high_frequency_wasted_seconds": None}
    all_bytes, speed = sum(record.state_bytes for record in records), link_mbit * 1e6 / 8
    iteration = _median(_seconds(records, NONE if NONE in methods else methods[0], "iterations"))
    return {
        "strawman_wasted_seconds": bounds.strawman_wasted_seconds(all_bytes, speed),
        "high_frequency_wasted_seconds": bounds.high_frequency_wasted_seconds(all_bytes, speed, iteration),
    }


def _link_share(recovery: Recovery | None, link_mbit: float | None) -> float | None:
    if recovery is None or recovery.fetched_bytes_per_second is None or link_mbit is None:
        return None
    return recovery.fetched_bytes_per_second * 8e-6 / link_mbit


def _turns(records: Sequence[OverheadRecord], method: str) -> list[list[Block]]:
    """The blocks of a method, turn by turn, each with the records of all ranks."""
    own = [[block for block in record.blocks if block.method == method] for record in records]
    return [list(turn) for turn in zip(*own, strict=True)]


def _seconds(records: Sequence[OverheadRecord], method: str, name: str) -> list[list[float]]:
    """Turn by turn, the mean over ranks of each iteration."""
    return [
        [statistics.fmean(ranks) for ranks in zip(*(getattr(block, name) for block in turn), strict=True)]
        for turn in _turns(records, method)
    ]


def _median(turns: Sequence[Sequence[float]]) -> float:
    return statistics.median([seconds for turn in turns for seconds in turn])
