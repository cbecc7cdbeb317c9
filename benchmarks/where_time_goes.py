"""Where the time of a synchronization by columns goes: opening, push, sum, pull, beside what the wire needs.

    python benchmarks/where_time_goes.py --hosts 8 --link 100mbit --workload lstm

Medians over repetitions of the mean over ranks. Needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise

import torch

from thinwire import kernels
from thinwire.bench.sync_rank import _runner, _start_together
from thinwire.bench.workload import Workload
from thinwire.lane import Lane
from thinwire.sync.channel import Channel
from thinwire.sync.named import resolve
from thinwire.sync.parcels import Parcels
from thinwire.sync.patterns.known_ids import _Run
from thinwire.sync.stream import Receive
from thinwire.testbed.launch import run_ranks
from thinwire.testbed.network import EmulatedNetwork, Link
from thinwire.testbed.rank import RankContext

PHASES = ("opening", "push", "sum", "pull")


def watch() -> dict[str, float]:
    """Moments of the last synchronization, by wrapping the steps that it consists of."""
    moments: dict[str, float] = {}

    def after(name: str, owner: type, method: str) -> None:
        original = getattr(owner, method)

        def timed(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            moments[name] = time.perf_counter()
            return result

        setattr(owner, method, timed)

    receive = Parcels.receive

    def timed_receive(self: Parcels, source: int, place: int, num_bytes: int) -> Receive:
        wait = receive(self, source, place, num_bytes)

        def timed(num_bytes: int | None = None) -> torch.Tensor:
            data = wait(num_bytes)
            if "summed" not in moments:
                moments["pushed"] = time.perf_counter()
            return data

        return timed

    after("opened", Channel, "open")
    after("summed", _Run, "_send_back")
    Parcels.receive = timed_receive  # pyrefly: ignore [bad-assignment]
    return moments


def measure(context: RankContext, workload: Workload, repeat: int) -> list[list[float]]:
    """For each repetition the seconds of each phase."""
    torch.set_num_threads(1)
    kernels.warm_up()
    moments, lane, rows = watch(), Lane(), workload.rows(context.rank)
    phases = []
    for _ in range(repeat + 1):
        run = _runner(resolve("column_split"), lane, rows)
        _start_together()
        moments.clear()
        started = time.perf_counter()
        run()
        marks = [started, moments["opened"], moments["pushed"], moments["summed"], time.perf_counter()]
        phases.append([end - begin for begin, end in pairwise(marks)])
    lane.close()
    return phases[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", type=Link.parse, default="100mbit")
    parser.add_argument("--workload", default="lstm")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    workload = Workload(options.workload, False, None, 0, options.hosts, torch.float32)
    with EmulatedNetwork(options.hosts, options.link) as network:
        mbit = network.measure()
        outcomes = run_ranks(measure, workload, options.repeat, world_size=options.hosts, network=network)
    ids = [workload.ids(rank) for rank in range(options.hosts)]
    _, width = workload.shape()
    away = (options.hosts - 1) / options.hosts * width * 4 * 8e-6 / mbit
    wire = {
        "push": max(part.numel() for part in ids) * away,
        "pull": torch.cat(ids).unique().numel() * away,
    }
    print(f"{options.workload}, {options.hosts} hosts, {mbit:.1f} Mbit/s; seconds, beside the busiest rank's wire")
    for place, phase in enumerate(PHASES):
        means = [statistics.fmean(outcome.value[run][place] for outcome in outcomes) for run in range(options.repeat)]
        needed = f"  wire {wire[phase]:.4f}" if phase in wire else ""
        print(f"  {phase:8} {statistics.median(means):.4f}{needed}")


if __name__ == "__main__":
    main()
