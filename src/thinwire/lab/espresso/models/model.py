"""Planners' description of a published model: its gradients in backward order, with their sizes and ready times.

Only totals of backward times are published in words; a total is split over the tensors by the multiply-adds of each
parameter in one sample's forward pass: its elements times the uses of each (positions of a convolution, tokens of a
linear layer). A gradient's share of backward is proportional to that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from thinwire.fuse.profile import Linear, Profile
from thinwire.lab.espresso.cluster import Cluster
from thinwire.lab.espresso.job import Cost, EspressoJob
from thinwire.lab.espresso.models.published import compression

FORWARD_OVER_BACKWARD = 0.5
"""Ratio of forward to backward time: one product for each weight against two, for the gradients of input and weight."""

_ELEMENT_BYTES = 4  # all six are trained in float32
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class ModelParameter:
    """One gradient. ``uses``: number of times that one sample's forward pass multiplies with each of its elements."""

    name: str
    shape: tuple[int, ...]
    uses: float = 1.0

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ELEMENT_BYTES

    @property
    def multiply_adds(self) -> float:
        return math.prod(self.shape) * self.uses


@dataclass(frozen=True)
class PublishedModel:
    """A model of Espresso's evaluation (EuroSys'23, tables 4 and 5).

    Attributes:
        name: "vgg16".
        parameters: in backward order.
        backward_total_seconds: seconds from the first gradient to the last, one accelerator (NVIDIA V100).
        published_tensors, published_mebibytes: as in the paper, rounded up there; see `size_error`.
        algorithm: the compressor that the paper's figures 12 and 13 train it with.
        cpu_gbit: rate at which a host's processors encode and decode its gradients, see `published.compression`.
        source: source of the numbers.
    """

    name: str
    parameters: tuple[ModelParameter, ...]
    backward_total_seconds: float
    published_tensors: int
    published_mebibytes: float
    algorithm: str
    cpu_gbit: float
    source: str

    @property
    def num_tensors(self) -> int:
        return len(self.parameters)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @cached_property
    def size_bytes(self) -> tuple[int, ...]:
        return tuple(parameter.size_bytes for parameter in self.parameters)

    @property
    def mebibytes(self) -> float:
        return sum(self.size_bytes) / _MEBIBYTE

    @property
    def size_error(self) -> float:
        """Relative difference of the generated gradients from the published size: 0.01 is 1 % more."""
        return self.mebibytes / self.published_mebibytes - 1

    @cached_property
    def backward_seconds(self) -> tuple[float, ...]:
        """Backward time of each tensor: the total, split by multiply-adds."""
        total = sum(parameter.multiply_adds for parameter in self.parameters)
        return tuple(self.backward_total_seconds * item.multiply_adds / total for item in self.parameters)

    @property
    def other_seconds(self) -> float:
        """Seconds of the forward pass, assumed half a backward pass: `FORWARD_OVER_BACKWARD`."""
        return FORWARD_OVER_BACKWARD * self.backward_total_seconds

    def profile(self, algorithm: str | None, device: str, communicate: Linear) -> Profile:
        """Return the profile for fusion policies.

        Args:
            algorithm: "random_k", "dgc", "ef_sign_sgd" or "onebit"; None: uncompressed.
            device: "gpu": encoding and decoding delay backward. "cpu": they run beside it and take their turn with
                communication, so that ``communicate`` contains them.
            communicate: seconds of a group's uncompressed bytes; compression is folded into its beta here.

        Raises:
            ValueError: an unknown algorithm or device.
        """
        free = Linear(0.0, 0.0)
        encode = decode = free
        if device not in ("gpu", "cpu"):
            raise ValueError(f"device is {device!r}: gpu or cpu")
        if algorithm is not None:
            costs = compression(algorithm, self.cpu_gbit)
            communicate = Linear(communicate.alpha, communicate.beta * costs.ratio)
            on_gpu = device == "gpu"
            encode = _line(costs.encode if on_gpu else costs.cpu_encode, self.size_bytes)
            decode = _line(costs.decode if on_gpu else costs.cpu_decode, self.size_bytes)
            if not on_gpu:
                together = encode.alpha + decode.alpha, encode.beta + decode.beta
                communicate = Linear(communicate.alpha + together[0], communicate.beta + together[1])
                encode = decode = free
        return Profile(
            self.backward_seconds, self.size_bytes, encode, decode, communicate, self.names, self.other_seconds
        )

    def espresso_inputs(self, cluster: Cluster, algorithm: str | None = None) -> EspressoJob:
        """Return the job for `thinwire.lab.espresso.espresso`.

        ``algorithm`` is as in `profile`, by default that of the paper's figures.
        """
        costs = compression(algorithm or self.algorithm, self.cpu_gbit)
        return EspressoJob(self.backward_seconds, self.size_bytes, costs, cluster, self.names, self.other_seconds)


def _line(cost: Cost, size_bytes: tuple[int, ...]) -> Linear:
    """A kernel's nearest line for groups from the smallest tensor to the whole model."""
    if isinstance(cost, Linear):
        return cost
    smallest, largest = min(size_bytes), sum(size_bytes)
    return cost.linear([2**power for power in range(smallest.bit_length() - 1, largest.bit_length() + 1)])


def backward_order(forward: Iterable[ModelParameter]) -> tuple[ModelParameter, ...]:
    """Return parameters of layers in forward order, last layer first; a layer's bias is ready before its weight."""
    return tuple(reversed(tuple(forward)))


def convolution(
    name: str, channels_in: int, channels_out: int, kernel: int, side: int, bias: bool = False
) -> list[ModelParameter]:
    """Return weight, then bias, of a convolution; ``side`` is that of the square output."""
    found = [ModelParameter(f"{name}.weight", (channels_out, channels_in, kernel, kernel), side**2)]
    return [*found, ModelParameter(f"{name}.bias", (channels_out,), side**2)] if bias else found


def linear(
    name: str, features_in: int, features_out: int, uses: float = 1.0, bias: bool = True
) -> list[ModelParameter]:
    found = [ModelParameter(f"{name}.weight", (features_out, features_in), uses)]
    return [*found, ModelParameter(f"{name}.bias", (features_out,), uses)] if bias else found


def norm(name: str, features: int, uses: float) -> list[ModelParameter]:
    """Return batch or layer normalization: bias, then weight, so that backward has the weight first."""
    return [ModelParameter(f"{name}.bias", (features,), uses), ModelParameter(f"{name}.weight", (features,), uses)]
