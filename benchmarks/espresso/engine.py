"""F(S) of Espresso: the timeline of one iteration on four resources (EuroSys'23, section 4.3).

Resources are one accelerator's compute stream, its host's processors, its link inside the host and the host's link.
Each serves one task at a time, in the order in which tasks become ready; of tasks that are ready at once the earlier
tensor's first. The backward passes of the tensors follow one another on the compute stream, where encoding and decoding
take their turn between them. When a tensor's backward pass is done its `Chain` starts, task after task, so that the
phases of different tensors overlap. Ranks are alike, so one of them stands for all.

A few hundred tensors cost a millisecond. An `Engine` is faster still for the queries of a search: the same strategy
except for a few tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush, heapreplace
from operator import add, sub
from typing import NamedTuple

from thinwire.observe.trace import Event

COMPUTE, CPU, INTRA, INTER = range(4)
TRACKS = ("compute", "cpu", "intra", "inter")
LINKS = (INTRA, INTER)

Chain = tuple[tuple[int, float], ...]
"""Pairs (resource, seconds) of each task of a tensor after its backward pass."""

BACKWARD = -1
"""Stage of a backward pass."""

_NEVER = float("inf")


class Served(NamedTuple):
    """One task in the timeline; ``stage`` is its index in the tensor's chain, or `BACKWARD`."""

    tensor: int
    stage: int
    resource: int
    ready_seconds: float
    start_seconds: float
    end_seconds: float


class Moment(NamedTuple):
    """The state just before a backward pass has its turn: nothing in it comes from later tensors.

    Attributes:
        waiting: a heap of (ready, tensor, stage): at most one task of each tensor.
        free: for each resource, the time from which it is free.
        spent: for each resource, seconds of the work served so far.
        end_seconds: the latest end so far.
        served: number of tasks served so far.
    """

    waiting: list[tuple[float, int, int]]
    free: list[float]
    spent: list[float]
    end_seconds: float
    served: int


def iteration_seconds(backward_seconds: Sequence[float], chains: Sequence[Chain]) -> float:
    """Return F(S): the seconds from the start of backward until the last task is done.

    Example:
        >>> iteration_seconds([1.0, 1.0], [((INTER, 3.0),), ((INTER, 3.0),)])
        7.0
    """
    return Engine(backward_seconds, chains).seconds


class Engine:
    """The timeline of a strategy, and F(S) of others that differ from it in a few tensors.

    Args:
        backward_seconds: backward time of each tensor, in backward order.
        chains: chain of each tensor.

    Attributes:
        chains: chains of the current strategy.
        seconds: its F(S).
        served: its tasks, in the order in which they became ready.
    """

    def __init__(self, backward_seconds: Sequence[float], chains: Sequence[Chain]) -> None:
        self._backward = tuple(backward_seconds)
        self.chains = list(chains)
        self.served: list[Served] = []
        self._moments: list[Moment] = []
        self._work = _work(self.chains)
        self._work[COMPUTE] += sum(self._backward)
        idle = [0.0] * len(TRACKS)
        first = Moment([(0.0, 0, BACKWARD)] if self._backward else [], idle, idle, 0.0, 0)
        self.seconds = self._serve(first, self._work, _NEVER, record=True)

    def trial(self, changes: Mapping[int, Chain], limit: float = _NEVER) -> float:
        """Return F(S) with these chains instead of the tensors' own; the strategy stays as it is.

        Args:
            limit: once F(S) is known to be above, the search does not need it: some value above is returned.
        """
        if not changes:
            return self.seconds
        own = {tensor: self.chains[tensor] for tensor in changes}
        work = self._put(changes)
        seconds = self._serve(self._moments[min(changes)], work, limit, changed=changes)
        self._put(own)
        return seconds

    def change(self, changes: Mapping[int, Chain]) -> None:
        """Replace chains of the strategy."""
        if changes:
            self._work = self._put(changes)
            moment = self._moments[min(changes)]
            del self.served[moment.served :]
            self.seconds = self._serve(moment, self._work, _NEVER, record=True)

    def _put(self, changes: Mapping[int, Chain]) -> list[float]:
        """Change the chains; the work of each resource with them."""
        less, more = _work([self.chains[tensor] for tensor in changes]), _work(changes.values())
        for tensor, chain in changes.items():
            self.chains[tensor] = chain
        return [seconds - old + new for seconds, old, new in zip(self._work, less, more, strict=True)]

    def _serve(
        self,
        moment: Moment,
        work: Sequence[float],
        limit: float,
        record: bool = False,
        changed: Mapping[int, Chain] | None = None,
    ) -> float:
        """Serve the waiting tasks one after another until none is left, or F(S) is known to exceed ``limit``.

        It is one long loop, because every search spends its time here: 0.5 us a task.
        """
        waiting, free, end = moment.waiting.copy(), moment.free.copy(), moment.end_seconds
        left = list(map(sub, work, moment.spent))
        backward, chains, moments, served = self._backward, self.chains, self._moments, self.served
        last, count = max(changed) if changed else -1, len(backward)
        if (least := max(map(add, free, left))) > limit:
            return least
        while waiting:
            ready, tensor, stage = waiting[0]
            if stage < 0:
                if record:
                    del moments[tensor:]
                    moments.append(Moment(waiting.copy(), free.copy(), list(map(sub, work, left)), end, len(served)))
                elif tensor > last and self._as_before(tensor, waiting, free, changed):
                    return max(end, self.seconds)
                resource, seconds, stages = COMPUTE, backward[tensor], len(chains[tensor])
            else:
                chain = chains[tensor]
                resource, seconds = chain[stage]
                stages = len(chain)
            start = free[resource]
            if ready > start:
                start = ready
            free[resource] = done = start + seconds
            left[resource] = rest = left[resource] - seconds
            if done + rest > limit:
                return done + rest
            if done > end:
                end = done
            if record:
                served.append(Served(tensor, stage, resource, ready, start, done))
            stage += 1
            if stage < stages:
                heapreplace(waiting, (done, tensor, stage))
            else:
                heappop(waiting)
            if not stage and tensor + 1 < count:
                heappush(waiting, (done, tensor + 1, BACKWARD))
        return end

    def _as_before(
        self, tensor: int, waiting: list[tuple[float, int, int]], free: list[float], changed: Mapping[int, Chain] | None
    ) -> bool:
        """Whether everything from here on equals the strategy without the changes, and its end is yet to come."""
        moment = self._moments[tensor]
        return (
            waiting == moment.waiting
            and free == moment.free
            and moment.end_seconds < self.seconds
            and not any(waits in (changed or ()) for _, waits, _ in waiting)
        )


def _work(chains: Iterable[Chain]) -> list[float]:
    total = [0.0] * len(TRACKS)
    for chain in chains:
        for resource, seconds in chain:
            total[resource] += seconds
    return total


def last_bubbles(served: Sequence[Served]) -> dict[int, float]:
    """Return for each link the begin of its last bubble; minus infinity if there is none.

    A bubble is a gap between two communications in which the link waits for computation: the next one's tensor has not
    waited for a link so far. Communication before it is hidden: done sooner, it only widens the gap (Espresso,
    property 1). A gap that other communication causes is none: it may be the possible gain.
    """
    begins = dict.fromkeys(LINKS, -_NEVER)
    busy_until: dict[int, float] = {}
    waited: set[int] = set()
    for task in served:
        if task.resource not in begins:
            continue
        until = busy_until.get(task.resource, _NEVER)
        if task.start_seconds > task.ready_seconds:
            waited.add(task.tensor)
        elif task.start_seconds > until and task.tensor not in waited:
            begins[task.resource] = until
        busy_until[task.resource] = task.end_seconds
    return begins


def events(served: Sequence[Served], names: Sequence[str], labels: Sequence[Sequence[str]]) -> tuple[Event, ...]:
    """Return the timeline for `thinwire.observe.trace.chrome_trace`: a track for each resource.

    Args:
        names: names of the tensors.
        labels: labels of each tensor's tasks, in order of its chain.
    """
    return tuple(
        Event(
            name="backward" if task.stage == BACKWARD else labels[task.tensor][task.stage],
            track=TRACKS[task.resource],
            start_seconds=task.start_seconds,
            seconds=task.end_seconds - task.start_seconds,
            arguments={"tensor": names[task.tensor]},
        )
        for task in sorted(served, key=lambda task: (task.resource, task.start_seconds))
    )
