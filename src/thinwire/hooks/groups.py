"""Which parameters of a plain module travel together: as DDP's buckets do, or as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from thinwire.errors import CorruptMessageError
from thinwire.lane import Lane
from thinwire.sync.channel import Subject

FIRST_GROUP_BYTES = 1024 * 1024
GROUP_BYTES = 25 * 1024 * 1024
"""As DDP has them: a small first group starts the network early."""

Groups = tuple[tuple[int, ...], ...]
"""Places of parameters in the order of registration, group by group, in the order in which groups are submitted."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A parameter that gets gradients.

    Args:
        is_sparse: its gradient is a COO tensor, which travels alone.
        is_table: of a dense embedding, whose rows are looked at.
    """

    name: str
    parameter: nn.Parameter
    is_sparse: bool = False
    is_table: bool = False

    @property
    def num_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


def plan_groups(trained: Sequence[Trained], order: Sequence[int]) -> Groups:
    """Consecutive parameters of one dtype up to a number of bytes; a sparse gradient is a group of its own.

    Args:
        order: places, in the order in which gradients are expected.
    """
    groups: list[list[int]] = []
    size_bytes, dtype = 0, None
    for place in order:
        entry = trained[place]
        cap = FIRST_GROUP_BYTES if len(groups) <= 1 else GROUP_BYTES
        joins = groups and dtype == entry.parameter.dtype and not entry.is_sparse
        if joins and size_bytes + entry.num_bytes <= cap:
            groups[-1].append(place)
            size_bytes += entry.num_bytes
        else:
            groups.append([place])
            size_bytes, dtype = entry.num_bytes, None if entry.is_sparse else entry.parameter.dtype
    return tuple(map(tuple, groups))


def with_others(trained: Sequence[Trained], planned: Groups, order: Sequence[int]) -> Groups:
    """The groups of a plan, and between them groups of what no plan has: tables of embeddings.

    A table goes before the first group that is complete later than the table is ready, so that nothing waits for it.

    Args:
        planned: of any parameters, each in one group.
        order: all places, in the order in which gradients are expected.
    """
    position = {place: number for number, place in enumerate(order)}
    ends = [max(position[place] for place in group) for group in planned]
    known = {place for group in planned for place in group}
    before: dict[int, list[int]] = {}
    for place in order:
        if place not in known:
            later = (number for number, end in enumerate(ends) if end > position[place])
            before.setdefault(next(later, len(planned)), []).append(place)
    groups: list[tuple[int, ...]] = []
    for number in range(len(planned) + 1):
        groups += plan_groups(trained, before.get(number, ()))
        groups += planned[number : number + 1]
    return tuple(groups)


def places_of(trained: Sequence[Trained], groups: Sequence[Sequence[str]]) -> Groups:
    """Groups of names as groups of places."""
    place = {entry.name: number for number, entry in enumerate(trained)}
    return tuple(tuple(place[name] for name in group) for group in groups)


def agree_on_order(lane: Lane, order: Sequence[int]) -> list[int]:
    """Return the order that rank 0 has; a job of the lane.

    Raises:
        CorruptMessageError: what came is not an order of so many parameters.
    """
    theirs: list[int] = lane.channel(Subject("the order of gradients", f"{len(order)} parameters")).broadcast(order)
    if sorted(theirs) != list(range(len(order))):
        raise CorruptMessageError(f"{len(theirs)} numbers that are not an order of {len(order)} parameters")
    return theirs
