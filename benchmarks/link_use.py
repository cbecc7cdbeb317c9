"""How busy the links of emulated hosts are over the steps of a training, by method: where does a sum lose its time?

    python benchmarks/link_use.py --methods lossless,bf16

A thread of each rank reads the counter of its interface every 5 ms. Of each step: its milliseconds, when the last
gradient was there (the median over ranks), and the share of the link that was used in each 20 ms, the mean over hosts.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch.distributed as dist

from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.bench.train.account import interface_bytes_sent
from thinwire.lab.bench.train.rank import JobTraining, _Trainer
from thinwire.lab.testbed.launch import values_of_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link, emulated
from thinwire.lab.testbed.rank import RankContext

TICK, BIN, SKIPPED = 0.005, 0.02, 5

Marks = list[tuple[float, float, float]]


def train(context: RankContext, training: JobTraining, data: Any) -> tuple[list[tuple[float, int]], Marks]:
    """Train, and return the bytes sent by times, and start, last gradient and end of each step."""
    trainer, samples, marks, over = _Trainer(context, training, data), [], [], threading.Event()

    def sample() -> None:
        while not over.wait(TICK):
            samples.append((time.perf_counter(), interface_bytes_sent(EmulatedNetwork.interface)))

    thread = threading.Thread(target=sample)
    thread.start()
    dist.barrier()
    for step in range(training.steps):
        started = time.perf_counter()
        trainer.step(step + 1)
        marks.append((started, trainer.last_gradient_at, time.perf_counter()))
    over.set()
    thread.join()
    dist.barrier()
    trainer.method.close()
    return samples, marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", default="gpt:autocast=bfloat16", help="one that draws its own data")
    parser.add_argument("--methods", default="lossless,bf16")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    job = get_job(options.job)
    for method in options.methods.split(","):
        with emulated(options.hosts, Link.parse(options.link)) as network:
            assert network is not None, "a link has a rate"
            mbit = network.measure()
            training = JobTraining(job, method, 0, options.steps, interface=EmulatedNetwork.interface)
            seen = values_of_ranks(
                train, training, None, world_size=options.hosts, network=network, timeout_seconds=600
            )
        print(f"{method}: {mbit:.1f} Mbit/s")
        for step in range(SKIPPED, options.steps):
            start, end = min(marks[step][0] for _, marks in seen), max(marks[step][2] for _, marks in seen)
            ready = statistics.median(marks[step][1] for _, marks in seen)
            grid = np.arange(start, end + 2 * BIN, BIN)
            sent = np.array([np.interp(grid, *np.array(samples).T) for samples, _ in seen])
            use = np.diff(sent, axis=1).mean(0) * 8e-6 / BIN / mbit
            shares = " ".join(f"{100 * share:.0f}" for share in use)
            print(f"{1e3 * (end - start):.0f} ms, last gradient at {1e3 * (ready - start):.0f}: {shares}", flush=True)


if __name__ == "__main__":
    main()
