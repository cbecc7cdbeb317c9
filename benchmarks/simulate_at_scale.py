"""Published models on 2 to 4096 simulated ranks, and the papers' results beside it: the tables of
docs/internals/planning-at-scale.md, as Markdown.

    python benchmarks/simulate_at_scale.py [--json rows.json]

Nothing is measured: the timeline of `espresso.engine` at published costs.

The others are strategies on the same timeline, at the same costs:

- dense: every tensor alone as it gets ready (WFBP), hierarchical, uncompressed. BytePS without compression.
- layer_wise: every tensor encoded on the GPU and all-gathered among all ranks.
- hi_top_k_comm: every tensor's shard encoded on the GPU, all-gathered between hosts (HiTopKComm, MLSys'21).
- hi_press: between hosts and on the GPU too, divisible or not, but a tensor only if that costs less wall time than no
  compression; interactions among tensors are ignored (HiPress, SOSP'21).
- byteps_compress: between hosts by the host's processors, a server on each host, tensors of 64 KiB or more
  (BytePS-Compress: BYTEPS_MIN_COMPRESS_BYTES).
- cupcake: groups of tensors, each compressed as by hi_top_k_comm; the groups that its policy finds best.
- espresso, and upper_bound: a step that no plan beats.

Published measurements on 64 V100 are those of Espresso (EuroSys'23): table 1, and the text of sections 5.2.1 and 5.2.3
about figures 12 and 13. Where the text gives a system against dense and another against Espresso, one is divided by the
other; "up to" figures are over several numbers of GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, groupby
from pathlib import Path

from espresso.engine import COMPUTE, LINKS, iteration_seconds
from espresso.espresso import espresso
from espresso.job import EspressoJob, job_of
from espresso.options import CPU, DENSE, GPU, Option, between_hosts, options, over_all_ranks
from espresso.tasks import PricedOption, Pricer
from espresso.testbeds import TESTBEDS
from espresso.upper_bound import upper_bound
from published.cluster import Cluster
from published.models import MODELS
from thinwire.lab.planning.speeds import fit_line
from thinwire.plan.policy import cupcake
from thinwire.plan.profile import Linear, Profile


@dataclass(frozen=True)
class PublishedResult:
    """Result of one published experiment.

    Attributes:
        model, algorithm, testbed: keys of `MODELS`, of `published.ALGORITHMS` and of `published.TESTBEDS`.
        throughput: throughput of each method, relative to the first.
        source: source of the figures.
    """

    model: str
    algorithm: str
    testbed: str
    throughput: tuple[tuple[str, float], ...]
    source: str


RESULTS: tuple[PublishedResult, ...] = (
    PublishedResult(
        "bert",
        "random_k",
        "nvlink_100g",
        (
            ("espresso", 1.0),
            ("byteps_compress", 1 / 1.31),
            ("hi_press", 1 / 1.40),
            ("hi_top_k_comm", 1 / 1.54),
            ("dense", 1 / 1.40 / 1.13),
        ),
        "Espresso +31, +40 and +54 %; HiPress up to 13 % above dense",
    ),
    PublishedResult(
        "gpt2",
        "ef_sign_sgd",
        "nvlink_100g",
        (("espresso", 1.0), ("hi_press", 1 / 1.33), ("byteps_compress", 1 / 1.42)),
        "Espresso +33 and +42 %",
    ),
    PublishedResult(
        "ugatit",
        "dgc",
        "nvlink_100g",
        (
            ("espresso", 1.0),
            ("hi_press", 1 / 1.35),
            ("hi_top_k_comm", 1 / 1.50),
            ("dense", 1 / 2.49),
            ("byteps_compress", 1 / 3.05),
        ),
        "Espresso +35, +50, +149 and +205 %",
    ),
    PublishedResult(
        "vgg16",
        "random_k",
        "pcie_25g",
        (("espresso", 1.0), ("hi_press", 1 / 1.55), ("dense", 1 / 3.69), ("byteps_compress", 1 / 4.57)),
        "Espresso +55, +269 and +357 %",
    ),
    PublishedResult(
        "lstm",
        "ef_sign_sgd",
        "pcie_25g",
        (
            ("espresso", 1.0),
            ("hi_top_k_comm", 1 / 1.73),
            ("hi_press", 1 / 1.77),
            ("dense", 1 / 1.77 / 1.02),
            ("byteps_compress", 1 / 2.01),
        ),
        "Espresso +73, +77 and +101 %; HiPress up to 2 % above dense",
    ),
    PublishedResult(
        "resnet101",
        "dgc",
        "pcie_25g",
        (
            ("espresso", 1.0),
            ("byteps_compress", 1 / 1.18),
            ("dense", 1 / 1.20),
            ("hi_press", 1 / 1.24),
            ("hi_top_k_comm", 0.46 / 1.20),
        ),
        "Espresso up to +18, +20 and +24 %; HiTopKComm 54 % below dense",
    ),
)

SCALING_FACTORS: tuple[PublishedResult, ...] = (
    PublishedResult(
        "gpt2",
        "dgc",
        "nvlink_100g",
        (("dense", 0.58), ("hi_top_k_comm", 0.67), ("byteps_compress", 0.64)),
        "table 1",
    ),
    PublishedResult(
        "bert",
        "ef_sign_sgd",
        "nvlink_100g",
        (("dense", 0.51), ("hi_top_k_comm", 0.55), ("byteps_compress", 0.61)),
        "table 1",
    ),
    PublishedResult(
        "lstm",
        "dgc",
        "pcie_25g",
        (("dense", 0.46), ("hi_top_k_comm", 0.43), ("byteps_compress", 0.42)),
        "table 1",
    ),
)
"""Published throughput over that of one GPU times their number: every tensor compressed on GPUs, or on processors."""


MIN_COMPRESS_BYTES = 65536

WORLDS: tuple[tuple[int, int], ...] = (
    (2, 1),
    (2, 2),
    (2, 4),
    *((hosts, 8) for hosts in (2, 4, 8, 16, 32, 64, 128, 256, 512)),
)
"""Sizes of clusters as (hosts, ranks per host): 2 to 4096 ranks."""


def _same(job: EspressoJob, choose: Callable[[Pricer, float], PricedOption]) -> float:
    """Each tensor by itself."""
    pricer = Pricer(job.size_bytes, job.cluster, job.compression)
    chains = {size: choose(pricer, size).chain for size in pricer.sizes}
    return iteration_seconds(job.backward_seconds, [chains[size] for size in job.size_bytes])


def _all(option: Option) -> Callable[[EspressoJob], float]:
    return lambda job: _same(job, lambda pricer, size: pricer.choice(option, size))


def _hi_press(job: EspressoJob) -> float:
    candidates = DENSE, between_hosts(GPU), between_hosts(GPU, divisible=True)

    def shortest(pricer: Pricer, size: float) -> PricedOption:
        return min((pricer.choice(option, size) for option in candidates), key=lambda choice: choice.seconds)

    return _same(job, shortest)


def _byteps_compress(job: EspressoJob) -> float:
    compressed = between_hosts(CPU, divisible=True)
    return _same(job, lambda pricer, size: pricer.choice(compressed if size >= MIN_COMPRESS_BYTES else DENSE, size))


def _cupcake(job: EspressoJob) -> float:
    groups = cupcake().groups(_group_profile(job))
    fused = replace(
        job,
        backward_seconds=tuple(sum(job.backward_seconds[tensor] for tensor in group) for group in groups),
        size_bytes=tuple(sum(job.size_bytes[tensor] for tensor in group) for group in groups),
        names=(),
    )
    return METHODS["hi_top_k_comm"](fused)


def _group_profile(job: EspressoJob) -> Profile:
    """Costs of a group, as nearest lines from the smallest tensor to all."""
    sizes = [float(2**power) for power in range(10, int(sum(job.size_bytes)).bit_length() + 1)]
    pricer = Pricer(sizes, job.cluster, job.compression)
    chains = [pricer.choice(between_hosts(GPU), size).chain for size in pricer.sizes]

    def line(seconds: Sequence[float]) -> Linear:
        return fit_line(pricer.sizes, seconds, relative=True) if all(seconds) else Linear(0.0, 0.0)

    code = [[seconds for resource, seconds in chain if resource == COMPUTE] for chain in chains]
    move = [sum(seconds for resource, seconds in chain if resource in LINKS) for chain in chains]
    encode, decode = (line([sum(seconds[place : place + 1]) for seconds in code]) for place in (0, 1))
    return Profile(job.backward_seconds, job.size_bytes, encode, decode, line(move))


METHODS: dict[str, Callable[[EspressoJob], float]] = {
    "dense": _all(DENSE),
    "layer_wise": _all(over_all_ranks(GPU)),
    "hi_top_k_comm": _all(between_hosts(GPU)),
    "hi_press": _hi_press,
    "byteps_compress": _byteps_compress,
    "cupcake": _cupcake,
    "espresso": lambda job: espresso(job, bound=False, refining=False).iteration_seconds,
    "upper_bound": lambda job: upper_bound(job, options(devices=(GPU,))),
}
"""Functions from a job to the seconds of its iteration, by the name of the method."""


@dataclass(frozen=True)
class ScaleRow:
    """Result of one method on one cluster.

    Attributes:
        iteration_seconds: seconds from the start of backward until the last gradient is there.
        step_seconds: the same with the forward pass.
        scaling_factor: throughput over that of one rank times their number.
        speedup: speed-up of a step, over dense.
    """

    model: str
    algorithm: str
    cluster: str
    world_size: int
    hosts: int
    ranks_per_host: int
    method: str
    iteration_seconds: float
    step_seconds: float
    scaling_factor: float
    speedup: float


def simulate(
    model: str, cluster: Cluster, algorithm: str | None = None, methods: Sequence[str] = tuple(METHODS)
) -> tuple[ScaleRow, ...]:
    """Simulate a published model on a cluster, by each method.

    Args:
        model: a key of `published.models.MODELS`.
        algorithm: the compressor; by default that of the paper's figures.
        methods: keys of `METHODS`.

    Raises:
        ValueError: an unknown model or method.

    Example:
        >>> from espresso.testbeds import nvlink_100g
        >>> [row.speedup > 1 for row in simulate("bert", nvlink_100g(), methods=["espresso"])]
        [True]
    """
    if model not in MODELS or not set(methods) <= set(METHODS):
        raise ValueError(
            f"{model} by {', '.join(methods)}: models are {', '.join(MODELS)}; methods {', '.join(METHODS)}"
        )
    job = job_of(MODELS[model](), cluster, algorithm)
    dense = METHODS["dense"](job)
    rows = []
    for method in methods:
        seconds = dense if method == "dense" else METHODS[method](job)
        rows.append(
            ScaleRow(
                model=model,
                algorithm=job.compression.name,
                cluster=cluster.name,
                world_size=cluster.world_size,
                hosts=cluster.hosts,
                ranks_per_host=cluster.ranks_per_host,
                method=method,
                iteration_seconds=seconds,
                step_seconds=job.step_seconds(seconds),
                scaling_factor=job.scaling_factor(seconds),
                speedup=job.step_seconds(dense) / job.step_seconds(seconds),
            )
        )
    return tuple(rows)


def at_scale(
    model: str,
    testbed: str,
    worlds: Sequence[tuple[int, int]] = WORLDS,
    methods: Sequence[str] = tuple(METHODS),
) -> Iterator[ScaleRow]:
    """Simulate a published model from 2 to 4096 ranks on the links of a testbed: "nvlink_100g" or "pcie_25g"."""
    for hosts, ranks_per_host in worlds:
        yield from simulate(model, TESTBEDS[testbed](hosts, ranks_per_host), methods=methods)


@dataclass(frozen=True)
class PublishedComparison:
    """Comparison of a published result with the timeline.

    Attributes:
        published, predicted: throughput of each method, both relative to the published first.
    """

    result: PublishedResult
    published: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def pairs(self) -> tuple[tuple[str, str, bool], ...]:
        """Every two methods: the one that is faster as published, the other, and whether it is here too."""
        names = [name for name, _ in self.result.throughput]
        found = []
        for first, second in combinations(range(len(names)), 2):
            fast, slow = sorted((first, second), key=lambda place: -self.published[place])
            found.append((names[fast], names[slow], self.predicted[fast] > self.predicted[slow]))
        return tuple(found)


def compare(result: PublishedResult) -> PublishedComparison:
    """Run a published experiment on the timeline."""
    names, throughput = zip(*result.throughput, strict=True)
    rows = simulate(result.model, TESTBEDS[result.testbed](), result.algorithm, names)
    speeds = [row.speedup for row in rows]
    return PublishedComparison(
        result,
        published=tuple(value / throughput[0] for value in throughput),
        predicted=tuple(speed / speeds[0] for speed in speeds),
    )


TESTBED_OF = {result.model: result.testbed for result in RESULTS}


def line(cells: Sequence[object]) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def header(cells: Sequence[str]) -> None:
    line(cells)
    print("|" + "---|" * len(cells))


def scale(model: str) -> list[ScaleRow]:
    """Scaling factors, a line for each number of ranks."""
    rows = list(at_scale(model, TESTBED_OF[model]))
    print(f"\n{model}, {rows[0].algorithm}, {TESTBEDS[TESTBED_OF[model]]().name}\n")
    header(["ranks", "hosts x ranks", *METHODS])
    for world_size, group in groupby(rows, key=lambda row: row.world_size):
        found = list(group)
        factors = [f"{row.scaling_factor:.2f}" for row in found]
        line([world_size, f"{found[0].hosts} x {found[0].ranks_per_host}", *factors])
    return rows


def published(results: Sequence[PublishedResult]) -> None:
    """Throughput relative to the first method: as published / as simulated."""
    agreeing = total = 0
    header(["model", "algorithm", "testbed", "published / simulated", "pairs in order", "the other way round"])
    for result in results:
        comparison = compare(result)
        names = [name for name, _ in result.throughput]
        texts = [
            f"{name} {said:.2f} / {found:.2f}"
            for name, said, found in zip(names, comparison.published, comparison.predicted, strict=True)
        ]
        wrong = [f"{fast} > {slow}" for fast, slow, agrees in comparison.pairs if not agrees]
        right = len(comparison.pairs) - len(wrong)
        agreeing, total = agreeing + right, total + len(comparison.pairs)
        cells = [result.model, result.algorithm, result.testbed, ", ".join(texts)]
        line([*cells, f"{right} of {len(comparison.pairs)}", ", ".join(wrong) or "-"])
    print(f"\n{agreeing} of {total} pairs are in the published order.")


def scaling_factors() -> None:
    header(["model", "algorithm", "testbed", "method", "published", "simulated"])
    for result in SCALING_FACTORS:
        names, said = zip(*result.throughput, strict=True)
        rows = simulate(result.model, TESTBEDS[result.testbed](), result.algorithm, names)
        for row, value in zip(rows, said, strict=True):
            cells = [result.model, result.algorithm, result.testbed, row.method]
            line([*cells, f"{value:.2f}", f"{row.scaling_factor:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    print("## Throughput on 64 GPUs, relative to the first method\n")
    published(RESULTS)
    print("\n## Scaling factors on 64 GPUs\n")
    scaling_factors()
    print("\n## Scaling factors from 2 to 4096 ranks")
    rows = [row for model in MODELS for row in scale(model)]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
