"""Rate of the link below which a lossless sum is faster than the native all-reduce: codec measured, rest by formula.

    python benchmarks/lossless_break_even.py --jobs gpt:autocast,gpt --hosts 8

Gradients are recorded as `thinwire bench sync --workload dense:...` does. Then one process, alone, codes the largest
bucket of rank 0 and the sum of all ranks, on one thread; each time is the best of several. `thinwire.tune.lossless`
turns that into seconds of a bucket of 25 MB at a rate of the link, and a search over rates finds where both ways cost
the same, with one core for coding and with two, and links that do nothing but carry bytes. ``sum`` is of float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.machine import Machine
from thinwire.lab.bench.dense.workload import DenseWorkload
from thinwire.lab.bench.train.stock import rank_order_sum
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.rank import RankContext
from thinwire.rows import floats
from thinwire.tune.lossless import Code, Ranks, lossless_seconds, native_seconds

BUCKET_BYTES, REPEATS = 25 << 20, 7
MESSAGE_SECONDS = 1e-4


def recorded(context: RankContext, workload: DenseWorkload, data: Any) -> Tensor:
    return max(workload.record(context.rank, context.world_size, data), key=torch.numel)


def best_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def code_of(gradient: Tensor, total: Tensor) -> Code:
    """Return what the code achieves; the decoding of a gradient includes the addition."""
    out, bits, seconds = torch.empty_like(gradient), [], []
    for values, adds in ((gradient, True), (total, False)):
        message = floats.encode(values)
        bits.append(8 * message.numel() / values.numel())

        def decode(message: Tensor = message, adds: bool = adds) -> None:
            floats.decode(message, out)
            if adds:
                total.add(out)

        seconds += [best_seconds(lambda values=values: floats.encode(values)), best_seconds(decode)]
    return Code(bits[0], bits[1], *(each / gradient.nbytes for each in seconds))


def break_even_mbit(code: Code, ranks: Ranks) -> float:
    """Return the rate at which both ways take as long, by halving the interval."""
    low, high = 1.0, 1e6
    for _ in range(60):
        rate = (low * high) ** 0.5
        byte_seconds = 8e-6 / rate
        link = Machine(MESSAGE_SECONDS, MESSAGE_SECONDS, byte_seconds, byte_seconds, 0, 0, 0, 0, 0, 0, 0)
        native = native_seconds(BUCKET_BYTES, ranks.world_size, link)
        is_faster = lossless_seconds(BUCKET_BYTES, ranks, link, code) < native
        low, high = (rate, high) if is_faster else (low, rate)
    return low


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="gpt:autocast,gpt:autocast:accumulate=4,gpt")
    parser.add_argument("--hosts", type=int, default=8)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kernels.warm_up()
    print(
        "| gradients of | bits | encode, decode + add GB/s | of the sum | memcpy | one core | two cores |\n"
        + "|---" * 7
        + "|"
    )
    for job in options.jobs.split(","):
        workload = DenseWorkload(f"dense:{job}")
        outcomes = run_ranks(recorded, workload, workload.job.load(), world_size=options.hosts)
        gradients = [outcome.value for outcome in outcomes]
        total = rank_order_sum(gradients)
        code = code_of(gradients[0], total)
        target = torch.empty_like(total)
        speeds = [
            f"{1e-9 / seconds:.2f}"
            for seconds in (
                code.encode_byte_seconds,
                code.decode_byte_seconds,
                code.encode_sum_byte_seconds,
                code.decode_sum_byte_seconds,
                best_seconds(lambda total=total, target=target: target.copy_(total)) / total.nbytes,
            )
        ]
        rates = [break_even_mbit(code, Ranks(options.hosts, cores=cores)) for cores in (1, 2)]
        print(
            f"| `dense:{job}` | {code.push_bits:.1f} + {code.pull_bits:.1f} | {speeds[0]}, {speeds[1]}"
            f" | {speeds[2]}, {speeds[3]} | {speeds[4]} | {rates[0]:.0f} Mbit/s | {rates[1]:.0f} Mbit/s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
