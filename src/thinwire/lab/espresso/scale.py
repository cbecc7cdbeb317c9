"""Step times of published models on clusters from 2 to 4096 ranks, by Espresso, Cupcake and the systems before them.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from thinwire.fuse.profile import Linear, Profile
from thinwire.lab.espresso.cluster import Cluster
from thinwire.lab.espresso.engine import COMPUTE, LINKS, iteration_seconds
from thinwire.lab.espresso.espresso import espresso
from thinwire.lab.espresso.job import EspressoJob
from thinwire.lab.espresso.models import MODELS
from thinwire.lab.espresso.models.published import TESTBEDS
from thinwire.lab.espresso.models.results import PublishedResult
from thinwire.lab.espresso.options import CPU, DENSE, GPU, Option, between_hosts, options, over_all_ranks
from thinwire.lab.espresso.tasks import PricedOption, Pricer
from thinwire.lab.espresso.upper_bound import upper_bound

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
    from thinwire.fuse.policy import cupcake

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
        return Linear.fit(pricer.sizes, seconds, relative=True) if all(seconds) else Linear(0.0, 0.0)

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
        model: a key of `thinwire.lab.espresso.models.MODELS`.
        algorithm: the compressor; by default that of the paper's figures.
        methods: keys of `METHODS`.

    Raises:
        ValueError: an unknown model or method.

    Example:
        >>> from thinwire.lab.espresso.models.published import nvlink_100g
        >>> [row.speedup > 1 for row in simulate("bert", nvlink_100g(), methods=["espresso"])]
        [True]
    """
    if model not in MODELS or not set(methods) <= set(METHODS):
        raise ValueError(
            f"{model} by {', '.join(methods)}: models are {', '.join(MODELS)}; methods {', '.join(METHODS)}"
        )
    job = MODELS[model]().espresso_inputs(cluster, algorithm)
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
