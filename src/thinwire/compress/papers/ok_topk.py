"""Ok-Topk, the local part of a rank: its selection, and the arithmetic of regions, tallies and balance.

A rank's threshold is reused over steps, and its memory waits for the result.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Joint, Parameter, State
from thinwire.compress.methods.select import largest_nonzero
from thinwire.compress.methods.sparsify import DensitySparsifier, Selection
from thinwire.compress.state import span
from thinwire.errors import CorruptMessageError

RUNGS = (0.5, 0.6, 0.72, 0.86, 1.0, 1.2, 1.44, 1.73)
"""Ratios of the thresholds at which sums are counted to the one that is reused."""
_COUNTED = (1 << 31) - 1  # counts have 32 bits; larger ones never occur
_WORTH_MOVING = 2
"""Shares are moved where the busiest rank then sends at most half. (The paper: where the largest share is above four
times the mean, which for eight ranks is about the same.)"""


@dataclass(frozen=True)
class Tally:
    """The counts of a region's sums, which its owner sends to all ranks.

    Args:
        held: number of sums that are not zero.
        passing: number of sums that reach each rung of the ladder of the reused global threshold.
        bound: the magnitude that ``ceil(k / world_size)`` of them reach; 0 if there are fewer. The least bound of all
            owners is reached by at least k sums, so the k-th largest is not below it.
    """

    held: int
    passing: tuple[int, ...]
    bound: float

    def packed(self) -> Tensor:
        held, bound = torch.tensor([self.held]), torch.tensor([self.bound], dtype=torch.float64)
        passing = torch.tensor(self.passing).clamp_(max=_COUNTED).int()
        return torch.cat([part.view(torch.uint8) for part in (held, bound, passing)])


def ladder(threshold: float) -> tuple[float, ...]:
    """Return thresholds around a given one, that one among them, in ascending order."""
    return tuple(threshold * rung for rung in RUNGS)


def tally_bytes(num_tasks: int) -> int:
    """Return the bytes of the tallies of ``num_tasks`` tasks."""
    return (16 + 4 * len(RUNGS)) * num_tasks


def parse_tallies(data: Tensor, sizes: Sequence[int]) -> list[Tally]:
    """Return the tallies of one owner, of regions of these sizes.

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
    """Return the inner boundaries (int64 [world_size - 1]) that split selected ids into equal counts."""
    inner = torch.arange(1, world_size)
    return ids[inner * ids.numel() // world_size] if ids.numel() else inner * numel // world_size


def parse_boundaries(data: Tensor, sizes: Sequence[int], world_size: int) -> list[Tensor]:
    """Return the boundaries of one rank, for parameters of these sizes.

    Raises:
        CorruptMessageError: another length, or boundaries that decrease or are outside.
    """
    if data.numel() != 8 * len(sizes) * (world_size - 1):
        raise CorruptMessageError(f"{data.numel()} bytes are not boundaries of {len(sizes)} x {world_size} regions")
    result = list(data.view(torch.int64).view(len(sizes), world_size - 1))
    for inner, size in zip(result, sizes, strict=True):
        if bool((inner < 0).any()) or bool((inner > size).any()) or bool((inner[1:] < inner[:-1]).any()):
            raise CorruptMessageError(f"boundaries {inner.tolist()} of {size} elements")
    return result


def mean_bounds(result: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
    """Return bounds of the regions of each parameter (int64 [world_size + 1]), the mean of all ranks' boundaries."""
    means = [torch.stack(of_ranks).sum(0) // len(of_ranks) for of_ranks in zip(*result, strict=True)]
    return [
        torch.cat([torch.tensor([0]), inner, torch.tensor([size])]) for inner, size in zip(means, sizes, strict=True)
    ]


def region(parameter: Parameter, bounds: Tensor, owner: int) -> Parameter:
    """Return a region as a parameter, with a name such as ``fc.weight[2/8]``."""
    size = int(bounds[owner + 1] - bounds[owner])
    return Parameter(f"{parameter.name}[{owner}/{bounds.numel() - 1}]", (size,), parameter.dtype)


def shares(counts: Sequence[int], owner: int) -> list[tuple[int, int]]:
    """Return the span of an owner's sums that each rank sends to all, if all send the same number.

    Example:
        >>> shares([4, 0], owner=0)
        [(0, 2), (2, 4)]
    """
    first, world_size = sum(counts[:owner]), len(counts)
    starts = [span(sum(counts), rank, world_size)[0] - first for rank in range(world_size + 1)]
    return list(pairwise(min(max(start, 0), counts[owner]) for start in starts))


def saved_by_balance(counts: Sequence[int]) -> int:
    """Return the pairs that balancing shares first saves the busiest rank, or 0 if that is not worth it.

    Example:
        >>> saved_by_balance([800, 0, 0, 0, 0, 0, 0, 0])
        4200
    """
    world_size, total = len(counts), sum(counts)
    direct = (world_size - 1) * max(counts)
    starts = list(accumulate(counts, initial=0))
    moved = 0
    for rank, count in enumerate(counts):
        begin, end = span(total, rank, world_size)
        stays = max(0, min(starts[rank + 1], end) - max(starts[rank], begin))
        moved = max(moved, count - stays)
    balanced = moved + (world_size - 1) * -(-total // world_size)
    return direct - balanced if direct >= _WORTH_MOVING * balanced else 0


OK_TOPK = "ok_topk"
"""The name of the method and of its reduction."""

_LOCAL_STEP = 1.012
_LOCAL_TOLERANCE = (2 / 3, 5 / 4)
REUSABLE = (1 / 2, 3 / 2)
"""Range of the ratio of counts to k in which a threshold is reused. Outside of it the local one is searched again at
once, the global one if no other of the ladder is in it."""


@dataclass(frozen=True)
class OkTopk(DensitySparsifier, Joint):
    """Ok-Topk (Li and Hoefler, PPoPP'22): about the ``k`` largest sums, for less than 6 k pairs a rank.

    It is a sparsifier with a reduction of its own, which "auto" chooses. Each rank sends its selection to the owners of
    regions of the gradient, which add it up; of the sums only about the ``k`` largest of all owners travel on. So bytes
    do not grow with the number of ranks. An element stays in a rank's memory, the error feedback that `attach`
    adds, unless the rank selected it and it is in the result. docs/guides/ok-topk-and-hitopk.md has the details.

    Its reduction is `thinwire.compress.papers.ok_topk_reduction`.

    State: ``step``, the next one; ``k`` of the last; ``threshold`` of this rank; ``global_threshold`` and ``bounds`` of
    the regions (int64 [world_size + 1]), equal on all ranks, 0 and empty if they must be computed again;
    ``selected``, the ids of this step until it is finished.

    Args:
        density: k / numel, in (0, 1], of each rank's selection and of the result; 0.01 and 0.02 in the paper.
        reselect_every: steps after which both thresholds are computed exactly; in between they are reused and adapted,
            and computed again if the gradient has left them far behind.
        repartition_every: steps after which the regions are cut again.

    Raises:
        ValueError: a density outside (0, 1]; less than one step.

    Example:
        >>> sync = thinwire.attach(model, dense=thinwire.compress.ok_topk(0.01))        # doctest: +SKIP
    """

    _: KW_ONLY
    reselect_every: int = 32
    repartition_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values is not None:
            raise ValueError("Ok-Topk adds up what owners get, so its values travel as they are: leave values out")
        if self.reselect_every < 1 or self.repartition_every < 1:
            raise ValueError(
                f"thresholds are computed again every {self.reselect_every} steps and regions every"
                f" {self.repartition_every}: use at least 1 for both"
            )

    @property
    def settings(self) -> tuple[str, ...]:
        is_default = (self.reselect_every, self.repartition_every) == (32, 64)
        return f"{self.density:g}", *(() if is_default else (f"{self.reselect_every}, {self.repartition_every}",))

    def init(self, parameter: Parameter) -> State:
        nothing = torch.empty(0, dtype=torch.int64)
        numbers = {"step": 0, "k": 0, "threshold": 0.0, "global_threshold": 0.0}
        return {**numbers, "bounds": nothing, "selected": nothing.clone()}

    def select(self, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        step, k = state["step"], self.target(flat.numel())
        if step % self.reselect_every == 0 or k != state["k"]:
            state["threshold"] = state["global_threshold"] = 0.0
        if step % self.repartition_every == 0:
            state["bounds"] = torch.empty(0, dtype=torch.int64)
        state["step"], state["k"] = step + 1, k
        selection = super().select(flat, parameter, state)
        state["selected"] = selection[0]
        return selection

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        threshold = state["threshold"]
        count = kernels.count_at_least(flat, threshold) if threshold > 0.0 else 0
        if is_reusable(count, k):
            state["threshold"] = nudged(threshold, count, k, _LOCAL_STEP, _LOCAL_TOLERANCE)
            return kernels.select_at_least(flat, threshold, count)
        selection = largest_nonzero(flat, k)
        state["threshold"] = smallest_magnitude(selection[1])
        return selection

    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Set to zero the elements that this rank sent and the result has; all others are kept."""
        if state["k"] == parameter.numel:
            gradient.zero_()  # a zero of the result is then a sum, and not an omitted element
            return
        ids = state["selected"]
        gradient.view(-1).index_fill_(0, ids[mean.reshape(-1)[ids] != 0], 0.0)

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        state["selected"] = torch.empty(0, dtype=torch.int64)


ok_topk = OkTopk


def is_reusable(count: int, k: int) -> bool:
    """Return whether a threshold that ``count`` elements reach is near enough to one for ``k``."""
    return REUSABLE[0] * k <= count <= REUSABLE[1] * k


def nudged(threshold: float, count: int, k: int, factor: float, tolerance: tuple[float, float]) -> float:
    """Return the threshold of the next step: higher if too many elements reach it, lower if too few."""
    if count > tolerance[1] * k:
        return threshold * factor
    return threshold / factor if count < tolerance[0] * k else threshold


def smallest_magnitude(values: Tensor) -> float:
    """Return the threshold that exactly these values reach, or 0 if there are none."""
    return float(values.abs().min()) if values.numel() else 0.0
