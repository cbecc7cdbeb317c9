"""What it costs to choose the elements that are sent: each sparsifier, against torch.topk and one read of the memory.

    python benchmarks/bench_select.py --elements 25000000 --density 0.01 --json selection.json

Methods and torch.topk take turns, so that what else the machine does falls on all. Times are medians, the ratio is the
median over the turns. The floor is the time of reading the gradient once, at the bandwidth that one thread measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from thinwire import compress, kernels
from thinwire.compress.base import Parameter
from thinwire.compress.methods.sparsify import DensitySparsifier
from thinwire.compress.papers.thresholds import SampledTopK

WARM_UP_CALLS = 16  # compiled, memory touched, and SIDCo has found its number of stages
FEEDBACK_STEPS = 20

METHODS: dict[str, Callable[[float], DensitySparsifier]] = {
    "top_k": compress.top_k,
    "random_k": compress.random_k,
    "gaussian_k": compress.gaussian_k,
    "redsync": compress.redsync,
    "sidco exponential": compress.sidco,
    "sidco gamma": lambda density: compress.sidco(density, distribution="gamma"),
    "sidco pareto": lambda density: compress.sidco(density, distribution="pareto"),
    "ms_top_k": compress.ms_top_k,
    "dgc selection": SampledTopK,
}


def under_feedback(size: int) -> Tensor:
    """What error feedback makes of gradients whose elements have means of their own: a sharp edge at the threshold."""
    scales, memory = torch.randn(size).exp_(), torch.zeros(size)
    means = 0.5 * scales * torch.randn(size)
    for _ in range(FEEDBACK_STEPS):
        memory.add_(means).addcmul_(scales, torch.randn(size))
        memory[kernels.top_magnitudes(memory, max(1, size // 100))[0]] = 0.0
    return memory.add_(means).addcmul_(scales, torch.randn(size))


DISTRIBUTIONS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "laplace": lambda size: torch.empty(size).exponential_() * torch.randn(size).sign(),
    "log-normal": lambda size: torch.randn(size).mul_(2).exp_() * torch.randn(size).sign(),
    "feedback": under_feedback,
}


@dataclass(frozen=True)
class Result:
    """Of one method on one distribution; ``chosen_over_k`` is how many elements it sends, over what was asked for."""

    method: str
    distribution: str
    elements: int
    density: float
    seconds: float
    topk_seconds: float
    times_faster_than_topk: float
    floor_seconds: float
    chosen_over_k: float


def measure(distribution: str, elements: int, density: float, repeat: int) -> list[Result]:
    flat = DISTRIBUTIONS[distribution](elements)
    parameter, k = Parameter("weight", (elements,)), max(1, round(density * elements))
    compressors = {name: make(density) for name, make in METHODS.items()}
    states = {name: compressor.init(parameter) for name, compressor in compressors.items()}
    chosen = {}
    for name, compressor in compressors.items():
        for _ in range(WARM_UP_CALLS):
            chosen[name] = compressor.compress(flat, parameter, states[name]).parts[-1].numel() / k
    calls: dict[str, Callable[[], object]] = {
        "torch.topk": lambda: torch.topk(flat.abs(), k, sorted=False),
        **{name: _call(compressor, flat, parameter, states[name]) for name, compressor in compressors.items()},
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            samples[name].append(seconds(call))
    topk, floor = samples.pop("torch.topk"), min(seconds(flat.sum) for _ in range(7))
    return [
        Result(
            name,
            distribution,
            elements,
            density,
            statistics.median(times),
            statistics.median(topk),
            statistics.median(other / own for own, other in zip(times, topk, strict=True)),
            floor,
            chosen[name],
        )
        for name, times in samples.items()
    ]


def _call(compressor: DensitySparsifier, flat: Tensor, parameter: Parameter, state: dict) -> Callable[[], object]:
    return lambda: compressor.compress(flat, parameter, state)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def show(results: list[Result]) -> None:
    first = results[0]
    print(
        f"\n{first.distribution}: {first.elements:,} float32, density {first.density:g}; torch.topk of the magnitudes"
        f" {1e3 * first.topk_seconds:.0f} ms, floor {1e3 * first.floor_seconds:.1f} ms"
    )
    print(f"{'method':<20}{'ms':>9}{'x floor':>9}{'x faster than topk':>20}{'chosen / k':>12}")
    for result in results:
        print(
            f"{result.method:<20}{1e3 * result.seconds:>9.1f}{result.seconds / result.floor_seconds:>9.1f}"
            f"{result.times_faster_than_topk:>20.1f}{result.chosen_over_k:>12.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--distributions", nargs="+", choices=list(DISTRIBUTIONS), default=list(DISTRIBUTIONS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; the kernels use one")
    parser.add_argument("--json", help="where to write all figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    kernels.warm_up()
    results = []
    for distribution in arguments.distributions:
        results.append(measure(distribution, arguments.elements, arguments.density, arguments.repeat))
        show(results[-1])
    if arguments.json:
        environment = {"torch": torch.__version__, "threads": arguments.threads, "repeat": arguments.repeat}
        rows = [asdict(result) for group in results for result in group]
        with open(arguments.json, "w") as file:
            json.dump({"environment": environment, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
