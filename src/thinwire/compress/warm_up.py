"""Warm-ups, which send more at the beginning, when gradients change most: larger densities, or dense steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from thinwire.compress.base import (
    Additive,
    Compressor,
    Identity,
    Joint,
    Memory,
    Packed,
    Parameter,
    Payload,
    Sized,
    State,
    Summable,
)
from thinwire.compress.methods.sparsify import DensitySelector
from thinwire.compress.packing import PartSpec
from thinwire.compress.wrappers import Wrapper, code_of, core_of, packed_code, summable_code
from thinwire.errors import CorruptMessageError, MismatchError

_FLAG_BYTES = 8
_INNER, _DENSE = 0, 1


@dataclass(frozen=True)
class WarmUp(Wrapper):
    """A wrapper that sends more in the first steps (Lin et al., ICLR'18, section 3.3).

    A sparsifier, inside any wrappers, has in step ``s`` the density ``start (final / start)^(s / steps)``; a compressor
    without a density sends ``steps`` dense steps, and its own state (and memory, if error feedback is inside) does not
    change. Payloads change in size, so they cannot be priced beforehand. State: ``step``, the next one; ``inner``.

    Args:
        inner: a compressor or wrapper.
        steps: number of steps of the warm-up, counted in the state of each parameter; four epochs in the paper, 0 for
            none.
        start_density: density of sparsifiers in the first step.
        stairs: number of equal parts of the warm-up, such as epochs, with a constant density; None changes it every
            step.

    Raises:
        ValueError: negative steps; a start that is not a density, or below the one that it should lead to; more stairs
            than steps; a compressor whose error is known after the sum only, without error feedback around it.

    Example:
        >>> from thinwire.compress.methods.select import top_k
        >>> [round(warm_up(top_k(0.01), steps=2).density(step), 3) for step in range(4)]
        [0.25, 0.05, 0.01, 0.01]
    """

    steps: int
    start_density: float = 0.25
    stairs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0 or (self.stairs is not None and not 1 <= self.stairs <= max(1, self.steps)):
            raise ValueError(f"a warm-up of {self.steps} steps in {self.stairs} stairs: use at least one step for each")
        final = density_of(self.inner)
        if final is not None and not final <= self.start_density <= 1.0:
            raise ValueError(
                f"a warm-up leads from a larger density to that of {self.inner.name}, not from {self.start_density}:"
                f" use a start_density in [{final:g}, 1]"
            )
        if final is None and isinstance(core_of(self.inner), Joint) and self.inner.memory is not Memory.OWN:
            raise ValueError(
                f"{self.inner.name} is warmed up by dense steps, in which nothing is lost that an error feedback"
                " outside could remember: use warm_up(error_feedback(...)), in this order"
            )

    @property
    def code(self) -> Compressor:
        """Code of payloads: of any size if there is a density; else one that also reads dense payloads."""
        code = code_of(self.inner)
        return dense_first(code) if density_of(code) is None else _changed(code, varying=True)

    @property
    def name(self) -> str:
        stairs = "" if self.stairs is None else f" in {self.stairs}"
        start = "dense" if density_of(self.inner) is None else f"from {self.start_density:g}"
        return f"warm_up({self.inner.name}, {self.steps} steps{stairs} {start})"

    def density(self, step: int) -> float | None:
        """Return the density of a step, counted from 0, or None for compressors that have none."""
        final = density_of(self.inner)
        if final is None or step >= self.steps:
            return final
        progress = step / self.steps if self.stairs is None else step * self.stairs // self.steps / self.stairs
        return max(final, self.start_density * (final / self.start_density) ** progress)

    def init(self, parameter: Parameter) -> State:
        return {"step": 0, **super().init(parameter)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        step = state["step"]
        state["step"] = step + 1
        if self._is_dense(step):
            return DensePayload(Identity().compress(gradient, parameter, state).parts)
        inner = self.inner if step >= self.steps else _changed(self.inner, density=self.density(step))
        return inner.compress(gradient, parameter, state["inner"])

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        if not self._is_dense(state["step"] - 1):
            self.inner.finish(mean, parameter, state["inner"])

    def _is_dense(self, step: int) -> bool:
        return step < self.steps and density_of(self.inner) is None


@dataclass(frozen=True, eq=False)
class DensePayload(Payload):
    """A payload of a dense step: of `Identity`, with any compressor."""


@dataclass(frozen=True)
class DenseFirst(Sized):
    """The code of compressors without a density that are warmed up by dense steps."""

    inner: Sized

    @property
    def name(self) -> str:
        return f"{self.inner.name}, dense at first"

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> NoReturn:
        raise AssertionError("a warm-up compresses, and this knows its payloads")

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return self.made_by(payload).decompress(payload, parameter)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return _of_any_size(self.inner.part_specs(parameter), parameter)

    def made_by(self, payload: Payload) -> Compressor:
        return Identity() if isinstance(payload, DensePayload) else self.inner


@dataclass(frozen=True)
class PackedDenseFirst(DenseFirst, Additive):
    """The code of payloads of ``inner``, preceded by 8 bytes that mark dense steps."""

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        if negated and isinstance(payload, DensePayload):
            total.zero_()
        else:
            self.made_by(payload).add(payload, parameter, total, negated)

    def combine(self, payloads: Sequence[Payload], parameter: Parameter) -> Tensor:
        kinds = {isinstance(payload, DensePayload) for payload in payloads}
        if len(kinds) > 1:
            raise MismatchError(
                f"{parameter.name}: some ranks are still warming up and others are not: resume all from one checkpoint"
            )
        return packed_code(self.made_by(payloads[0])).combine(payloads, parameter)

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        flag = _DENSE if isinstance(payload, DensePayload) else _INNER
        data = packed_code(self.made_by(payload)).pack(payload, parameter)
        return torch.cat([torch.tensor([flag]).view(torch.uint8), data])

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        if data.numel() < _FLAG_BYTES or (flag := int(data[:_FLAG_BYTES].view(torch.int64))) not in (_INNER, _DENSE):
            raise CorruptMessageError(f"a payload of {data.numel()} bytes that says neither dense nor compressed")
        if flag == _INNER:
            return packed_code(self.inner).unpack(data[_FLAG_BYTES:], parameter)
        return DensePayload(Identity().unpack(data[_FLAG_BYTES:], parameter).parts)


@dataclass(frozen=True)
class SummedDenseFirst(DenseFirst, Summable):
    """The code of summed payloads, in which dense steps have one round."""

    def round_specs(self, parameter: Parameter) -> tuple[tuple[PartSpec, ...], ...]:
        return tuple(_of_any_size(specs, parameter) for specs in summable_code(self.inner).round_specs(parameter))

    def next_round(self, mean: Payload, parameter: Parameter, state: State) -> Payload | None:
        return None if isinstance(mean, DensePayload) else summable_code(self.inner).next_round(mean, parameter, state)

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        if isinstance(mean, DensePayload):
            return self.decompress(mean, parameter)
        return summable_code(self.inner).reconstruct(mean, parameter, state)


@dataclass(frozen=True)
class AnyDenseFirst(PackedDenseFirst, SummedDenseFirst):
    """The code of compressors that are both packed and summable, such as ``bf16()``."""


def dense_first(code: Compressor) -> Compressor:
    """Return the code that also reads the payloads of dense steps, and can do all that ``code`` can."""
    if isinstance(code, Packed):
        return (AnyDenseFirst if isinstance(code, Summable) else PackedDenseFirst)(code)
    return SummedDenseFirst(code) if isinstance(code, Summable) else code


warm_up = WarmUp


def density_of(compressor: Compressor) -> float | None:
    """Return the density of a sparsifier, also inside wrappers, or None for any other compressor."""
    core = core_of(compressor)
    return core.density if isinstance(core, DensitySelector) else None


def _of_any_size(specs: tuple[PartSpec, ...], parameter: Parameter) -> tuple[PartSpec, ...]:
    """Return specs of variable lengths: until the end of the warm-up parts are larger, up to a dense step's."""
    return tuple(replace(spec, numel=None, max_numel=max(spec.max_numel, parameter.numel)) for spec in specs)


def _changed(compressor: Compressor, **settings: Any) -> Compressor:
    """Return the same compressor with other settings of its selector, which may be inside of wrappers."""
    if isinstance(compressor, DensitySelector):
        return replace(compressor, **settings)
    assert isinstance(compressor, Wrapper), f"{compressor.name} has no density"
    return replace(compressor, inner=_changed(compressor.inner, **settings))  # pyrefly: ignore [bad-specialization]
