"""Methods measured in turns, interleaved, on emulated hosts or by the ranks of a job that torchrun started."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from thinwire.comm.hosts import HOST_VARIABLE
from thinwire.comm.lane import Lane
from thinwire.lab.bench.in_job import is_in_job, job_group, on_all_ranks
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import values_of_ranks
from thinwire.lab.testbed.network import Link, emulated
from thinwire.lab.testbed.rank import RankContext

Value = TypeVar("Value")
_HEAD_START_SECONDS = 0.05  # a broadcast of 8 bytes lasts 5 to 15 ms


@dataclass
class TimedRun:
    """One run on a rank: start and end, see `Turns`, the bytes that it sent, and what it returned."""

    times: tuple[float, float]
    sent_bytes: int
    sent_between_hosts_bytes: int
    result: Any


@dataclass(frozen=True)
class Turns:
    """How often each method runs; in every turn each runs once.

    Args:
        repeat: turns that are timed.
        warm_up: full turns before, which are not; a run on a few rows always comes first.
        ranks_per_host: so many consecutive ranks pretend to share a host; None if they are on hosts of their own.
        one_clock: whether all ranks are on one machine, whose clock times a run from the first start to the last end.
            Otherwise each rank times itself from a barrier on.
        interface: network interface of each host, whose sent bytes are counted; None if it has none of its own.
    """

    repeat: int
    warm_up: int = 0
    ranks_per_host: int | None = None
    one_clock: bool = True
    interface: str | None = None

    def share_hosts(self, context: RankContext) -> None:
        """Have this rank pretend to share a host with its neighbours."""
        if self.ranks_per_host is not None:
            os.environ[HOST_VARIABLE] = str(context.rank // self.ranks_per_host)

    def run(self, context: RankContext, methods: Sequence[str], run: Callable[[str], Value]) -> dict[str, list[Value]]:
        """Call ``run`` for each method in turn, report each call, and return what those that count returned."""
        runs: dict[str, list[Value]] = {method: [] for method in methods}
        for turn in range(self.warm_up + self.repeat):
            for method in methods:
                value = run(method)
                if turn >= self.warm_up:
                    runs[method].append(value)
                context.send(method)
        return runs


@dataclass(frozen=True, kw_only=True)
class HostsBenchmark:
    """What benchmarks of methods in turns have in common: hosts, their link, and how often each method runs."""

    hosts: int = 8
    ranks_per_host: int = 1
    link: Link = Link(None)  # noqa: RUF009  # frozen
    methods: tuple[str, ...] = ()
    repeat: int = 5
    warm_up: int = 0
    timeout_seconds: float = 1800.0

    def check_numbers(self) -> None:
        """Raise ValueError for numbers below one."""
        if min(self.hosts, self.ranks_per_host, self.repeat) < 1 or not self.methods:
            raise ValueError("hosts, ranks per host, repeats and methods must be at least one")
        if self.warm_up < 0:
            raise ValueError(f"turns before those that count are at least 0, not {self.warm_up}")

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def num_runs(self) -> int:
        return len(self.methods) * (self.warm_up + self.repeat)

    def environment(self, seed: int) -> dict[str, Any]:
        """Return the conditions of the run, for its JSON."""
        return {**conditions(self.hosts, self.link), "repeat": self.repeat, "warm_up": self.warm_up, "seed": seed}

    def measure(
        self, function: Callable[..., Any], *args: Any, on_progress: Callable[[str], None], kernels: Any = None
    ) -> tuple[float | None, list[Any]]:
        """Call ``function(context, *args, turns)`` on all ranks; return the measured link and the values of all.

        In a job that torchrun started these are its ranks, over its own network; else ranks on emulated hosts.
        """
        if is_in_job():
            turns = Turns(self.repeat, self.warm_up, one_clock=self.hosts == 1)
            with job_group():
                return None, on_all_ranks(function, *args, turns, on_message=on_progress)
        with emulated(self.hosts, self.link) as network:
            link_mbit = network.measure() if network else None
            interface = network.interface if network else None
            turns = Turns(self.repeat, self.warm_up, None if network else self.ranks_per_host, interface=interface)
            return link_mbit, values_of_ranks(
                function,
                *args,
                turns,
                world_size=self.world_size,
                ranks_per_host=self.ranks_per_host if network else None,
                network=network,
                timeout_seconds=self.timeout_seconds,
                on_message=lambda rank, message: on_progress(message) if rank == 0 else None,
                kernels=kernels,
            )


def conditions(hosts: int, link: Link) -> dict[str, Any]:
    """Return versions, hosts, link and threads, for the JSON of a benchmark."""
    return {
        **environment(),
        "hosts": hosts,
        "in_job": is_in_job(),
        "link_nominal_mbit": link.mbit,
        "threads_per_rank": torch.get_num_threads() if is_in_job() else 1,
    }


def timed(run: Callable[[], object], lane: Lane, one_clock: bool) -> TimedRun:
    """Run on all ranks together."""
    before = replace(lane.exchange.traffic)
    if one_clock:
        start_together()
    else:
        dist.barrier()
    started = time.perf_counter()
    result = run()
    ended = time.perf_counter()
    now = lane.exchange.traffic
    sent_bytes = now.sent_bytes - before.sent_bytes
    between_bytes = now.sent_between_hosts_bytes - before.sent_between_hosts_bytes
    origin = 0.0 if one_clock else started
    return TimedRun((started - origin, ended - origin), sent_bytes, between_bytes, result)


def start_together() -> None:
    """Return at the same instant on all ranks. They leave a barrier 10 ms apart on two cores, which is not the
    synchronization's time; the clock is the machine's, so rank 0 can name an instant for all."""
    dist.barrier()
    instant = torch.tensor([time.perf_counter() + _HEAD_START_SECONDS], dtype=torch.float64)
    dist.broadcast(instant, 0)
    time.sleep(max(0.0, instant.item() - time.perf_counter()))


def seconds_of_runs(times: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the seconds of each run, from the first rank that started to the last that ended, by the times of each."""
    return [max(end for _, end in run) - min(start for start, _ in run) for run in zip(*times, strict=True)]


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there, or None if there is none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of values at a share of them."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))
