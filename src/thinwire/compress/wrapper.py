"""A compressor around another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload, State, Traits
from thinwire.compress.packing import PartSpec


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Passes everything on to ``inner``, whose state has the name ``inner``. Subclasses change some of it."""

    inner: Compressor

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # a class attribute elsewhere
        return self.inner.traits

    def check(self, parameter: Parameter) -> None:
        self.inner.check(parameter)

    def init(self, parameter: Parameter) -> State:
        return {"inner": self.inner.init(parameter)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return self.inner.compress(gradient, parameter, state["inner"])

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return self.inner.decompress(payload, parameter)

    def combine(self, payloads: Sequence[Payload], parameter: Parameter) -> Tensor:
        return self.inner.combine(payloads, parameter)

    def accumulate(self, payload: Payload, parameter: Parameter, total: Tensor) -> None:
        self.inner.accumulate(payload, parameter, total)

    def next_round(self, mean: Payload, parameter: Parameter, state: State) -> Payload | None:
        return self.inner.next_round(mean, parameter, state["inner"])

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        return self.inner.reconstruct(mean, parameter, state["inner"])

    def residual(self, gradient: Tensor, payload: Payload, parameter: Parameter) -> None:
        self.inner.residual(gradient, payload, parameter)

    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        self.inner.residual_of_sum(gradient, mean, parameter, state["inner"])

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        self.inner.finish(mean, parameter, state["inner"])

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        return self.inner.pack(payload, parameter)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        return self.inner.unpack(data, parameter)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return self.inner.part_specs(parameter)

    def round_specs(self, parameter: Parameter) -> tuple[tuple[PartSpec, ...], ...]:
        return self.inner.round_specs(parameter)

    def packed_bytes(self, parameter: Parameter) -> int | None:
        return self.inner.packed_bytes(parameter)


def unwrapped(compressor: Compressor, state: State) -> tuple[Compressor, State]:
    """The compressor inside all wrappers, and its state."""
    while isinstance(compressor, Wrapper):
        compressor, state = compressor.inner, state["inner"]
    return compressor, state
