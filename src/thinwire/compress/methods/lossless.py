"""Values coded in fewer bytes, without loss: float32 as it is, or what a cast to sixteen bits made of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress import packing
from thinwire.compress.base import Identity, Memory, Packed, Parameter, Payload, State
from thinwire.compress.methods.cast import Cast
from thinwire.compress.packing import PartSpec
from thinwire.rows import floats


@dataclass(frozen=True)
class LosslessFloats(Packed):
    """The exact code of gradients, fewer bytes and every bit: means of plain gradients, added in rank order.

    Under bf16 autocast a float32 gradient takes 11 to 15 bits a value, without it 27; other bits cost little to look
    for, and no payload is larger than its values, but for 8 bytes. Means travel as codes of means: sums of a number of
    ranks that is no power of two, which division fills with bits, take 27. ``attach(model, dense="lossless")`` codes
    sums instead, for every dense gradient; take this where a policy has to name some.

    ``parts``: the values [n], in the dtype of ``values``; packed, their code.

    Args:
        values: `bf16` or `fp16`, whose sixteen bits are then coded, in about 11 or 14; default is the gradient as it
            is.

    Raises:
        ValueError: another code of values.

    Example:
        >>> top_k = thinwire.compress.top_k(0.01, values=thinwire.compress.lossless())      # doctest: +SKIP
    """

    values: Identity | Cast = Identity()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        if not isinstance(self.values, (Identity, Cast)):
            raise ValueError(
                f"lossless codes floats: values= is bf16(), fp16() or nothing, not {self.values!r}; a sparsifier takes"
                " it the other way round, as in top_k(0.01, values=lossless())"
            )

    @property
    def name(self) -> str:
        return "lossless" if self.is_exact else f"lossless(values={self.values.name})"

    @property
    def is_exact(self) -> bool:
        """Whether values arrive as they are, bit for bit."""
        return isinstance(self.values, Identity)

    @property
    def memory(self) -> Memory:
        return self.values.memory

    def init(self, parameter: Parameter) -> State:
        floats.require(self.name)
        return super().init(parameter)

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return self.values.compress(gradient, parameter, state)

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return self.values.decompress(payload, parameter)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        """Return the parts of a payload in memory; packed, they are smaller."""
        return self.values.part_specs(parameter)

    def packed_bytes(self, parameter: Parameter) -> int | None:
        """Return None: bytes depend on the values, and are never more than 8 above theirs."""
        return None

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        return packing.pack((floats.encode(payload.parts[0]),))

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        values = torch.empty(parameter.numel, dtype=self.part_specs(parameter)[0].dtype)
        (code,) = packing.unpack(data, (PartSpec(torch.uint8, None, values.nbytes),))
        floats.decode(code, values)
        return Payload((values,))


lossless = LosslessFloats
