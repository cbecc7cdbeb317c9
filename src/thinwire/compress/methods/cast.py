"""Compression by a floating-point type of sixteen bits, which a process group can sum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Memory, Packed, Parameter, Payload, State, Summable
from thinwire.compress.packing import PartSpec

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Cast(Packed, Summable):
    """A compressor that rounds each value to a 16-bit number. ``parts``: the gradient in that dtype [n].

    Values beyond the largest finite number of the dtype become that number, never infinite.
    """

    dtype: torch.dtype

    memory = Memory.OPTIONAL

    @property
    def name(self) -> str:
        return _NAMES[self.dtype]

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        largest = torch.finfo(self.dtype).max
        # Reading the gradient once is faster than clamping it.
        if flat.numel() > 0 and float(kernels.largest_of_blocks(flat, flat.numel())[0]) > largest:
            flat = flat.clamp(-largest, largest)
        return Payload((flat.to(self.dtype),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].to(parameter.working_dtype).view(parameter.shape)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return (PartSpec(self.dtype, parameter.numel),)


def fp16() -> Cast:
    """Return the compressor to float16: 11 significant bits, from 6e-8 to 65504, half the bytes of float32.

    Larger values become 65504 (in an all-reduce the sum cannot overflow either, because each part is divided by the
    world size first), smaller ones zero: gradients that are not scaled lose their small values.

    Example:
        >>> compressor = fp16()
        >>> parameter = Parameter("weight", (2,))
        >>> compressor.compress(torch.tensor([1.0, 1e9]), parameter, compressor.init(parameter)).parts[0].tolist()
        [1.0, 65504.0]
    """
    return Cast(torch.float16)


def bf16() -> Cast:
    """Return the compressor to bfloat16: 8 significant bits and the range of float32, half the bytes: the baseline."""
    return Cast(torch.bfloat16)
