"""Small integers times a step for each block of values: what int8, QSGD and TernGrad have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Additive, Parameter, Payload, State
from thinwire.compress.packing import PartSpec, unpack
from thinwire.compress.randomness import counters, next_seed
from thinwire.errors import CorruptMessageError


@dataclass(frozen=True)
class BlockQuantizer(Additive):
    """Rounds each value to an integer in [-levels, levels] times the step of its block.

    ``parts``: the integers, packed (uint8 [ceil(n * bits / 8)]); the steps (working dtype [blocks]). A step is at least
    the smallest normal number, so that dividing by it is exact enough where all values are denormal or zero.
    """

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of a packed integer, 2 to 8."""

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    @abstractmethod
    def seed(self) -> int | None:
        """Of stochastic rounding; None to round to the nearest."""

    @abstractmethod
    def block_elements(self, parameter: Parameter) -> int:
        """How many consecutive values have one step, at least 1."""

    def norms(self, flat: Tensor, parameter: Parameter) -> Tensor:
        """Of each block: the value that ``levels`` stands for."""
        return kernels.largest_of_blocks(flat, self.block_elements(parameter))

    def init(self, parameter: Parameter) -> State:
        del parameter
        return {} if self.seed is None else counters()

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        steps = self.norms(flat, parameter).div_(self.levels).clamp_(min=torch.finfo(flat.dtype).tiny)
        seed = None if self.seed is None else next_seed(self.seed, parameter, state)
        return Payload(
            (kernels.quantize(flat, steps, self.block_elements(parameter), self.levels, self.bits, seed), steps)
        )

    def accumulate(self, payload: Payload, parameter: Parameter, total: Tensor) -> None:
        self._add(payload.parts[0], payload.parts[1], parameter, total)

    def residual(self, gradient: Tensor, payload: Payload, parameter: Parameter) -> None:
        self._add(payload.parts[0], payload.parts[1].neg(), parameter, gradient)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        code_bytes = kernels.packed_codes_bytes(parameter.numel, self.bits)
        return PartSpec(torch.uint8, code_bytes), steps_spec(parameter, self.block_elements(parameter))

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        codes, steps = unpack(data, self.part_specs(parameter))
        check_steps(steps, self.levels)
        return Payload((codes, steps))

    def _add(self, codes: Tensor, steps: Tensor, parameter: Parameter, total: Tensor) -> None:
        block = self.block_elements(parameter)
        kernels.add_quantized(codes, steps, block, self.levels, self.bits, total.view(-1))


def steps_spec(parameter: Parameter, block: int) -> PartSpec:
    return PartSpec(parameter.working_dtype, -(-parameter.numel // block))


def check_steps(steps: Tensor, largest_code: float) -> None:
    """Raises CorruptMessageError for a step that is negative, or with which a code would decode to infinity or nan."""
    limit = torch.finfo(steps.dtype).max / largest_code
    low, high = (float(bound) for bound in steps.aminmax()) if steps.numel() else (0.0, 0.0)
    if not (low >= 0.0 and high <= limit * (1 + 1e-6)):
        raise CorruptMessageError(f"steps of quantized values from {low:g} to {high:g}: they are in [0, {limit:g}]")


def check_block(block: int, what: str) -> None:
    """Raises ValueError for a size that no block has."""
    if not (isinstance(block, int) and block >= 1):
        raise ValueError(f"{what} are of at least 1 element, not {block!r}: at 512 a scale costs 1/16 bit an element")
