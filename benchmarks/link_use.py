"""How busy the links of emulated hosts are over the steps of a training, by method: where does a sum lose its time?

    python benchmarks/link_use.py --methods lossless,bf16

A thread of each rank reads the counter of its interface every 5 ms. Of each step: its milliseconds, when the last
gradient was there (the median over ranks), and the share of the link that was used in each 20 ms, the mean over hosts.
Of all of them: how far ranks begin a step apart, and what one takes of a processor before its last gradient and after.
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

Marks = list[tuple[float, float, float, float, float]]


def train(context: RankContext, training: JobTraining, data: Any) -> tuple[list[tuple[float, int]], Marks]:
    """Train, and return the bytes sent by times, and of each step start, last gradient and end, and seconds of a
    processor until the last gradient and until the end."""
    trainer, samples, marks, over = _Trainer(context, training, data), [], [], threading.Event()
    sampling = last = 0.0

    def sample() -> None:
        nonlocal sampling
        while not over.wait(TICK):
            samples.append((time.perf_counter(), interface_bytes_sent(EmulatedNetwork.interface)))
            sampling = time.thread_time()

    def used() -> float:
        return time.process_time() - sampling

    def note(_: object) -> None:
        nonlocal last
        last = used()

    for parameter in trainer.network.parameters():
        parameter.register_post_accumulate_grad_hook(note)

    thread = threading.Thread(target=sample)
    thread.start()
    dist.barrier()
    for step in range(training.steps):
        started, before = time.perf_counter(), used()
        trainer.step(step + 1)
        marks.append((started, trainer.last_gradient_at, time.perf_counter(), last - before, used() - before))
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
        late = 1e3 * np.array([marks[SKIPPED:] for _, marks in seen])  # [rank, step, mark]
        apart = np.median(np.ptp(late[..., 0], axis=0))
        until, whole = late[..., 3:].mean((0, 1))
        print(f"steps begin {apart:.0f} ms apart; {until:.0f} ms of a processor until the last gradient, ", end="")
        print(f"{whole - until:.0f} after it", flush=True)


if __name__ == "__main__":
    main()
