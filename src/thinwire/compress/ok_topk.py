"""Ok-Topk, the part that a rank does alone: a threshold that is reused, and a memory that waits for the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Joint, Parameter, State
from thinwire.compress.sparsify import DensitySparsifier, Selection
from thinwire.compress.threshold import largest_nonzero

OK_TOPK = "ok_topk"
"""The name of the method and of its reduction."""

_LOCAL_STEP = 1.012
_LOCAL_TOLERANCE = (2 / 3, 5 / 4)
REUSABLE = (1 / 2, 3 / 2)
"""A threshold that lets through another part of k is not reused: the local one is searched anew at once, the global one
if no other of the ladder does."""


@dataclass(frozen=True)
class OkTopk(DensitySparsifier, Joint):
    """See `ok_topk`. What the ranks do together is `thinwire.compress.ok_topk_exchange`.

    State: ``step``, the next one; ``k`` of the last; ``threshold`` of this rank; ``global_threshold`` and ``bounds`` of
    the regions (int64 [world_size + 1]), equal on all ranks, 0 and empty where they are to be found anew;
    ``selected``, the ids of this step until it is finished.
    """

    reselect_every: int = 32
    repartition_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values is not None:
            raise ValueError("Ok-Topk adds up what owners get, so its values travel as they are: leave values out")
        if self.reselect_every < 1 or self.repartition_every < 1:
            raise ValueError(
                f"thresholds are found anew every {self.reselect_every} steps and regions every"
                f" {self.repartition_every}: use at least 1 for both"
            )

    @property
    def settings(self) -> tuple[str, ...]:
        is_default = (self.reselect_every, self.repartition_every) == (32, 64)
        return (*super().settings, *(() if is_default else (f"{self.reselect_every}, {self.repartition_every}",)))

    def init(self, parameter: Parameter) -> State:
        del parameter
        nothing = torch.empty(0, dtype=torch.int64)
        return {
            "step": 0,
            "k": 0,
            "threshold": 0.0,
            "global_threshold": 0.0,
            "bounds": nothing,
            "selected": nothing.clone(),
        }

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
        del parameter
        threshold = state["threshold"]
        count = kernels.count_at_least(flat, threshold) if threshold > 0.0 else 0
        if is_reusable(count, k):
            state["threshold"] = nudged(threshold, count, k, _LOCAL_STEP, _LOCAL_TOLERANCE)
            return kernels.select_at_least(flat, threshold, count)
        selection = largest_nonzero(flat, k)
        state["threshold"] = smallest_magnitude(selection[1])
        return selection

    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Zero where this rank sent something that is in the result, which has no zeros; all else is kept."""
        if state["k"] == parameter.numel:
            gradient.zero_()  # a zero of the result is a sum then, and not something left out
            return
        ids = state["selected"]
        gradient.view(-1).index_fill_(0, ids[mean.reshape(-1)[ids] != 0], 0.0)

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        del mean, parameter
        state["selected"] = torch.empty(0, dtype=torch.int64)


def ok_topk(density: float = 0.01, *, reselect_every: int = 32, repartition_every: int = 64) -> OkTopk:
    """Ok-Topk (Li and Hoefler, PPoPP'22): about the ``k`` largest elements of the sum, for less than 6 k pairs a rank.

    A sparsifier and a reduction of its own, which is taken by itself. Each rank sends what it selected to the owners of
    regions of the gradient, which add it up; of the sums only about the ``k`` largest of all owners travel on. So bytes
    do not grow with the number of ranks. An element stays in a rank's memory, the error feedback that `attach`
    adds, unless the rank selected it and it is in the result. docs/compress-methods.md has the details.

    Args:
        density: k / numel, in (0, 1], of what each rank selects and of the result; the paper's are 0.01 and 0.02.
        reselect_every: steps after which both thresholds are found exactly; in between they are reused and adapted, and
            found anew where the gradient has left them far behind.
        repartition_every: steps after which the regions are cut anew.

    Raises:
        ValueError: a density outside (0, 1]; less than one step.

    Example:
        >>> sync = thinwire.attach(model, compress=thinwire.compress.ok_topk(0.01))     # doctest: +SKIP
    """
    return OkTopk(density=density, reselect_every=reselect_every, repartition_every=repartition_every)


def is_reusable(count: int, k: int) -> bool:
    """Whether a threshold that ``count`` elements reach is near enough to one for ``k``."""
    return REUSABLE[0] * k <= count <= REUSABLE[1] * k


def nudged(threshold: float, count: int, k: int, factor: float, tolerance: tuple[float, float]) -> float:
    """The threshold of the next step: higher if too many reach it, lower if too few."""
    if count > tolerance[1] * k:
        return threshold * factor
    return threshold / factor if count < tolerance[0] * k else threshold


def smallest_magnitude(values: Tensor) -> float:
    """The threshold that exactly these reach; 0 if there are none."""
    return float(values.abs().min()) if values.numel() else 0.0
