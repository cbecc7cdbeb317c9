"""What a compressor is: init, compress, decompress, with explicit state for each parameter by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from thinwire.compress import packing

State = dict[str, Any]
"""Of one parameter in one compressor: tensors, ints, floats and nested states by name. Updated in place."""


@dataclass(frozen=True)
class Parameter:
    """What all ranks know of a gradient before they compress it.

    Args:
        name: as in ``named_parameters()``. State is kept, and random numbers are drawn, by this name.
        shape: of the gradient.
        dtype: of the gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def working_dtype(self) -> torch.dtype:
        """In which gradients are corrected, kept and summed: float64 for float64, float32 for all others."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Memory(Enum):
    """Who remembers what a compressor does not send."""

    NEEDED = "needed"
    """Nobody yet, and it would be lost for good: `attach` adds error feedback."""
    OPTIONAL = "optional"
    """Nobody: only a rounding of each value is lost. `attach` adds nothing; a user may."""
    UNBIASED = "unbiased"
    """Nobody has to: the expectation of what arrives is the gradient."""
    OWN = "own"
    """The compressor itself (or it has a reason not to): error feedback around it is refused."""


@dataclass(frozen=True, eq=False)
class Payload:
    """A compressed gradient: contiguous tensors of which each compressor knows the meaning.

    It may share memory with the gradient and the state that it was made of until the next `Compressor.compress`.
    """

    parts: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Of the parts, without what `Packed.pack` adds."""
        return sum(part.numel() * part.element_size() for part in self.parts)


class Compressor(ABC):
    """A lossy code for gradients. Subclasses are frozen dataclasses: configuration only, all state is passed in.

    One step of one parameter, on each rank: `compress`, which updates the state; the mean over the ranks; `finish`.
    How payloads become a mean, their types say: those of a `Packed` compressor travel as bytes and are decoded by
    every rank, those of a `Summable` one are added up inside an all-reduce. A compressor can be both.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """With its settings, for messages and tables; equal names mean equal wire formats and decisions."""

    @property
    def memory(self) -> Memory:
        """Who remembers what is not sent."""
        return Memory.NEEDED

    def init(self, parameter: Parameter) -> State:
        """State before the first step, made from the parameter alone."""
        del parameter
        return {}

    @abstractmethod
    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        """Compress a finite gradient of ``parameter.shape`` and ``working_dtype``, contiguous, not written to."""

    @abstractmethod
    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        """The gradient that a payload stands for, of ``parameter.shape`` and ``working_dtype``, newly allocated."""

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Told what all ranks got, at the end of a step. ``mean`` is not written to."""
        del mean, parameter, state


class Sized(Compressor):
    """Knows the parts of its payloads before there are any."""

    @abstractmethod
    def part_specs(self, parameter: Parameter) -> tuple[packing.PartSpec, ...]:
        """Dtype and number of elements of each part; None elements for a part whose length depends on the gradient."""

    def packed_bytes(self, parameter: Parameter) -> int | None:
        """Bytes of a payload that travels alone; None if they depend on the gradient, so that nobody can price it."""
        specs = self.part_specs(parameter)
        return None if any(spec.numel is None for spec in specs) else packing.packed_bytes(specs)


class Packed(Sized):
    """Payloads travel as bytes, each decoded without the others::

    data = compressor.pack(payload, parameter)                                  # travels
    payloads = [compressor.unpack(data, parameter) for data in received]        # in rank order
    mean = compressor.combine(payloads, parameter)                              # the same bits on every rank
    """

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        """The payload as uint8 [k]; of `packed_bytes` where that is known."""
        del parameter
        return packing.pack(payload.parts)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        """A payload from the bytes that another rank packed; it may share memory with ``data``.

        Raises:
            CorruptMessageError: bytes that no rank can have packed for this parameter.
        """
        return Payload(packing.unpack(data, self.part_specs(parameter)))

    def combine(self, payloads: Sequence[Payload], parameter: Parameter) -> Tensor:
        """The mean of what the payloads of all ranks stand for, added in rank order."""
        total = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        for payload in payloads:
            add(self, payload, parameter, total)
        return total.div_(len(payloads))


class Additive(Packed):
    """Adds what a payload stands for to a tensor, without making a tensor of it first."""

    @abstractmethod
    def accumulate(self, payload: Payload, parameter: Parameter, total: Tensor) -> None:
        """Add what a payload stands for to ``total``, of ``parameter.shape``, in place."""

    @abstractmethod
    def residual(self, gradient: Tensor, payload: Payload, parameter: Parameter) -> None:
        """Subtract what a payload stands for from ``gradient``, in place."""

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        total = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        self.accumulate(payload, parameter, total)
        return total


class Summable(Sized):
    """Payloads of different ranks are averaged part by part, inside an all-reduce, in one or more rounds."""

    def round_specs(self, parameter: Parameter) -> tuple[tuple[packing.PartSpec, ...], ...]:
        """The parts of each round; more than one round where there is a `next_round`."""
        return (self.part_specs(parameter),)

    def next_round(self, mean: Payload, parameter: Parameter, state: State) -> Payload | None:
        """What has to be averaged next, given the mean of the last round; None if that was all."""
        del mean, parameter, state
        return None

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        """The gradient that the mean of the last round, and what was kept, stand for."""
        del state
        return self.decompress(mean, parameter)


class Joint(Compressor):
    """What a rank lost is known only when the mean over the ranks is, so no payload stands for a gradient alone."""

    @abstractmethod
    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Subtract from ``gradient``, in place, what arrived of it."""


class WholeTensor(Compressor):
    """Needs a whole gradient: a piece of a flat one, as two shots have it, cannot be compressed for itself."""


def add(code: Compressor, payload: Payload, parameter: Parameter, total: Tensor) -> None:
    """Add what a payload stands for to ``total``, of ``parameter.shape``, in place."""
    if isinstance(code, Additive):
        code.accumulate(payload, parameter, total)
    else:
        total.add_(code.decompress(payload, parameter))


def subtract(code: Compressor, payload: Payload, parameter: Parameter, gradient: Tensor) -> None:
    """Subtract what a payload stands for from ``gradient``, in place. Sparsifiers set the sent elements to zero."""
    if isinstance(code, Additive):
        code.residual(gradient, payload, parameter)
    else:
        gradient.sub_(code.decompress(payload, parameter))


def check_parameter(compressor: Compressor, parameter: Parameter) -> None:
    """Raises ValueError, saying what to do, if gradients of this parameter cannot be compressed."""
    if not parameter.dtype.is_floating_point:
        raise ValueError(
            f"{compressor.name}: parameter {parameter.name!r} is {parameter.dtype}: only floating-point gradients can"
            " be compressed; freeze it with requires_grad_(False) or leave it out of compress="
        )


Policy = Callable[[Parameter], Compressor | None]
"""Which compressor a parameter has; None for an exact all-reduce. All ranks must answer the same."""


@dataclass(frozen=True)
class Identity(Packed, Summable):
    """No compression: the trivial compressor, by which the machinery can be compared with a plain all-reduce."""

    @property
    def name(self) -> str:
        return "identity"

    @property
    def memory(self) -> Memory:
        return Memory.UNBIASED

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        del parameter, state
        return Payload((gradient.flatten(),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].clone().view(parameter.shape)

    def part_specs(self, parameter: Parameter) -> tuple[packing.PartSpec, ...]:
        return (packing.PartSpec(parameter.working_dtype, parameter.numel),)
