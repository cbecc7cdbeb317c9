"""What thinwire's hooks take of the training thread in a step of a model that is left to stock DDP.

    python benchmarks/hook_cost.py --jobs table_dense,mlp

The model trains on two ranks over loopback, as the jobs of `not_slower.py` do. Each hook is timed from outside, in the
second half of the steps: medians in microseconds, and how often it is called in a step. A wrapper adds 0.2 us.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import not_slower
from thinwire.gradients import ddp, passes
from thinwire.lab.testbed.launch import leave_kernels_to_ranks, preload, values_of_ranks
from thinwire.lab.testbed.rank import RankContext

HOOKS = {
    passes.Passes: ("_before_forward", "_after_forward", "begin", "_end_backward", "_before_optimizer"),
    passes.Guard: ("enter",),
    ddp.LeftToDdp: ("_on_gradient",),
}


def train(context: RankContext, name: str, steps: int) -> dict[str, tuple[float, float]]:
    """Return calls in a step and median seconds of each hook, and those of the step."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def watch(owner: type, name: str) -> None:
        method = getattr(owner, name)
        is_static = isinstance(vars(owner)[name], staticmethod)

        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = method(*args)
            seconds[f"{owner.__name__}.{name}"].append(time.perf_counter() - started)
            return result

        setattr(owner, name, staticmethod(call) if is_static else call)

    for owner, names in HOOKS.items():
        for each in names:
            watch(owner, each)
    training = not_slower.Training(name, context.rank, is_attached=True)
    for step in range(steps):
        training.step(step)
    seconds["step"] = training.seconds
    late = {key: taken[len(taken) // 2 :] for key, taken in seconds.items()}
    return {key: (2 * len(taken) / steps, statistics.median(taken)) for key, taken in late.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="table_dense,mlp")
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    for module in ("torch._dynamo", "thinwire.lab.demo.model"):
        preload(module)
    leave_kernels_to_ranks()
    for name in options.jobs.split(","):
        first, _ = values_of_ranks(train, name, options.steps, world_size=2, timeout_seconds=600)
        total = sum(calls * seconds for key, (calls, seconds) in first.items() if key != "step")
        print(f"{name}: {1e6 * total:.0f} us of {1e6 * first['step'][1]:.0f}")
        for key, (calls, seconds) in first.items():
            print(f"  {key:26} {calls:4.1f} x {1e6 * seconds:6.1f} us", flush=True)


if __name__ == "__main__":
    main()
