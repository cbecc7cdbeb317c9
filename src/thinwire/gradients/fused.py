"""Compression behind fusion: the gradients of a group as one flat tensor, whose boundaries a compressor ignores.

Most systems do this. A sparsifier then selects what is large in the group, so tensors of small values send nothing for
many steps; SAFusion (HPDC'25) therefore selects in each tensor first. This is the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.lane import Lane
from thinwire.compress import state as states
from thinwire.compress.base import Compressor, Parameter, Payload, State, check_parameter
from thinwire.compress.methods.low_rank import LowRank
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.reduction.base import Result
from thinwire.compress.state import dissolved, fused, outstanding
from thinwire.compress.warm_up import DensePayload
from thinwire.compress.wrappers import Wrapper, core_of
from thinwire.gradients.compressed import Coded, CompressedSync, Memories, NamedGradients, Outcome
from thinwire.gradients.compression import Planned
from thinwire.gradients.tables import share


@dataclass(frozen=True)
class Watched(Wrapper):
    """A wrapper that remembers the selection of a sparsifier: elements of each piece that it saw, and the ids in it."""

    chosen: list[tuple[int, Tensor]] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:
        return self.inner.name

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        payload = super().compress(gradient, parameter, state)
        if isinstance(self.code, Sparsifier) and not isinstance(payload, DensePayload):
            self.chosen.append((parameter.numel, payload.parts[0]))
        return payload

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """Return the number of selected elements of each member in the last step, or None if none were selected.

        In two shots the pieces of this rank's gradient come first, and then the one that it encodes for others.
        """
        seen, self.chosen[:] = self.chosen.copy(), []
        counts, start = torch.zeros(len(sizes), dtype=torch.int64), 0
        ends = torch.tensor(list(accumulate(sizes)))
        for numel, ids in seen:
            if start < sum(sizes):
                counts += torch.bincount(torch.bucketize(ids + start, ends, right=True), minlength=len(sizes))
            start += numel
        return counts.tolist() if seen else None


class FusedMemories(Memories):
    """The states of flat tensors, by the names of their members.

    If gradients come in another grouping than before, memories are cut and joined, see `thinwire.compress.state`.
    """

    def __init__(self, plans: Mapping[str, Planned], rank: int, world_size: int, can_skip: bool) -> None:
        super().__init__({}, rank, world_size, can_skip)
        self._plans = plans
        self._members: dict[str, tuple[str, ...]] = {}
        self._unit_of: dict[str, str] = {}

    def unit(self, names: Sequence[str]) -> str:
        """Return the name of the flat tensor of these parameters, and create its state if it has none."""
        unit = " + ".join(names)
        if unit not in self.units:
            before = [self._cut_out(name) for name in names]
            self._add(unit, tuple(names))
            self.states[unit] = fused(before, self._sizes(unit), self.new_state(self.units[unit]))
        return unit

    def outstanding(self, name: str) -> Tensor | None:
        unit = self._unit_of.get(name)
        if unit is None:
            return None
        memory = outstanding(self.states[unit], self.rank, self.world_size)
        place = self._members[unit].index(name)
        return None if memory is None else memory.split(self._sizes(unit))[place]

    def outcomes(self, name: str, result: Result) -> list[Outcome]:
        """Return the outcome of each member; bytes are shared out by elements."""
        watched, sizes = self.units[name].compressor, self._sizes(name)
        assert isinstance(watched, Watched)
        counts, parts = watched.take(sizes), share(result.payload_bytes, sizes)
        found = []
        for place, member in enumerate(self._members[name]):
            density = result.density if counts is None else counts[place] / max(1, sizes[place])
            found.append((self._plans[member], replace(result, payload_bytes=parts[place], density=density)))
        return found

    def describe(self, plan: Planned) -> str:
        return f"{plan.describe()}, as one tensor with others"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "groups": {unit: list(members) for unit, members in self._members.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._members, self._unit_of, self.units = {}, {}, {}
        for unit, members in state["groups"].items():
            self._add(unit, tuple(members))
        super().load_state_dict(state)

    def _check_units(self, state: Mapping[str, Any]) -> None:
        groups: Mapping[str, Sequence[str]] = state["groups"]
        members = [name for group in groups.values() for name in group]
        if (
            len(set(members)) < len(members)
            or not set(members) <= set(self._plans)
            or set(groups) != set(state["states"])
        ):
            raise ValueError("the groups of the state are not groups of the parameters that are compressed here")
        for unit, group in groups.items():
            plan = self._planned(unit, group)
            states.check_fits(state["states"][unit], self.new_state(plan), f"the state of {_span(group)}")

    def _cut_out(self, name: str) -> State | None:
        """Cut a member's state out of its unit; None before its first step. The other members keep their states."""
        unit = self._unit_of.get(name)
        if unit is None:
            return None
        members = self._members[unit]
        if len(members) > 1:
            parts = dissolved(self.states[unit], self._sizes(unit), self.rank, self.world_size)
            self._remove(unit)
            for member, part in zip(members, parts, strict=True):
                self._add(member, (member,))
                self.states[member] = fused([part], self._sizes(member), self.new_state(self.units[member]))
        (alone,) = dissolved(self.states[name], self._sizes(name), self.rank, self.world_size)
        self._remove(name)
        return alone

    def _add(self, unit: str, members: tuple[str, ...]) -> None:
        self._members[unit], self.units[unit] = members, self._planned(unit, members)
        self._unit_of.update(dict.fromkeys(members, unit))

    def _remove(self, unit: str) -> None:
        del self.states[unit], self.units[unit]
        for member in self._members.pop(unit):
            del self._unit_of[member]

    def _planned(self, unit: str, members: Sequence[str]) -> Planned:
        first = self._plans[members[0]]
        numel = sum(self._plans[name].parameter.numel for name in members)
        parameter = Parameter(unit, (numel,), first.parameter.dtype)
        return replace(first, parameter=parameter, compressor=Watched(first.compressor))

    def _sizes(self, unit: str) -> list[int]:
        return [self._plans[name].parameter.numel for name in self._members[unit]]


class FusedSync(CompressedSync):
    """A `CompressedSync` of flat tensors: gradients of one job with the same compressor are one tensor.

    A group is the gradients of a job, so the buckets of DDP, which change after its first pass, need nothing else.

    Raises:
        ValueError: a compressor that needs matrices.
    """

    def synchronize(
        self, lane: Lane, gradients: NamedGradients, others: Sequence[Tensor], account: str, coded: Coded | None = None
    ) -> None:
        together: dict[tuple[Compressor, str, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, gradient in gradients:
            plan = self.plans[name]
            together.setdefault((plan.compressor, plan.reduction.name, gradient.dtype), []).append((name, gradient))
        flats, memories = [], self.memories
        assert isinstance(memories, FusedMemories)
        for members in together.values():
            flat = torch.cat([gradient.reshape(-1) for _, gradient in members])
            flats.append((memories.unit([name for name, _ in members]), flat))
        super().synchronize(lane, flats, others, account, coded)
        for members, (_, flat) in zip(together.values(), flats, strict=True):
            sizes = [gradient.numel() for _, gradient in members]
            for (_, gradient), mean in zip(members, flat.split(sizes), strict=True):
                gradient.copy_(mean.view(gradient.shape))

    def _remembered(self, lane: Lane) -> FusedMemories:
        for plan in self.plans.values():
            check_flat(plan)
        return FusedMemories(self.plans, lane.rank, lane.world_size, self._can_skip)


def check_flat(plan: Planned) -> None:
    """Raise ValueError, saying what to do, if a flat tensor of several gradients cannot be compressed this way."""
    if isinstance(core_of(plan.compressor), LowRank):
        raise ValueError(
            f"{plan.compressor.name}: gradients that are compressed as one flat tensor are no matrix any more"
            f" (parameter {plan.parameter.name!r}): leave ahead=True, or take a compressor that is not of low rank"
        )
    flat = replace(plan.parameter, shape=(plan.parameter.numel,))
    check_parameter(plan.compressor, flat)
    plan.reduction.check(plan.compressor, flat)


def _span(names: Sequence[str]) -> str:
    return f"parameter {names[0]!r}" if len(names) == 1 else f"the group {names[0]!r} to {names[-1]!r}"
