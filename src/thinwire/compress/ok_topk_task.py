"""One gradient in a run of Ok-Topk: what this rank selected, what its region sums up to, and what passes of that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.exchange import Plan, Task
from thinwire.compress.ok_topk import OkTopk, is_reusable, nudged, smallest_magnitude
from thinwire.compress.ok_topk_regions import RUNGS, Tally, ladder, region
from thinwire.compress.sparsify import Selection
from thinwire.compress.wrapper import unwrapped

_GLOBAL_STEP = 1.008
_GLOBAL_TOLERANCE = (2 / 3, 4 / 3)


class OkTopkTask:
    """What a run of Ok-Topk knows of one task. Ids count from 0 in the parameter; in ``reduced`` and ``kept``, in the
    region."""

    def __init__(self, task: Task) -> None:
        core, self.state = unwrapped(task.compressor, task.state)
        assert isinstance(core, OkTopk)
        self.task, self.core, self.parameter = task, core, task.parameter
        self.selected: Selection
        self.reduced: Selection  # of this rank's region: means that are not zero
        self.counts: list[int] = []  # that each owner keeps
        self.threshold = 0.0  # that this step's result reaches; 0 where counts alone tell what is kept
        self.kept: Selection
        self.share: Selection | None = None  # what this rank sends to all instead, after balancing
        self.sent_bytes = 0  # as plain ids and values

    @property
    def k(self) -> int:
        return self.state["k"]

    def select(self) -> None:
        payload = self.task.compressor.compress(self.task.gradient, self.parameter, self.task.state)
        ids, values = payload.parts
        self.selected = ids, values

    def sent(self, selection: Selection) -> Selection:
        """The same, counted."""
        self.sent_bytes += selection[0].numel() * (8 + selection[1].element_size())
        return selection

    def start(self, owner: int) -> int:
        return int(self.state["bounds"][owner])

    def plan(self, owner: int) -> Plan:
        """How pairs of a region travel."""
        return self.core, region(self.parameter, self.state["bounds"], owner)

    def tally(self, world_size: int) -> Tally:
        values, threshold = self.reduced[1], self.state["global_threshold"]
        fair = -(-self.k // world_size)
        enough = 0 < fair <= values.numel()
        return Tally(
            held=values.numel(),
            passing=tuple(kernels.count_at_least(values, rung) if threshold > 0.0 else 0 for rung in ladder(threshold)),
            bound=smallest_magnitude(kernels.top_magnitudes(values, fair)[1]) if enough else 0.0,
        )

    def decide(self, tallies: Sequence[Tally]) -> bool:
        """Counts and threshold of this step, unless the threshold has to be found first."""
        if sum(tally.held for tally in tallies) <= self.k:
            self.counts = [tally.held for tally in tallies]
            return True
        totals = [sum(of_owners) for of_owners in zip(*(tally.passing for tally in tallies), strict=True)]
        threshold, rung = self.state["global_threshold"], _rung(totals, self.k)
        if threshold == 0.0 or rung is None:
            return False
        self.counts = [tally.passing[rung] for tally in tallies]
        self.threshold = ladder(threshold)[rung]
        self.state["global_threshold"] = nudged(self.threshold, totals[rung], self.k, _GLOBAL_STEP, _GLOBAL_TOLERANCE)
        return True

    def candidates(self, bound: float) -> Tensor:
        """Magnitudes of this region that can be among the k largest, if those of all owners' are at least ``bound``."""
        values = self.reduced[1]
        return kernels.top_magnitudes(values, min(self.k, kernels.count_at_least(values, bound)))[1].abs()

    def decide_exactly(self, candidates: Sequence[Tensor]) -> None:
        """The k largest of all candidates; of equal ones the first, in the order of owners and ids."""
        together = torch.cat(list(candidates))
        places, chosen = kernels.top_magnitudes(together, min(self.k, together.numel()))
        ends = list(accumulate((piece.numel() for piece in candidates), initial=0))
        cuts = torch.searchsorted(places, torch.tensor(ends)).tolist()
        self.counts = [stop - start for start, stop in pairwise(cuts)]
        self.state["global_threshold"] = smallest_magnitude(chosen)

    def keep(self, rank: int) -> None:
        ids, values = self.reduced
        if self.threshold > 0.0:
            places, values = kernels.select_at_least(values, self.threshold)
        else:
            places, values = kernels.top_magnitudes(values, min(self.counts[rank], values.numel()))
        self.kept = ids[places], values


def _rung(totals: Sequence[int], k: int) -> int | None:
    """Of a ladder of thresholds, that reach so many, the one that is reused if it can be; else the nearest to k."""
    reused = RUNGS.index(1.0)
    if is_reusable(totals[reused], k):
        return reused
    nearest = min(range(len(totals)), key=lambda rung: abs(totals[rung] - k))
    return nearest if is_reusable(totals[nearest], k) else None


def mean_of(selections: Sequence[Selection]) -> Selection:
    """Of all ranks' pairs of a region, added in rank order; without the places where they cancel out."""
    pieces = [(ids, values.view(-1, 1)) for ids, values in selections]
    ids, total = kernels.sum_rows(pieces)
    values = total.view(-1).div_(len(selections))
    present = values != 0
    return (ids, values) if bool(present.all()) else (ids[present], values[present])
