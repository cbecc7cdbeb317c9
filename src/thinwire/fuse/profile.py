"""The measured costs of a training step, by which every plan of fusion and compression is judged.

Costs are linear in bytes (the alpha-beta model): a launch or a latency, and a rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from numbers import Real
from typing import Any

import numpy as np

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
                raise ValueError(f"{name} must be 0 or more {unit}, not {value!r}: measure again, or use Linear.fit")
            object.__setattr__(self, name, number)

    def __call__(self, size_bytes: float) -> float:
        return self.alpha + self.beta * size_bytes

    @classmethod
    def fit(cls, sizes: Sequence[float], seconds: Sequence[float], relative: bool = False) -> Linear:
        """Return the line nearest to measured points, by least squares with non-negative alpha and beta.

        Args:
            sizes: bytes, at least two different ones.
            seconds: seconds of each.
            relative: weigh each point by 1 / seconds, so that points of a microsecond count as much as those of a
                second. Without it, alpha is the rest that the large ones leave.

        Raises:
            ValueError: too few points, or points that are no measurements.

        Example:
            >>> Linear.fit([1000, 3000], [0.25, 0.5])
            Linear(alpha=0.125, beta=0.000125)
        """
        x, y = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
        _check_points(x, y, relative)
        weights = (y.min() / y) ** 2 if relative else np.ones_like(y)
        mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
        beta = (weights * (x - mean_x) * (y - mean_y)).sum() / (weights * (x - mean_x) ** 2).sum()
        alpha = mean_y - beta * mean_x
        if beta < 0:
            alpha, beta = mean_y, 0.0
        elif alpha < 0:
            alpha, beta = 0.0, (weights * x * y).sum() / (weights * x * x).sum()
        return cls(float(alpha), float(beta))

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Linear:
        """Parse the result of `to_json`; raise ValueError for anything else."""
        if not isinstance(value, Mapping) or set(value) != {"alpha", "beta"}:
            raise ValueError(f'a cost is {{"alpha": seconds, "beta": seconds a byte}}, not {value!r}')
        return cls(**value)


def _check_points(sizes: np.ndarray, seconds: np.ndarray, relative: bool) -> None:
    if sizes.ndim != 1 or sizes.shape != seconds.shape or len(np.unique(sizes)) < 2:
        raise ValueError(f"a line needs points of two sizes or more; got {sizes.size} sizes and {seconds.size} times")
    if not (np.isfinite([sizes, seconds]) & (np.stack([sizes, seconds]) >= 0)).all():
        raise ValueError("sizes and times must be finite and not negative: measure again")
    if relative and not seconds.all():
        raise ValueError("a time of 0 s has no relative error: measure longer, or fit with relative=False")


@dataclass(frozen=True)
class Profile:
    """The costs of one training step on one link: when gradients are ready, their sizes, and what moving them costs.

    A group of tensors costs alpha + beta * (the sum of its bytes). Bytes are those of the uncompressed gradients, so
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
        self._check()

    def _check(self) -> None:
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
            for place, number in enumerate(numbers):
                if not (math.isfinite(number) and number >= 0):
                    of = f" ({self.names[place]})" if self.names else ""
                    raise ValueError(f"{what}[{place}]{of} is {number}; it must be 0 or more: measure again")
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Profile:
        """Parse the result of `to_json`; raise ValueError for anything else."""
        known = {item.name for item in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != known:
            got = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"a profile has {', '.join(sorted(known))}; got {got}")
        given: dict[str, Any] = dict(value)
        for cost in ("compress", "decompress", "communicate"):
            given[cost] = Linear.from_json(value[cost])
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"not a profile: {error}") from error


def _number(value: float) -> float:
    """Return whole numbers as int, so that sums of them are exact, and numpy's numbers as Python's."""
    number = float(value)
    return int(number) if number.is_integer() else number


def check_groups(profile: Profile, groups: Groups) -> None:
    """Raise ValueError unless ``groups`` has every tensor of ``profile`` once, contiguous and in backward order."""
    expected = 0
    for place, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {place} is empty: leave it out")
        for tensor in group:
            if tensor != expected:
                raise ValueError(
                    f"group {place} has tensor {tensor} where tensor {expected} belongs: groups are contiguous, in"
                    " backward order, and have every tensor once"
                )
            expected += 1
    if expected != profile.num_tensors:
        raise ValueError(f"groups of {expected} tensors for a profile of {profile.num_tensors}: was it another model?")
