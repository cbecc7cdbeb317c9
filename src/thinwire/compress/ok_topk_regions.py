"""Ok-Topk's arithmetic of regions: where they are cut, what is told about them, and how a skew is evened out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.compress.base import Parameter
from thinwire.errors import CorruptMessageError

_TALLY_NUMBERS = 3
_WORTH_MOVING = 2
"""Shares are moved where the busiest rank then sends at most half. (The paper: where the largest share is above four
times the mean, which for eight ranks is about the same.)"""


@dataclass(frozen=True)
class Tally:
    """What the owner of a region tells all ranks of its sums.

    Args:
        held: how many are not zero.
        passing: how many reach the reused global threshold.
        bound: the magnitude that ``ceil(k / world_size)`` of them reach; 0 if there are not so many. The least bound
            of all owners is reached by at least k sums, so the k-th largest is not below it.
    """

    held: int
    passing: int
    bound: float

    def packed(self) -> Tensor:
        counts = torch.tensor([self.held, self.passing])
        return torch.cat([counts, torch.tensor([self.bound], dtype=torch.float64).view(torch.int64)]).view(torch.uint8)


def tally_bytes(num_tasks: int) -> int:
    """Of the tallies of so many tasks."""
    return 8 * _TALLY_NUMBERS * num_tasks


def parse_tallies(data: Tensor, sizes: Sequence[int]) -> list[Tally]:
    """Those of one owner, of regions of these sizes.

    Raises:
        CorruptMessageError: another length, or more elements than a region has.
    """
    if data.numel() != tally_bytes(len(sizes)):
        raise CorruptMessageError(f"{data.numel()} bytes are not tallies of {len(sizes)} regions")
    table = data.view(torch.int64).view(-1, _TALLY_NUMBERS)
    bounds: list[float] = table[:, 2].contiguous().view(torch.float64).tolist()
    counts: list[list[int]] = table[:, :2].tolist()
    for (held, passing), size in zip(counts, sizes, strict=True):
        if not 0 <= passing <= held <= size:
            raise CorruptMessageError(f"{passing} of {held} sums of a region of {size} elements")
    return [Tally(held, passing, bound) for (held, passing), bound in zip(counts, bounds, strict=True)]


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
