"""Input of Espresso: a model's backward pass, a compression, and a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

from published.cluster import Cluster
from published.costs import CompressionCosts, compression
from published.models import PublishedModel


@dataclass(frozen=True)
class EspressoJob:
    """One training job for Espresso.

    Args:
        backward_seconds: for each tensor, in backward order: seconds from the gradient before it to its own.
        size_bytes: size of each tensor's gradient.
        compression: the compressor that may be used.
        cluster: the cluster that it runs on.
        names: names of the tensors, or empty.
        other_seconds: forward and optimizer, which no plan changes and none includes: see `step_seconds`.

    Raises:
        ValueError: no tensors, other lengths, or numbers that are not finite or below 0.
    """

    backward_seconds: tuple[float, ...]
    size_bytes: tuple[float, ...]
    compression: CompressionCosts
    cluster: Cluster
    names: tuple[str, ...] = ()
    other_seconds: float = 0.0

    def __post_init__(self) -> None:
        for what in ("backward_seconds", "size_bytes", "names"):
            object.__setattr__(self, what, tuple(getattr(self, what)))
        count = len(self.backward_seconds)
        if not count:
            raise ValueError("a job needs at least one tensor: does any parameter require a gradient?")
        if len(self.size_bytes) != count or len(self.names) not in (0, count):
            raise ValueError(
                f"{count} backward times, {len(self.size_bytes)} sizes and {len(self.names)} names: give one of each"
                " for every tensor, in backward order (names may be left out)"
            )
        for number in (*self.backward_seconds, *self.size_bytes, self.other_seconds):
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{number} among the seconds and bytes: they must be 0 or more; measure again")

    @property
    def num_tensors(self) -> int:
        return len(self.backward_seconds)

    def name(self, tensor: int) -> str:
        return self.names[tensor] if self.names else f"tensor {tensor}"

    def step_seconds(self, iteration_seconds: float) -> float:
        """Return the seconds of a whole step: forward and optimizer, and the timeline's iteration."""
        return self.other_seconds + iteration_seconds

    def scaling_factor(self, iteration_seconds: float) -> float:
        """Return the throughput per rank over that of one rank alone, which communicates nothing."""
        return self.step_seconds(sum(self.backward_seconds)) / self.step_seconds(iteration_seconds)


def job_of(model: PublishedModel, cluster: Cluster, algorithm: str | None = None) -> EspressoJob:
    """Return the job of a published model; ``algorithm`` is by default that of the paper's figures."""
    costs = compression(algorithm or model.algorithm, model.cpu_gbit)
    return EspressoJob(model.backward_seconds, model.size_bytes, costs, cluster, model.names, model.other_seconds)
