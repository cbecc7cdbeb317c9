"""The interface of compressors: init, compress, decompress, with explicit state for each parameter by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from thinwire.compress import packing
from thinwire.errors import unknown
from thinwire.rows import SchemeName
from thinwire.rows.formats import digest64

State = dict[str, Any]
"""State of one parameter in one compressor: tensors, ints, floats and nested states by name. Updated in place."""
EXCHANGES = ("auto", "all_reduce", "all_gather", "two_shot", *get_args(SchemeName)[1:])
"""Names of exchanges; of schemes the first is "auto" too."""
_NUMBERS = int, float, int | float, int | None, float | None


@dataclass(frozen=True)
class Parameter:
    """The properties of a gradient that all ranks know before they compress it.

    Args:
        name: name in ``named_parameters()``. State is kept, and random numbers are drawn, by this name.
        shape: shape of the gradient.
        dtype: dtype of the gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def working_dtype(self) -> torch.dtype:
        """Dtype in which gradients are corrected, kept and summed: float64 for float64, float32 for all others."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Memory(Enum):
    """Who keeps the residual, the part of a gradient that a compressor did not send."""

    NEEDED = "needed"
    """Nothing keeps it yet, and it would be lost for good: `attach` adds error feedback."""
    OPTIONAL = "optional"
    """Nothing keeps it: only a rounding of each value is lost. `attach` adds nothing; a user may."""
    UNBIASED = "unbiased"
    """Nothing has to keep it: the expectation of a payload is the gradient."""
    OWN = "own"
    """The compressor itself keeps it (or has a reason not to): error feedback around it is refused."""


@dataclass(frozen=True, eq=False)
class Payload:
    """A compressed gradient: contiguous tensors, whose meaning each compressor defines.

    It may share memory with the gradient and the state that it was made of until the next `Compressor.compress`.

    Args:
        parts: the tensors.
        code: compressor in which sums of these parts travel, in two shots; None for an all-reduce in their own dtype.
    """

    parts: tuple[Tensor, ...]
    code: Packed | None = field(default=None, kw_only=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts, without those that `Packed.pack` adds."""
        if self.code is None:
            return sum(part.nbytes for part in self.parts)
        plans = [Parameter("part", tuple(part.shape), part.dtype) for part in self.parts]
        return sum(self.code.packed_bytes(plan) or 0 for plan in plans)


class Compressor(ABC):
    """A lossy code for gradients. Subclasses are frozen dataclasses: configuration only, all state is passed in.

    One step of one parameter, on each rank: `compress`, which updates the state; the mean over the ranks; `finish`.
    The type of a compressor decides how payloads become a mean: a `Packed` one's travel as bytes and are decoded by
    every rank, a `Summable` one's are added up inside an all-reduce. A compressor can be both.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = Compressor.__repr__  # before `dataclass` writes one with the name of the class
        if (check := vars(cls).get("__post_init__")) is not None:
            cls.__post_init__ = lambda self: _checked(self, check)

    def __repr__(self) -> str:
        return self.name

    @property
    @abstractmethod
    def name(self) -> str:
        """Name with settings, for messages and tables; equal names mean equal wire formats and decisions."""

    @property
    def memory(self) -> Memory:
        """Keeper of the unsent rest."""
        return Memory.NEEDED

    def init(self, parameter: Parameter) -> State:
        """Return the state before the first step, made from the parameter alone."""
        return {}

    @abstractmethod
    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        """Compress a finite, contiguous gradient of ``parameter.shape`` and ``working_dtype``; never write to it."""

    @abstractmethod
    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        """Return the gradient of a payload, of ``parameter.shape`` and ``working_dtype``, newly allocated."""

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        """Add the gradient of a payload to ``total``, of ``parameter.shape``, in place; subtract it if ``negated``.

        Where sent elements are exact, as in sparsifiers, subtracting leaves zeros.
        """
        total.add_(self.decompress(payload, parameter), alpha=-1 if negated else 1)

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:  # noqa: B027  most have nothing to do
        """Update the state from the mean of all ranks, at the end of a step; ``mean`` must not be changed."""

    def by(self, exchange: object) -> Exchanged:
        """Return this compressor with the exchange that averages its payloads, for ``dense=`` of `thinwire.attach`.

        Args:
            exchange: "all_reduce", "all_gather", "two_shot", or for sparsifiers a scheme of `thinwire.schemes` or its
                name, such as "zen"; "auto" is what a compressor without ``by`` gets: the one of fewest bytes that the
                compressor allows, but no scheme. Of a scheme that has a name the name is kept.

        Raises:
            ValueError: an unknown name.

        Example:
            >>> thinwire.attach(model, dense=top_k(0.01).by("two_shot"))                 # doctest: +SKIP
        """
        return Exchanged(self, getattr(exchange, "name", None) or exchange)


def _checked(compressor: Any, check: Callable[[Any], object]) -> None:
    """Check settings; raise ValueError for one that cannot be compared because it is no number."""
    try:
        check(compressor)
    except TypeError:
        for item in fields(compressor):
            value = getattr(compressor, item.name)
            if item.type in _NUMBERS and not isinstance(value, (Real, item.type)):
                raise ValueError(f"{type(compressor).__name__}: {item.name} is a number, not {value!r}") from None
        raise


@dataclass(frozen=True)
class Exchanged:
    """A compressor and the exchange that averages its payloads, see `Compressor.by`."""

    compressor: Compressor
    exchange: object = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.exchange, str) and self.exchange not in EXCHANGES:
            raise unknown("exchange", self.exchange, [one for one in EXCHANGES if ":" not in one], ", two_level:NAME")


class Sized(Compressor):
    """A compressor that can list the parts of its payloads before it compresses."""

    @abstractmethod
    def part_specs(self, parameter: Parameter) -> tuple[packing.PartSpec, ...]:
        """Return dtype and number of elements of each part; None elements for a length that depends on the gradient."""

    def packed_bytes(self, parameter: Parameter) -> int | None:
        """Return the bytes of a payload that travels alone, or None if they depend on the gradient."""
        specs = self.part_specs(parameter)
        return None if any(spec.numel is None for spec in specs) else packing.packed_bytes(specs)


class Packed(Sized):
    """A compressor whose payloads travel as bytes, each decoded without the others::

    data = compressor.pack(payload, parameter)                                  # travels
    payloads = [compressor.unpack(data, parameter) for data in received]        # in rank order
    mean = compressor.combine(payloads, parameter)                              # the same bits on every rank
    """

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        """Return the payload as uint8 [k]; k is `packed_bytes`, if that is known."""
        return packing.pack(payload.parts)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        """Return a payload from the bytes that another rank packed; it may share memory with ``data``.

        Raises:
            CorruptMessageError: bytes that no rank can have packed for this parameter.
        """
        return Payload(packing.unpack(data, self.part_specs(parameter)))

    def combine(self, payloads: Sequence[Payload], parameter: Parameter) -> Tensor:
        """Return the mean of the gradients of all ranks' payloads, added in rank order."""
        total = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        for payload in payloads:
            self.add(payload, parameter, total)
        return total.div_(len(payloads))


class Additive(Packed):
    """A compressor that adds the gradient of a payload to a tensor without allocating it first."""

    @abstractmethod
    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        """Add or subtract, as `Compressor.add`."""

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        total = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        self.add(payload, parameter, total)
        return total


class Summable(Sized):
    """A compressor whose payloads are averaged part by part, inside an all-reduce, in one or more rounds."""

    def round_specs(self, parameter: Parameter) -> tuple[tuple[packing.PartSpec, ...], ...]:
        """Return the parts of each round; more than one round if there is a `next_round`."""
        return (self.part_specs(parameter),)

    def next_round(self, mean: Payload, parameter: Parameter, state: State) -> Payload | None:
        """Return the payload to average next, given the mean of the last round, or None after the last."""
        return None

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        """Return the gradient from the mean of the last round and the state."""
        return self.decompress(mean, parameter)


class Joint(Compressor):
    """A compressor whose loss is known only with the mean over the ranks: no payload is a gradient by itself."""

    @abstractmethod
    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Subtract from ``gradient``, in place, the part of it that arrived."""


class WholeTensor(Compressor):
    """A compressor that needs a whole gradient: pieces of a flat one, as in two shots, cannot be compressed."""


def check_parameter(compressor: Compressor, parameter: Parameter) -> None:
    """Raise ValueError, saying what to do, if gradients of this parameter cannot be compressed."""
    if not parameter.dtype.is_floating_point:
        raise ValueError(
            f"{compressor.name}: parameter {parameter.name!r} is {parameter.dtype}: only floating-point gradients can"
            ' be compressed; freeze it with requires_grad_(False), or make it dense="native" by its name'
        )


@dataclass(frozen=True)
class Identity(Packed, Summable):
    """The trivial compressor, by which the machinery can be compared with a plain all-reduce."""

    name = "identity"
    memory = Memory.UNBIASED

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return Payload((gradient.flatten(),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].clone().view(parameter.shape)

    def part_specs(self, parameter: Parameter) -> tuple[packing.PartSpec, ...]:
        return (packing.PartSpec(parameter.working_dtype, parameter.numel),)


def counters() -> State:
    """Return the state of a compressor that draws: the step, and a salt that reductions set to the rank."""
    return {"step": 0, "salt": 0}


def next_seed(seed: int, parameter: Parameter, state: State) -> int:
    """Return the seed, 63 bits, of this step of a parameter on this rank, and advance the step in ``state``."""
    step = state["step"]
    state["step"] = step + 1
    return stable_seed(seed, parameter.name, step, state["salt"])


def stable_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on the parts alone: not on the process, the machine or the version of Python."""
    return digest64("\0".join(map(str, parts)).encode()) >> 1
