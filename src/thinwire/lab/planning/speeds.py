"""Measured speeds of a machine and its link: lines through measured points, for links and for compressors."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from thinwire.comm.machine import Machine
from thinwire.plan.profile import Linear
from thinwire.tune.lossless import Code

COPIES = ""
"""Name of the compressor of exact gradients, which are only copied into one tensor and back."""

_WELL_ABOVE = 1.4
_LONG_SHARE = 0.1

_AGAIN = "the machines may have been too busy; measure again with `thinwire plan --measure --fresh`"


@dataclass(frozen=True)
class Fit:
    """A cost with a floor for few bytes and a line for many, fitted to measured points.

    A collective waits for messages and for processors, and its bytes travel meanwhile: up to some size they are free.

    Args:
        line: seconds of many bytes.
        floor: seconds of few bytes.
        residual: median of |fit - measured| / measured over the points.
        points: (bytes, seconds), as measured.

    Example:
        >>> fit = Fit.of([(10, 0.25), (1000, 0.25), (4000, 0.5), (7000, 0.75)])
        >>> fit(10), round(fit(10_000), 9)
        (0.25, 1.0)
    """

    line: Linear
    floor: float = 0.0
    residual: float = 0.0
    points: tuple[tuple[float, float], ...] = ()

    def __call__(self, size_bytes: float) -> float:
        return max(self.floor, self.line(size_bytes))

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], extrapolates: bool = False) -> Self:
        """Fit points: the fastest is the floor; the line is of least relative squares through those well above it.

        Args:
            points: (bytes, seconds).
            extrapolates: whether the line is for more bytes than were measured: then only points of a tenth of the
                longest time or more count. Through short ones too, 19 MB on a link of 100 Mbit/s were predicted at
                1.4 s and took 1.6 s.

        Raises:
            ValueError: points of one size only, negative or infinite ones, or one of 0 s.
        """
        floor = min((seconds for _, seconds in points), default=0.0)
        longest = max((seconds for _, seconds in points), default=0.0)
        least = max(_WELL_ABOVE * floor, _LONG_SHARE * longest if extrapolates else 0.0)
        above = [point for point in points if point[1] > least]
        sizes, seconds = zip(*(above if len(above) > 1 else points), strict=True) if points else ((), ())
        fit = cls(fit_line(sizes, seconds, relative=True), floor)
        errors = [abs(fit(size) - measured) / measured for size, measured in points]
        return replace(fit, residual=statistics.median(errors), points=tuple(map(tuple, points)))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of ``asdict``; raise KeyError, TypeError or ValueError for anything else."""
        points = tuple((float(size), float(seconds)) for size, seconds in value["points"])
        floor = Linear(float(value["floor"]), 0.0).alpha  # raises ValueError for what is no time
        return cls(_line(value["line"]), floor, float(value["residual"]), points)


@dataclass(frozen=True)
class MeasuredLink:
    """Costs in seconds of the collectives of a process group, by the bytes that one rank sends.

    Args:
        message: cost of sending a neighbour a message while receiving one: alpha and beta of the textbooks.
        round: cost of a header from all ranks to all others. Its beta is 0.
        all_reduce: cost of the process group's all-reduce, of 2 (n - 1) / n of the tensor's bytes.
        all_gather: cost of the same message from every rank to all others.
        all_to_all: cost of a separate message from every rank to each other one.
        work: costs of the work on rows, as the fields of `Machine` from ``part_seconds`` on; empty if not measured.

    Raises:
        ValueError: a link that costs no time.
    """

    message: Linear
    round: Linear
    all_reduce: Fit
    all_gather: Fit
    all_to_all: Fit
    work: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("message", "all_reduce", "all_gather", "all_to_all"):
            entry = getattr(self, name)
            line = entry.line if isinstance(entry, Fit) else entry
            if line.beta == 0.0:
                raise ValueError(f"the link was measured as zero: a byte of {name} takes no time; {_AGAIN}")
        if self.round.alpha == 0.0:
            raise ValueError(f"the link was measured as zero: a round of messages takes no time; {_AGAIN}")

    @property
    def machine(self) -> Machine | None:
        """The link with the cost of work on rows, for pricing schemes; None if that was not measured."""
        link = (self.round.alpha, self.message.alpha, self.all_to_all.line.beta, self.all_reduce.line.beta)
        return Machine(*link, *self.work) if self.work else None

    @property
    def mbit(self) -> float:
        """Payload rate of a rank that sends to all others at once, in Mbit/s."""
        return 8e-6 / self.all_to_all.line.beta

    @property
    def fits(self) -> dict[str, Fit]:
        """What collectives take, by their names."""
        return {"all_reduce": self.all_reduce, "all_gather": self.all_gather, "all_to_all": self.all_to_all}

    def describe(self) -> str:
        return (
            f"{self.mbit:.0f} Mbit/s a rank, {1e3 * self.round.alpha:.2f} ms for an all-to-all round,"
            f" {1e3 * self.message.alpha:.2f} ms to one rank"
        )

    def at(self, mbit: float) -> Self:
        """Return the same machines on a link of another rate.

        The cost of a byte is the wire's part, 1 / rate, and the rest of processors and protocols, which stays. On a
        slower link no byte costs less than the wire needs.

        Args:
            mbit: payload rate of one rank.

        Raises:
            ValueError: a rate that is not above 0.
        """
        if not mbit > 0:
            raise ValueError(f"a link has a rate above 0 Mbit/s, not {mbit}")
        wire, measured = 8e-6 / mbit, self.all_to_all.line.beta

        def moved(line: Linear) -> Linear:
            least = wire if wire > measured else min(line.beta, wire)
            return Linear(line.alpha, max(least, line.beta + wire - measured))

        fits: dict[str, Any] = {name: Fit(moved(fit.line), fit.floor, fit.residual) for name, fit in self.fits.items()}
        return replace(self, message=moved(self.message), **fits)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of ``asdict``; raise KeyError, TypeError or ValueError for anything else."""
        lines: dict[str, Any] = {name: _line(value[name]) for name in ("message", "round")}
        fits: dict[str, Any] = {name: Fit.from_json(value[name]) for name in ("all_reduce", "all_gather", "all_to_all")}
        return cls(**lines, **fits, work=tuple(map(float, value.get("work", ()))))


@dataclass(frozen=True)
class Codec:
    """Costs of a compressor on this device, by the bytes of the uncompressed gradient.

    Args:
        compressor: text of `thinwire.compress.named.parse`, or `COPIES`.
        exchange: the exchange, which decides what is decoded: one sum, the payloads of all ranks, or pieces twice.
        encode: cost of encoding, with error feedback where `thinwire.attach` adds it, and the checksum.
        decode: cost of decoding what arrives from all ranks together.
    """

    compressor: str
    exchange: str
    encode: Fit
    decode: Fit

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of ``asdict``; raise KeyError, TypeError or ValueError for anything else."""
        fits = {name: Fit.from_json(value[name]) for name in ("encode", "decode")}
        return cls(str(value["compressor"]), str(value["exchange"]), **fits)


@dataclass(frozen=True)
class Extra:
    """The seconds of a training step beyond the timeline; negative if it was faster.

    Args:
        compressor: the compressor; `COPIES` if nothing was compressed, or the name of stock DDP.
        exchange: its exchange.
        seconds: measured less predicted seconds.
    """

    compressor: str
    exchange: str
    seconds: float

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of ``asdict``; raise KeyError, TypeError or ValueError for anything else."""
        return cls(str(value["compressor"]), str(value["exchange"]), float(value["seconds"]))


@dataclass(frozen=True)
class DenseCode:
    """What the code achieves on the gradients of a training.

    Args:
        dtype: dtype of the gradients.
        code: bits, and processor seconds.
        cores: cores that a rank gets when all ranks encode and decode at once, of the two that its threads could use.
    """

    dtype: torch.dtype
    code: Code
    cores: float = 1.0

    def __post_init__(self) -> None:
        numbers = [*asdict(self.code).values(), self.cores]
        if not all(math.isfinite(number) and number >= 0.0 for number in numbers) or not self.cores:
            raise ValueError(f"the code of {self.dtype} has bits or seconds that cannot be: {numbers}")

    def to_json(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype).removeprefix("torch."), **asdict(self.code), "cores": self.cores}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Parse the result of `to_json`; raise KeyError, TypeError, AttributeError or ValueError for anything else."""
        row = {name: value for name, value in data.items() if name not in ("dtype", "cores")}
        numbers = {name: float(value) for name, value in row.items() if name != "value_bits"}
        code = Code(**numbers, value_bits=int(row["value_bits"]))
        return cls(getattr(torch, data["dtype"]), code, float(data["cores"]))


def _line(value: object) -> Linear:
    """Parse the fields of a line; raise ValueError for anything else."""
    if not isinstance(value, Mapping) or set(value) != {"alpha", "beta"}:
        raise ValueError(f'a cost is {{"alpha": seconds, "beta": seconds a byte}}, not {value!r}')
    return Linear(**value)


def fit_line(sizes: Sequence[float], seconds: Sequence[float], relative: bool = False) -> Linear:
    """Return the line nearest to measured points, by least squares with non-negative alpha and beta.

    Args:
        sizes: bytes, at least two different ones.
        seconds: seconds of each.
        relative: weigh each point by 1 / seconds, so that points of a microsecond count as much as points of a
            second. Without it, alpha is the rest that the large ones leave.

    Raises:
        ValueError: too few points, or points that are no measurements.

    Example:
        >>> fit_line([1000, 3000], [0.25, 0.5])
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
    return Linear(float(alpha), float(beta))


def _check_points(sizes: np.ndarray, seconds: np.ndarray, relative: bool) -> None:
    if sizes.ndim != 1 or sizes.shape != seconds.shape or len(np.unique(sizes)) < 2:
        raise ValueError(f"a line needs points of two sizes or more; got {sizes.size} sizes and {seconds.size} times")
    if not (np.isfinite([sizes, seconds]) & (np.stack([sizes, seconds]) >= 0)).all():
        raise ValueError("sizes and times must be finite and not negative: measure again")
    if relative and not seconds.all():
        raise ValueError("a time of 0 s has no relative error: measure longer, or fit with relative=False")
