"""Where the time of a synchronization by columns goes, beside what the wire needs.

    python benchmarks/where_time_goes.py --hosts 8 --link 100mbit --workload lstm

Opening; early columns, until the first sum is sent (all columns, where no rows are dealt); rows that are dealt, until
the last sum is sent; and the rest of the pull. Sums are sent while later columns are still pushed, so each phase stands
beside what a rank has sent or got at least by its end. Medians over repetitions of the mean over ranks. Needs the right
to make network namespaces.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise

import torch

from thinwire import kernels
from thinwire.comm.channel import Channel
from thinwire.comm.lane import Lane
from thinwire.lab.bench.sync_rank import _runner
from thinwire.lab.bench.turns import start_together
from thinwire.lab.bench.workload import Workload
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext
from thinwire.sums.known_ids import _Shares
from thinwire.sums.named import resolve
from thinwire.sums.scheme import Scheme
from thinwire.sums.union_shares import UnionPlan

PHASES = ("opening", "early push", "late push", "pull")


def watch() -> list[float]:
    """Moments of the last synchronization, by wrapping the steps that it consists of."""
    moments: list[float] = []

    def after(owner: type, method: str) -> None:
        original = getattr(owner, method)

        def timed(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            moments.append(time.perf_counter())
            return result

        setattr(owner, method, timed)

    after(Channel, "open")
    after(_Shares, "pull")
    return moments


def measure(context: RankContext, workload: Workload, repeat: int) -> list[list[float]]:
    """For each repetition the seconds of each phase."""
    torch.set_num_threads(1)
    kernels.warm_up()
    moments, lane, rows = watch(), Lane(), workload.rows(context.rank)
    phases = []
    for _ in range(repeat + 1):
        run = _runner(resolve("column_split"), lane, rows)
        start_together()
        moments.clear()
        started = time.perf_counter()
        run()
        marks = [started, moments[0], moments[1], moments[-1], time.perf_counter()]
        phases.append([end - begin for begin, end in pairwise(marks)])
    lane.close()
    return phases[1:]


def wire_seconds(workload: Workload, world_size: int, mbit: float) -> dict[str, float]:
    """What the values of each phase take on the link, of the rank that sends most."""
    scheme, ids = resolve("column_split"), [workload.ids(rank) for rank in range(world_size)]
    assert isinstance(scheme, Scheme)
    held, (num_rows, width) = tuple(part.numel() for part in ids), workload.shape()
    plan = UnionPlan(held, num_rows, width, 4, scheme)
    union, ranks = plan.union(ids), range(world_size)

    def pushed(rank: int, owner: int, early: bool) -> int:
        shares = [share for share in plan.shares(owner) if share.early is early]
        return sum(plan.values_bytes(union.pushed(share, rank)[0].numel(), share) for share in shares)

    def most(early: bool) -> int:
        return max(sum(pushed(rank, owner, early) for owner in ranks if owner != rank) for rank in ranks)

    sums = max(sum(plan.values_bytes(union.num_rows(share), share) for share in plan.shares(rank)) for rank in ranks)
    bytes_of = {"early push": most(True), "late push": most(False), "pull": (world_size - 1) * sums}
    return {phase: num_bytes * 8e-6 / mbit for phase, num_bytes in bytes_of.items()}


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
    wire = wire_seconds(workload, options.hosts, mbit)
    print(f"{options.workload}, {options.hosts} hosts, {mbit:.1f} Mbit/s; seconds, beside the busiest rank's wire")
    for place, phase in enumerate(PHASES):
        means = [statistics.fmean(outcome.value[run][place] for outcome in outcomes) for run in range(options.repeat)]
        needed = f"  wire {wire[phase]:.4f}" if phase in wire else ""
        print(f"  {phase:10} {statistics.median(means):.4f}{needed}")


if __name__ == "__main__":
    main()
