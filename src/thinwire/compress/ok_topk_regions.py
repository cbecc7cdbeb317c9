"""Ok-Topk's arithmetic of regions: where they are cut, what is told about them, and how a skew is evened out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.compress.base import Parameter
from thinwire.errors import CorruptMessageError

RUNGS = (0.5, 0.6, 0.72, 0.86, 1.0, 1.2, 1.44, 1.73)
"""Of the ladder of thresholds that sums are counted at, over the one that is reused."""
_COUNTED = (1 << 31) - 1  # counts are told in 32 bits; so many never pass
_WORTH_MOVING = 2
"""Shares are moved where the busiest rank then sends at most half. (The paper: where the largest share is above four
times the mean, which for eight ranks is about the same.)"""


@dataclass(frozen=True)
class Tally:
    """What the owner of a region tells all ranks of its sums.

    Args:
        held: how many are not zero.
        passing: how many reach each rung of the ladder of the reused global threshold.
        bound: the magnitude that ``ceil(k / world_size)`` of them reach; 0 if there are not so many. The least bound
            of all owners is reached by at least k sums, so the k-th largest is not below it.
    """

    held: int
    passing: tuple[int, ...]
    bound: float

    def packed(self) -> Tensor:
        parts = (
            torch.tensor([self.held]),
            torch.tensor([self.bound], dtype=torch.float64),
            torch.tensor(self.passing).clamp_(max=_COUNTED).int(),
        )
        return torch.cat([part.view(torch.uint8) for part in parts])


def ladder(threshold: float) -> tuple[float, ...]:
    """Thresholds around one, that one among them, from the lowest."""
    return tuple(threshold * rung for rung in RUNGS)


def tally_bytes(num_tasks: int) -> int:
    """Of the tallies of so many tasks."""
    return (16 + 4 * len(RUNGS)) * num_tasks


def parse_tallies(data: Tensor, sizes: Sequence[int]) -> list[Tally]:
    """Those of one owner, of regions of these sizes.

    Raises:
        CorruptMessageError: another length, more elements than a region has, or more that reach a higher threshold.
    """
    if data.numel() != tally_bytes(len(sizes)):
        raise CorruptMessageError(f"{data.numel()} bytes are not tallies of {len(sizes)} regions")
    return [_parse_tally(row, size) for row, size in zip(data.view(len(sizes), -1), sizes, strict=True)]


def _parse_tally(data: Tensor, size: int) -> Tally:
    held, bound = int(data[:8].view(torch.int64)), float(data[8:16].view(torch.float64))
    passing = tuple(data[16:].view(torch.int32).tolist())
    if not all(more >= fewer for more, fewer in pairwise((size, held, *passing, 0))):
        raise CorruptMessageError(f"{passing} of {held} sums of a region of {size} elements")
    return Tally(held, passing, bound)


def boundaries(ids: Tensor, numel: int, world_size: int) -> Tensor:
    """The inner boundaries (int64 [world_size - 1]) that split selected ids into equal counts."""
    inner = torch.arange(1, world_size)
    return ids[inner * ids.numel() // world_size] if ids.numel() else inner * numel // world_size


def parse_boundaries(data: Tensor, sizes: Sequence[int], world_size: int) -> list[Tensor]:
    """Those of one rank, for parameters of so many elements.

    Raises:
        CorruptMessageError: another length, or boundaries that decrease or are outside.
    """
    if data.numel() != 8 * len(sizes) * (world_size - 1):
        raise CorruptMessageError(f"{data.numel()} bytes are not boundaries of {len(sizes)} x {world_size} regions")
    found = list(data.view(torch.int64).view(len(sizes), world_size - 1))
    for inner, size in zip(found, sizes, strict=True):
        if bool((inner < 0).any()) or bool((inner > size).any()) or bool((inner[1:] < inner[:-1]).any()):
            raise CorruptMessageError(f"boundaries {inner.tolist()} of {size} elements")
    return found


def mean_bounds(found: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
    """Bounds of the regions of each parameter (int64 [world_size + 1]), from the boundaries that each rank found."""
    bounds = []
    for size, *of_ranks in zip(sizes, *found, strict=True):
        inner = torch.stack(of_ranks).sum(0) // len(of_ranks)
        bounds.append(torch.cat([torch.tensor([0]), inner, torch.tensor([size])]))
    return bounds


def region(parameter: Parameter, bounds: Tensor, owner: int) -> Parameter:
    """A region as a parameter, named such as ``fc.weight[2/8]``."""
    size = int(bounds[owner + 1] - bounds[owner])
    return Parameter(f"{parameter.name}[{owner}/{bounds.numel() - 1}]", (size,), parameter.dtype)


def shares(counts: Sequence[int], owner: int) -> list[tuple[int, int]]:
    """Which of an owner's sums each rank sends to all, if all send equally many: spans, in rank order.

    Example:
        >>> shares([4, 0], owner=0)
        [(0, 2), (2, 4)]
    """
    first, total, world_size = sum(counts[:owner]), sum(counts), len(counts)
    spans = []
    for rank in range(world_size):
        start = total * rank // world_size - first
        stop = total * (rank + 1) // world_size - first
        spans.append((min(max(start, 0), counts[owner]), min(max(stop, 0), counts[owner])))
    return spans


def saved_by_balance(counts: Sequence[int]) -> int:
    """Pairs that the busiest rank sends less if shares are evened out first; 0 where that is not worth it.

    Example:
        >>> saved_by_balance([800, 0, 0, 0, 0, 0, 0, 0])
        4200
    """
    world_size, total = len(counts), sum(counts)
    direct = (world_size - 1) * max(counts)
    starts = list(accumulate(counts, initial=0))
    moved = 0
    for rank, count in enumerate(counts):
        begin, end = total * rank // world_size, total * (rank + 1) // world_size
        stays = max(0, min(starts[rank + 1], end) - max(starts[rank], begin))
        moved = max(moved, count - stays)
    balanced = moved + (world_size - 1) * -(-total // world_size)
    return direct - balanced if direct >= _WORTH_MOVING * balanced else 0
