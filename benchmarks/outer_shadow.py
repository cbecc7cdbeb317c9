"""What rounds in the background add to a step: the gpt job of ``thinwire bench train`` under ShadowSync, and without.

    python benchmarks/outer_shadow.py [--hosts 8] [--link 100mbit] [--algorithm easgd] [--steps 12] [--segments 4]

The same processes train in segments, by turns with rounds in the background and without any synchronization: rounds are
ended, and the hooks of the optimizer removed. All ranks begin a segment together, and it takes as long as its slowest
rank. Ratios are of pairs of segments beside each other. Where ranks share processors, those of processor time vary
less. Links other than "none" need network namespaces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link


def over_ranks(value: float, how: Any) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, how)
    return found.item()


def measured(context: RankContext, arguments: argparse.Namespace) -> dict[str, Any]:
    job = get_job(arguments.job)
    training = job.training(None, context.rank, context.world_size, 0)
    model, optimizer = training.model, job.optimizer_of(training)
    recipe = thinwire.outer.shadow_sync(arguments.algorithm, every_seconds=arguments.every_seconds)
    sync: Any = thinwire.outer.attach(model, optimizer, recipe)

    def segment() -> tuple[float, float]:
        """Seconds of a step on the slowest rank, and processor seconds of a step, a mean over ranks."""
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        for _ in range(arguments.steps):
            optimizer.zero_grad()
            training.loss(model, training.batch()).backward()
            job.clip(model)
            optimizer.step()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
        total = over_ranks(cpu_seconds, dist.ReduceOp.SUM) / context.world_size
        return over_ranks(seconds, dist.ReduceOp.MAX) / arguments.steps, total / arguments.steps

    segment()
    with_rounds, without, rounds = [], [], []
    for number in range(2 * arguments.segments):
        if number % 4 in (0, 3):
            before = sync.stats()
            with_rounds.append(segment())
            after = sync.stats()
            rounds.append({name: after[name] - before[name] for name in ("outer/rounds", "comm/exposed_seconds")})
        else:
            with sync._rounds.stopped():
                sync._hook.remove()
                without.append(segment())
                sync._hook.register(optimizer)
    sync.synchronize()
    stats = sync.stats()
    sync.detach()
    return {"with": with_rounds, "without": without, "rounds": rounds, "stats": stats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="gpt")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", type=Link.parse, default=Link.parse("100mbit"))
    parser.add_argument("--algorithm", default="easgd")
    parser.add_argument("--every-seconds", type=float)
    parser.add_argument("--steps", type=int, default=12, help="of a segment")
    parser.add_argument("--segments", type=int, default=4, help="of each kind")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    emulated = arguments.link.mbit is not None
    with EmulatedNetwork(hosts=arguments.hosts, link=arguments.link) if emulated else nullcontext() as network:
        outcomes = run_ranks(measured, arguments, world_size=arguments.hosts, network=network, timeout_seconds=600)
    found = outcomes[0].value
    for name in ("with", "without"):
        print(f"seconds of a step {name} rounds: " + ", ".join(f"{one:.4f}" for one, _ in found[name]))
    print("rounds in each segment: " + ", ".join(f"{one['outer/rounds']:g}" for one in found["rounds"]))
    waited = sum(one["comm/exposed_seconds"] for one in found["rounds"])
    print(f"exposed: {waited / len(found['rounds']) / arguments.steps:.5f} s a step, on rank 0")
    for place, name in enumerate(("seconds of a step", "processor seconds of a step")):
        ratios = [one[place] / other[place] for one, other in zip(found["with"], found["without"], strict=True)]
        means = [statistics.mean(one[place] for one in found[kind]) for kind in ("with", "without")]
        print(
            f"ratio of {name}: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f};"
            f" of the means {means[0] / means[1]:.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
