"""The measured costs of a training step, by which every plan of fusion and compression is judged.

Costs are linear in bytes (the alpha-beta model): a launch or a latency, and a rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from numbers import Real

Groups = tuple[tuple[int, ...], ...]
"""Groups of tensors: contiguous, in backward order, every tensor once. ((0, 1), (2,)) is two groups."""


@dataclass(frozen=True)
class Linear:
    """A cost of ``alpha + beta * size_bytes`` seconds.

    Args:
        alpha: seconds for any size: a launch, a latency.
        beta: seconds a byte.

    Raises:
        ValueError: numbers that are not finite or below 0.

    Example:
        >>> Linear(alpha=1e-3, beta=8e-9)(1_000_000)  # 1 ms, then 1 Gbit/s
        0.009000000000000001
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, unit in (("alpha", "seconds"), ("beta", "seconds a byte")):
            value = getattr(self, name)
            number = float(value) if isinstance(value, Real) else math.nan
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{name} must be 0 or more {unit}, not {value!r}: measure again")
            object.__setattr__(self, name, number)

    def __call__(self, size_bytes: float) -> float:
        return self.alpha + self.beta * size_bytes


@dataclass(frozen=True)
class Profile:
    """The costs of one training step on one link: when gradients are ready, their sizes, and what moving them costs.

    A group of tensors costs alpha + beta * (the sum of its bytes). Bytes are counted of the uncompressed gradients, so
    the beta of ``communicate`` contains the compression ratio.

    Args:
        backward_seconds: seconds of each tensor, in backward order, from the gradient before it to its own.
        size_bytes: bytes of each tensor's gradient; whole numbers except in scaled models. 0 is legal.
        compress, decompress, communicate: costs of a group.
        names: names of the parameters, or empty.
        other_seconds: seconds of forward and optimizer. They are no part of `thinwire.plan.iteration_seconds`, which
            counts from the start of backward, because no plan changes them.

    Any sequence of numbers is accepted, and stored as a tuple.

    Raises:
        ValueError: no tensors, other lengths, or numbers that are not finite or below 0.

    Example:
        >>> link, free = Linear(1e-3, 8e-9), Linear(0, 0)
        >>> Profile([0.01, 0.02], [4_000_000, 1_000], free, free, link).num_tensors
        2
    """

    backward_seconds: tuple[float, ...]
    size_bytes: tuple[float, ...]
    compress: Linear
    decompress: Linear
    communicate: Linear
    names: tuple[str, ...] = field(default=())
    other_seconds: float = 0.0

    def __post_init__(self) -> None:
        backward, sizes = map(float, self.backward_seconds), map(_number, self.size_bytes)
        object.__setattr__(self, "backward_seconds", tuple(backward))
        object.__setattr__(self, "size_bytes", tuple(sizes))
        object.__setattr__(self, "names", tuple(self.names))
        count = len(self.backward_seconds)
        if not count:
            raise ValueError("a profile needs at least one tensor: does any parameter require a gradient?")
        if len(self.size_bytes) != count or len(self.names) not in (0, count):
            raise ValueError(
                f"{count} backward times, {len(self.size_bytes)} sizes and {len(self.names)} names: give one of each"
                " for every tensor, in backward order (names may be left out)"
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError("two tensors have the same name: each parameter appears once")
        for what, numbers in (("backward_seconds", self.backward_seconds), ("size_bytes", self.size_bytes)):
            for index, number in enumerate(numbers):
                if not (math.isfinite(number) and number >= 0):
                    of = f" ({self.names[index]})" if self.names else ""
                    raise ValueError(f"{what}[{index}]{of} is {number}; it must be 0 or more: measure again")
        if not (math.isfinite(self.other_seconds) and self.other_seconds >= 0):
            raise ValueError(f"other_seconds is {self.other_seconds}; it must be 0 or more: measure again")
        for what in ("compress", "decompress", "communicate"):
            if not isinstance(getattr(self, what), Linear):
                raise ValueError(f"{what} is {getattr(self, what)!r}; give a Linear(alpha, beta)")

    @property
    def num_tensors(self) -> int:
        return len(self.backward_seconds)

    @cached_property
    def ready_seconds(self) -> tuple[float, ...]:
        """Seconds [num_tensors + 1] after which the backward pass alone has that many gradients; the first is 0."""
        return tuple(accumulate(self.backward_seconds, initial=0.0))

    @cached_property
    def end_bytes(self) -> tuple[float, ...]:
        """Bytes [num_tensors + 1] of that many tensors; the first is 0."""
        return tuple(accumulate(self.size_bytes, initial=0))

    def ahead(self) -> Profile:
        """Return the profile of compression ahead of fusion: each tensor is compressed alone, after its gradient.

        Compression is then part of backward, and groups cost nothing to compress (SAFusion, HPDC'25).
        """
        alone = [self.compress(size) for size in self.size_bytes]
        backward = [ready + seconds for ready, seconds in zip(self.backward_seconds, alone, strict=True)]
        return replace(self, backward_seconds=tuple(backward), compress=Linear(0.0, 0.0))


def _number(value: float) -> float:
    """Return whole numbers as int, so that sums of them are exact, and numpy's numbers as Python's."""
    number = float(value)
    return int(number) if number.is_integer() else number


def check_groups(profile: Profile, groups: Groups) -> None:
    """Raise ValueError unless ``groups`` has every tensor of ``profile`` once, contiguous and in backward order."""
    expected = 0
    for index, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {index} is empty: leave it out")
        for tensor in group:
            if tensor != expected:
                raise ValueError(
                    f"group {index} has tensor {tensor} where tensor {expected} belongs: groups are contiguous, in"
                    " backward order, and have every tensor once"
                )
            expected += 1
    if expected != profile.num_tensors:
        raise ValueError(f"groups of {expected} tensors for a profile of {profile.num_tensors}: was it another model?")
