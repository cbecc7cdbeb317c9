"""Random elements, the same ones on all ranks, so that only values travel."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Memory, Parameter, Payload, State, Summable, stable_seed
from thinwire.compress.methods.sparsify import HEADER_BYTES, DensitySelector, Selection, opened, sealed
from thinwire.compress.packing import PartSpec
from thinwire.errors import CorruptMessageError
from thinwire.rows.formats import aligned

_STEP_BYTES = 8
_PLAIN_DRAW = 4096
"""Number of elements below which, or for a quarter of them and more, a permutation is cheaper than removing repeats."""


@dataclass(frozen=True, eq=False)
class SharedPayload(Payload):
    """A payload of values, whose ids follow from the step. The mean of several has neither, see `RandomK`."""

    ids: Tensor
    step: int


@dataclass(frozen=True)
class RandomK(DensitySelector):
    """The compressor of `random_k`; ids do not travel.

    State: ``step``, the next to draw for; ``ids`` of the last step, int64 [k]; ``values`` of the code.
    """

    seed: int = 0
    unbiased: bool = False

    has_fixed_count: ClassVar[bool] = True
    label = "random_k"

    @property
    def memory(self) -> Memory:
        return Memory.OWN if self.unbiased else Memory.NEEDED  # what is scaled must not be remembered

    def init(self, parameter: Parameter) -> State:
        return {**super().init(parameter), "step": 0, "ids": torch.empty(0, dtype=torch.int64)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        ids, chosen = self.select(gradient.detach().view(-1), parameter, state)
        step, state["ids"] = state["step"], ids
        state["step"] = step + 1
        return SharedPayload(self.encode(chosen, parameter, state), ids, step)

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        ids = shared_ids(self.seed, parameter, state["step"], k)
        chosen = flat.index_select(0, ids)
        return ids, chosen.mul_(flat.numel() / k) if self.unbiased else chosen

    def chosen(self, payload: Payload, parameter: Parameter) -> Selection:
        assert isinstance(payload, SharedPayload), "the mean of several payloads is decoded by reconstruct"
        return payload.ids, self.decode(payload.parts, payload.ids.numel(), parameter)

    @property
    def is_exact(self) -> bool:
        return super().is_exact and not self.unbiased

    def pack(self, payload: Payload, parameter: Parameter) -> Tensor:
        """Return count, checksum, step and values, for all-gathers; inside an all-reduce values travel alone."""
        assert isinstance(payload, SharedPayload)
        step = torch.tensor([payload.step]).view(torch.uint8)
        count = payload.ids.numel()
        return sealed(count, 0, [step, self.pack_values(payload.parts, count, parameter)])

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        count, code, body = opened(data)
        if count > parameter.numel or code != 0 or body.numel() < _STEP_BYTES:
            raise CorruptMessageError(f"{count} values: no rank sends that of {parameter.numel} elements")
        step, body = int(body[:_STEP_BYTES].view(torch.int64)), body[_STEP_BYTES:]
        if step < 0:
            raise CorruptMessageError(f"values of step {step}")
        ids = shared_ids(self.seed, parameter, step, count)
        return SharedPayload(self.unpack_values(body, count, parameter), ids, step)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return self.code_specs(self.fixed_count(parameter), parameter)

    def packed_bytes(self, parameter: Parameter) -> int | None:
        count = self.fixed_count(parameter)
        size = None if count is None else self.values_bytes(count, parameter)
        return None if size is None else HEADER_BYTES + _STEP_BYTES + aligned(size)


@dataclass(frozen=True)
class SummableRandomK(RandomK, Summable):
    """A `RandomK` whose values can be added up inside an all-reduce."""

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        return self.decompress(SharedPayload(mean.parts, state["ids"], state["step"] - 1), parameter)


def random_k(
    density: float = 0.01, *, seed: int = 0, unbiased: bool = False, values: Compressor | None = None
) -> RandomK:
    """Return Random-K with a shared seed (Wangni et al., NeurIPS'18): the same random elements on all ranks.

    They follow from ``seed``, the name of the parameter and the step, drawn without replacement; no ids travel, and
    payloads are summed inside an all-reduce.

    Args:
        density: k / numel, in (0, 1].
        seed: the same on all ranks.
        unbiased: whether to scale values by numel / k, so that their expectation is the gradient. Error feedback, which
            would add up what the scaling subtracts, is refused then; what a code of values loses is lost.
        values: code of the selected values; payloads add up only with a summable code, such as ``bf16()``.

    Raises:
        ValueError: a density outside (0, 1].
    """
    kind = SummableRandomK if values is None or isinstance(values, Summable) else RandomK
    return kind(density=density, seed=seed, unbiased=unbiased, values=values)


def shared_ids(seed: int, parameter: Parameter, step: int, k: int) -> Tensor:
    """Return ``k`` different ids of a parameter, sorted, all sets equally likely; the same on every rank."""
    generator = torch.Generator().manual_seed(stable_seed(seed, parameter.name, step))
    return _subset(parameter.numel, k, generator)


def _subset(size: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw with replacement until ``k`` are different, then leave out a random set of the excess.

    No step prefers one id to another, so all sets of ``k`` are equally likely; this is 20 times as fast as a
    permutation of 25 million.
    """
    if size < _PLAIN_DRAW or 4 * k >= size:
        return torch.randperm(size, generator=generator)[:k].sort().values
    result = torch.empty(0, dtype=torch.int64)
    while result.numel() < k:
        expected = (k - result.numel()) * size // (size - k) + 8
        result = torch.cat([result, torch.randint(size, (expected,), generator=generator)]).unique()
    excess = _subset(result.numel(), result.numel() - k, generator)
    kept = torch.ones(result.numel(), dtype=torch.bool).index_fill_(0, excess, False)
    return result[kept]
