"""Ok-Topk's sparse all-reduce: to the owners of regions, a common threshold, balance, to all.

`OkTopkTask` is one gradient in a run: this rank's selection, the sums of its region, and which of them pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress import packing
from thinwire.compress.methods.sparsify import Selection
from thinwire.compress.papers import ok_topk
from thinwire.compress.papers.ok_topk import OK_TOPK, OkTopk, Tally
from thinwire.compress.reductions import messages, stacked
from thinwire.compress.reductions.base import Arrived, OwnReduction, Peers, Phase, Plan, Result, Stopwatch, T, Task
from thinwire.compress.wrappers import unwrapped
from thinwire.errors import raising

_GLOBAL_STEP = 1.008
_GLOBAL_TOLERANCE = (2 / 3, 4 / 3)


class OkTopkTask:
    """The state of one task in a run of Ok-Topk.

    Ids count from 0 in the parameter; in ``reduced`` and ``kept``, in the region.
    """

    def __init__(self, task: Task) -> None:
        core, self.state = unwrapped(task.compressor, task.state)
        assert isinstance(core, OkTopk)
        self.task, self.core, self.parameter = task, core, task.parameter
        self.selected: Selection
        self.reduced: Selection  # non-zero means of this rank's region
        self.counts: list[int] = []  # kept by each owner
        self.threshold = 0.0  # of this step's result; 0 if counts alone decide what is kept
        self.kept: Selection
        self.share: Selection | None = None  # sent to all instead, after balancing
        self.sent_bytes = 0  # as plain ids and values

    @property
    def k(self) -> int:
        return self.state["k"]

    def select(self) -> None:
        ids, values = self.task.compress().parts
        self.selected = ids, values

    def sent(self, selection: Selection) -> Selection:
        """Return the selection, and count its bytes."""
        self.sent_bytes += selection[0].numel() * (8 + selection[1].element_size())
        return selection

    def start(self, owner: int) -> int:
        return int(self.state["bounds"][owner])

    def plan(self, owner: int) -> Plan:
        """Return the plan by which pairs of a region travel."""
        return self.core, ok_topk.region(self.parameter, self.state["bounds"], owner)

    def tally(self, world_size: int) -> Tally:
        values, threshold = self.reduced[1], self.state["global_threshold"]
        fair = -(-self.k // world_size)
        enough = 0 < fair <= values.numel()
        passing = [kernels.count_at_least(values, rung) if threshold > 0.0 else 0 for rung in ok_topk.ladder(threshold)]
        bound = ok_topk.smallest_magnitude(kernels.top_magnitudes(values, fair)[1]) if enough else 0.0
        return Tally(values.numel(), tuple(passing), bound)

    def decide(self, tallies: Sequence[Tally]) -> bool:
        """Set counts and threshold of this step; return False if the threshold must be computed first."""
        if sum(tally.held for tally in tallies) <= self.k:
            self.counts = [tally.held for tally in tallies]
            return True
        totals = [sum(of_owners) for of_owners in zip(*(tally.passing for tally in tallies), strict=True)]
        threshold, rung = self.state["global_threshold"], _rung(totals, self.k)
        if threshold == 0.0 or rung is None:
            return False
        self.counts = [tally.passing[rung] for tally in tallies]
        self.threshold = ok_topk.ladder(threshold)[rung]
        self.state["global_threshold"] = ok_topk.nudged(
            self.threshold, totals[rung], self.k, _GLOBAL_STEP, _GLOBAL_TOLERANCE
        )
        return True

    def candidates(self, bound: float) -> Tensor:
        """Return magnitudes of this region that can be among the k largest of all, which are at least ``bound``."""
        values = self.reduced[1]
        return kernels.top_magnitudes(values, min(self.k, kernels.count_at_least(values, bound)))[1].abs()

    def decide_exactly(self, candidates: Sequence[Tensor]) -> None:
        """Keep the k largest of all candidates; of equal ones the first, in the order of owners and ids."""
        together = torch.cat(list(candidates))
        positions, chosen = kernels.top_magnitudes(together, min(self.k, together.numel()))
        ends = list(accumulate((piece.numel() for piece in candidates), initial=0))
        cuts = torch.searchsorted(positions, torch.tensor(ends)).tolist()
        self.counts = [stop - start for start, stop in pairwise(cuts)]
        self.state["global_threshold"] = ok_topk.smallest_magnitude(chosen)

    def keep(self, rank: int) -> None:
        ids, values = self.reduced
        if self.threshold > 0.0:
            positions, values = kernels.select_at_least(values, self.threshold)
        else:
            positions, values = kernels.top_magnitudes(values, min(self.counts[rank], values.numel()))
        self.kept = ids[positions], values


def _rung(totals: Sequence[int], k: int) -> int | None:
    """Return the rung to use, by the totals that reach each: the reused threshold's, or the nearest to k, or None."""
    reused = ok_topk.RUNGS.index(1.0)
    if ok_topk.is_reusable(totals[reused], k):
        return reused
    nearest = min(range(len(totals)), key=lambda rung: abs(totals[rung] - k))
    return nearest if ok_topk.is_reusable(totals[nearest], k) else None


def mean_of(selections: Sequence[Selection]) -> Selection:
    """Return the mean of all ranks' pairs of a region, added in rank order, without elements that cancel out."""
    ids, total = kernels.sum_rows([(ids, values.view(-1, 1)) for ids, values in selections])
    values = total.view(-1).div_(len(selections))
    present = values != 0
    return (ids, values) if bool(present.all()) else (ids[present], values[present])


_WORTH_A_ROUND = 1024
"""Least number of pairs that balancing must save, 6 to 8 kB: one more round costs at least half a millisecond, in which
a 100 Mbit/s link carries them."""


@dataclass(frozen=True)
class OkTopkReduction(OwnReduction):
    """The O(k) sparse all-reduce of Li and Hoefler (PPoPP'22, section 3). Each parameter has regions and thresholds.

    Rounds of messages: selected pairs to the owners of regions; counts of passing sums; if they show that one owner has
    too many, shares of them to the others; passing sums to all. Every few steps also: boundaries of regions, before
    all else, and the magnitudes from which the global threshold follows, after the counts.
    """

    name = OK_TOPK
    method = OkTopk
    title = "Ok-Topk"

    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        with stopwatch.phase(Phase.EXCHANGE):
            return _Run(tasks, peers, stopwatch).results()


class _Run:
    def __init__(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> None:
        self._peers, self._stopwatch = peers, stopwatch
        self._rank, self._world_size = peers.rank, peers.world_size
        self._ones = [OkTopkTask(task) for task in tasks]

    def results(self) -> list[Result]:
        self._told(Phase.COMPRESS, lambda: [one.select() for one in self._ones])
        self._repartition()
        tallies = self._reduce()
        undecided = self._told(Phase.DECOMPRESS, lambda: self._decide(tallies))
        if undecided:
            self._find_thresholds(undecided)
        arrived, balanced = self._balance()
        return self._gather(arrived, balanced)

    def _repartition(self) -> None:
        stale = [one for one in self._ones if one.state["bounds"].numel() != self._world_size + 1]
        if not stale:
            return

        def prepare() -> Tensor:
            result = [ok_topk.boundaries(one.selected[0], one.parameter.numel, self._world_size) for one in stale]
            return torch.cat(result).view(torch.uint8)

        sizes = [one.parameter.numel for one in stale]
        arrived = self._peers.all_gather(prepare, 8 * len(stale) * (self._world_size - 1))
        parse = partial(ok_topk.parse_boundaries, sizes=sizes, world_size=self._world_size)
        result = self._told(Phase.DECOMPRESS, lambda: [message.read(parse) for message in arrived])
        for one, bounds in zip(stale, ok_topk.mean_bounds(result, sizes), strict=True):
            one.state["bounds"] = bounds

    def _reduce(self) -> Sequence[Arrived]:
        """Send selected pairs to the owners of their regions, and return the tallies of all owners."""
        plans = [one.plan(self._rank) for one in self._ones]
        arrived = self._peers.all_to_all(self._push, stacked.max_bytes(plans))

        def prepare() -> Tensor:
            with self._stopwatch.phase(Phase.DECOMPRESS):
                result = messages.read(arrived, stacked.unpack, [plans] * len(arrived))
                for index, one in enumerate(self._ones):
                    one.reduced = mean_of([of_rank[index] for of_rank in result])
                return torch.cat([one.tally(self._world_size).packed() for one in self._ones])

        return self._peers.all_gather(prepare, ok_topk.tally_bytes(len(self._ones)))

    def _push(self) -> list[Tensor]:
        with self._stopwatch.phase(Phase.COMPRESS):
            pushed: list[list[Selection]] = [[] for _ in range(self._world_size)]
            for one in self._ones:
                ids, values = one.selected
                cuts = torch.searchsorted(ids, one.state["bounds"]).tolist()
                for owner, (start, stop) in enumerate(pairwise(cuts)):
                    pushed[owner].append(one.sent((ids[start:stop] - one.start(owner), values[start:stop])))
            return [
                stacked.pack(selections, [one.plan(owner) for one in self._ones])
                for owner, selections in enumerate(pushed)
            ]

    def _decide(self, arrived: Sequence[Arrived]) -> list[tuple[OkTopkTask, float]]:
        """Decide what each owner keeps; return tasks without a threshold yet, each with a lower bound of it."""
        tallies = []
        for owner, message in enumerate(arrived):
            sizes = [one.plan(owner)[1].numel for one in self._ones]
            tallies.append(message.read(partial(ok_topk.parse_tallies, sizes=sizes)))
        undecided = []
        for one, of_owners in zip(self._ones, zip(*tallies, strict=True), strict=True):
            if one.decide(of_owners):
                one.keep(self._rank)
            else:
                undecided.append((one, min(tally.bound for tally in of_owners)))
        return undecided

    def _find_thresholds(self, undecided: Sequence[tuple[OkTopkTask, float]]) -> None:
        def specs(owner: int) -> list[packing.PartSpec]:
            return [
                packing.PartSpec(one.parameter.working_dtype, None, min(one.k, one.plan(owner)[1].numel))
                for one, _ in undecided
            ]

        def prepare() -> Tensor:
            with self._stopwatch.phase(Phase.COMPRESS):
                return packing.pack([one.candidates(bound) for one, bound in undecided])

        most = packing.message_bytes([one.k * one.parameter.working_dtype.itemsize for one, _ in undecided])
        arrived = self._peers.all_gather(prepare, most)

        def decide() -> None:
            result = [
                message.read(partial(packing.unpack, specs=specs(owner))) for owner, message in enumerate(arrived)
            ]
            for (one, _), candidates in zip(undecided, zip(*result, strict=True), strict=True):
                one.decide_exactly(candidates)
                one.keep(self._rank)

        self._told(Phase.DECOMPRESS, decide)

    def _balance(self) -> tuple[Sequence[Arrived], list[OkTopkTask]]:
        """Send shares of kept sums to all ranks, for tasks in which one owner has far too many."""
        saved = [ok_topk.saved_by_balance(one.counts) for one in self._ones]
        if sum(saved) < _WORTH_A_ROUND:
            return [], []
        balanced = [one for one, pairs in zip(self._ones, saved, strict=True) if pairs]
        most = max(stacked.max_bytes([one.plan(owner) for one in balanced]) for owner in range(self._world_size))

        def prepare() -> list[Tensor]:
            with self._stopwatch.phase(Phase.COMPRESS):
                dealt: list[list[Selection]] = [[] for _ in range(self._world_size)]
                for one in balanced:
                    ids, values = one.kept
                    for rank, (start, stop) in enumerate(ok_topk.shares(one.counts, self._rank)):
                        dealt[rank].append(one.sent((ids[start:stop], values[start:stop])))
                plans = [one.plan(self._rank) for one in balanced]
                return [stacked.pack(selections, plans) for selections in dealt]

        return self._peers.all_to_all(prepare, most), balanced

    def _gather(self, arrived: Sequence[Arrived], balanced: Sequence[OkTopkTask]) -> list[Result]:
        """Gather passing sums on all ranks, from their owners or from the ranks with shares of them."""

        def plan(one: OkTopkTask, owner: int) -> Plan:
            return (one.core, one.parameter) if one in balanced else one.plan(owner)

        def prepare() -> Tensor:
            with self._stopwatch.phase(Phase.COMPRESS):
                self._take_shares(arrived, balanced)
                return stacked.pack([one.sent(one.share or one.kept) for one in self._ones], plans[self._rank])

        plans = [[plan(one, owner) for one in self._ones] for owner in range(self._world_size)]
        gathered = self._peers.all_gather(prepare, max(map(stacked.max_bytes, plans)))
        with self._stopwatch.phase(Phase.DECOMPRESS):
            result = messages.read(gathered, stacked.unpack, plans)
            return [
                _result(one, [of_owner[index] for of_owner in result], one in balanced)
                for index, one in enumerate(self._ones)
            ]

    def _take_shares(self, arrived: Sequence[Arrived], balanced: Sequence[OkTopkTask]) -> None:
        plans = ([one.plan(owner) for one in balanced] for owner in range(self._world_size))
        result = messages.read(arrived, stacked.unpack, plans)
        for index, one in enumerate(balanced):
            parts = [of_owner[index] for of_owner in result]
            ids = torch.cat([ids + one.start(owner) for owner, (ids, _) in enumerate(parts)])
            one.share = ids, torch.cat([values for _, values in parts])

    def _told(self, phase: Phase, work: Callable[[], T]) -> T:
        """Return the result of ``work``. If it raises, peers receive the error in place of the next message."""
        try:
            with self._stopwatch.phase(phase):
                return work()
        except Exception as error:
            failure = error

        self._peers.all_gather(raising(failure), 0)
        raise AssertionError("an exchange of messages raises what its preparation raises")


def _result(one: OkTopkTask, selections: Sequence[Selection], is_balanced: bool) -> Result:
    task, parameter = one.task, one.parameter
    flat = torch.zeros(parameter.numel, dtype=parameter.working_dtype)
    for owner, (ids, values) in enumerate(selections):
        flat[ids if is_balanced else ids + one.start(owner)] = values
    mean = flat.view(parameter.shape)
    sent = one.selected[0].numel() / max(1, parameter.numel)
    task.finish(mean)
    return Result(mean, one.sent_bytes, sent)
