"""Input of Espresso: a model's backward pass, a compression, and a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thinwire.fuse.profile import Linear
from thinwire.lab.espresso.cluster import Cluster
from thinwire.lab.espresso.collectives import Numbers


@dataclass(frozen=True)
class KernelCosts:
    """Cost max(launch, beta * size_bytes) in seconds: a kernel that works while the next is launched, or waits for
    launches.

    Args:
        launch: seconds for a tensor of any small size.
        beta: seconds a byte, for large ones.

    Raises:
        ValueError: numbers that are not finite or below 0.

    Example:
        >>> kernel = Kernel(launch=1e-4, beta=1e-10)
        >>> kernel(1000), kernel(10_000_000)
        (0.0001, 0.001)
    """

    launch: float
    beta: float

    def __post_init__(self) -> None:
        Linear(self.launch, self.beta)  # the same rules

    def __call__(self, size_bytes: float) -> float:
        return max(self.launch, self.beta * size_bytes)

    def linear(self, size_bytes: Sequence[float]) -> Linear:
        """Return the nearest line at these sizes, by relative error: for planners that need alpha and beta."""
        return Linear.fit(size_bytes, [self(size) for size in size_bytes], relative=True)


Cost = Linear | KernelCosts

_FREE = Linear(0.0, 0.0)


def seconds_of(cost: Cost, size_bytes: Numbers) -> Numbers:
    """Return the cost of one size, or of an array of sizes."""
    if isinstance(cost, KernelCosts):
        return np.maximum(cost.launch, cost.beta * size_bytes)
    return cost.alpha + cost.beta * size_bytes


@dataclass(frozen=True)
class CompressionCosts:
    """Costs of a compressor, on either device.

    Args:
        name: name for tables.
        ratio: bytes on the wire over bytes of the gradient, from 0 to 1. Size and costs must not depend on the values:
            a method whose size does has no fixed position in a timeline.
        encode, decode: costs on the accelerator, of the gradient bytes that one rank encodes or decodes at once.
        cpu_encode, cpu_decode: costs on a host's processors, of the bytes of all ranks of the host together.
        further_payload: decoding n payloads of one region into one sum is a pass over bytes * (1 + (n - 1) * this).
            1 where each payload is a whole pass (signs); about the density where only the first is (sparse).

    Raises:
        ValueError: a ratio or further_payload outside [0, 1], or costs that are neither Linear nor Kernel.
    """

    name: str
    ratio: float
    encode: Cost
    decode: Cost
    cpu_encode: Cost
    cpu_decode: Cost
    further_payload: float = 1.0

    def __post_init__(self) -> None:
        for what in ("ratio", "further_payload"):
            if not 0 <= getattr(self, what) <= 1:
                raise ValueError(f"{what} of {self.name} is {getattr(self, what)}; it is from 0 to 1")
        for what in ("encode", "decode", "cpu_encode", "cpu_decode"):
            if not isinstance(getattr(self, what), Cost):
                raise ValueError(f"{what} of {self.name} is {getattr(self, what)!r}: give a Linear or a Kernel")

    def free(self) -> CompressionCosts:
        """Return the same compression at no cost to encode and decode."""
        return replace(self, encode=_FREE, decode=_FREE, cpu_encode=_FREE, cpu_decode=_FREE)


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
