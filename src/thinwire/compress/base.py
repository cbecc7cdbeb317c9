"""What a compressor is: init, compress, decompress, with explicit state for each parameter by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Traits:
    """What an exchange may do with the payloads of a compressor.

    Args:
        summable: parts of payloads of different ranks can be added element by element, inside an all-reduce.
        fixed_size: the bytes of a payload follow from the parameter alone, so that a planner can price it.
        unbiased: the expectation of what arrives is the gradient, so nothing has to be remembered.
        sparse: a payload is ids and values; the exact schemes of `thinwire.sync` can sum it.
        has_memory: keeps what it did not send (or has a reason not to), so `attach` adds no error feedback.
        memory_optional: loses only a rounding of each value, so `attach` adds no error feedback; a user may.
        residual_after_sum: what was lost is known only when the sum over the ranks is, see
            `Compressor.residual_of_sum`.
        elementwise: a piece of a flat gradient can be compressed for itself, as two-shot exchanges do.
        own_exchange: the name of the one exchange that the method is made of, see `thinwire.compress.choose`; empty
            for all that are codes and leave the exchange to others.
    """

    summable: bool = False
    fixed_size: bool = True
    unbiased: bool = False
    sparse: bool = False
    has_memory: bool = False
    memory_optional: bool = False
    residual_after_sum: bool = False
    elementwise: bool = True
    own_exchange: str = ""


@dataclass(frozen=True, eq=False)
class Payload:
    """A compressed gradient: contiguous tensors of which each compressor knows the meaning.

    It may share memory with the gradient and the state that it was made of until the next `Compressor.compress`.
    """

    parts: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Of the parts, without what `Compressor.pack` adds."""
        return sum(part.numel() * part.element_size() for part in self.parts)


class Compressor(ABC):
    """A lossy code for gradients. Subclasses are frozen dataclasses: configuration only, all state is passed in.

    One step of one parameter, on each rank::

        payload = compressor.compress(gradient, parameter, state)       # updates state
        data = compressor.pack(payload, parameter)                      # travels
        payloads = [compressor.unpack(data, parameter) for data in received]     # in rank order
        mean = compressor.combine(payloads, parameter)                  # the same bits on every rank
        compressor.finish(mean, parameter, state)

    Summable payloads are averaged part by part instead, in one or more rounds (`next_round`), and then `reconstruct`
    makes the mean gradient of them.
    """

    traits: Traits

    @property
    @abstractmethod
    def name(self) -> str:
        """With its settings, for messages and tables; equal names mean equal wire formats and decisions."""

    def check(self, parameter: Parameter) -> None:
        """Raises ValueError, saying what to do, if gradients of this parameter cannot be compressed."""
        if not parameter.dtype.is_floating_point:
            raise ValueError(
                f"{self.name}: parameter {parameter.name!r} is {parameter.dtype}: only floating-point gradients can"
                " be compressed; freeze it with requires_grad_(False) or leave it out of compress="
            )

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

    def combine(self, payloads: Sequence[Payload], parameter: Parameter) -> Tensor:
        """The mean of what the payloads of all ranks stand for, added in rank order."""
        total = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        for payload in payloads:
            self.accumulate(payload, parameter, total)
        return total.div_(len(payloads))

    def accumulate(self, payload: Payload, parameter: Parameter, total: Tensor) -> None:
        """Add what a payload stands for to ``total``, of ``parameter.shape``."""
        total.add_(self.decompress(payload, parameter))

    def next_round(self, mean: Payload, parameter: Parameter, state: State) -> Payload | None:
        """For summable compressors: what has to be averaged next, given the mean of the last; None if that was all."""
        del mean, parameter, state
        return None

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        """For summable compressors: the gradient that the mean of the last round, and what was kept, stand for."""
        del state
        return self.decompress(mean, parameter)

    def residual(self, gradient: Tensor, payload: Payload, parameter: Parameter) -> None:
        """Subtract in place from ``gradient`` what a payload stands for. Sparsifiers set the sent places to zero."""
        gradient.sub_(self.decompress(payload, parameter))

    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        """With ``traits.residual_after_sum``: subtract from ``gradient``, in place, what arrived of it."""
        del parameter, state
        gradient.sub_(mean)

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Told what all ranks got, at the end of a step. ``mean`` is not written to."""
        del mean, parameter, state

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        """The payload as uint8 [k]; of ``packed_bytes`` where that is known."""
        del parameter
        return packing.pack(payload.parts)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        """A payload from the bytes that another rank packed; it may share memory with ``data``.

        Raises:
            CorruptMessageError: bytes that no rank can have packed for this parameter.
        """
        return Payload(packing.unpack(data, self.part_specs(parameter)))

    def part_specs(self, parameter: Parameter) -> tuple[packing.PartSpec, ...]:
        """Dtype and number of elements of each part; None elements for a part whose length depends on the gradient."""
        raise NotImplementedError(f"{type(self).__name__} packs by itself")

    def round_specs(self, parameter: Parameter) -> tuple[tuple[packing.PartSpec, ...], ...]:
        """For summable compressors: the parts of each round; more than one round where there is a `next_round`."""
        return (self.part_specs(parameter),)

    def packed_bytes(self, parameter: Parameter) -> int | None:
        """Bytes of what `pack` returns; None unless ``traits.fixed_size``."""
        return packing.packed_bytes(self.part_specs(parameter)) if self.traits.fixed_size else None

    def stack_code(self) -> Compressor | None:
        """The sparsifier that packs payloads of several parameters as one, see `thinwire.compress.stacked`; or None."""
        return None


Policy = Callable[[Parameter], Compressor | None]
"""Which compressor a parameter has; None for an exact all-reduce. All ranks must answer the same."""


@dataclass(frozen=True)
class Identity(Compressor):
    """No compression: the trivial compressor, by which the machinery can be compared with a plain all-reduce."""

    traits = Traits(summable=True, unbiased=True)

    @property
    def name(self) -> str:
        return "identity"

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        del parameter, state
        return Payload((gradient.flatten(),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].clone().view(parameter.shape)

    def part_specs(self, parameter: Parameter) -> tuple[packing.PartSpec, ...]:
        return (packing.PartSpec(parameter.working_dtype, parameter.numel),)
