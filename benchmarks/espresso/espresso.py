"""Espresso: the choice of gradients to compress, of methods, and of devices (Wang et al., EuroSys'23).

Algorithm 1 starts from no compression. A tensor that is communicated before a bubble is never worth compressing, and
bubbles are looked for again after every decision. The others are decided in order of size, the largest first; of equal
ones the one whose gradient is ready last first, which the paper calls closest to the output layer. Each gets the option
of the tree with which the whole timeline is shortest, all others as they are. Algorithm 2 then moves compression to the
host's processors where that helps: `espresso.offload`.

Last comes an addition of ours: another search, from the prices of a linear programme, with an option's encoding and
decoding on either device. It replaces the plan where it finds a faster one: `espresso.refine`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from espresso.engine import Engine, events, last_bubbles
from espresso.job import EspressoJob
from espresso.offload import LEAST_GAIN, Offload, offload
from espresso.options import CPU, DENSE, GPU, Option, options, with_processors
from espresso.refine import ENOUGH, Refinement, refine
from espresso.tasks import PricedOption, Pricer
from espresso.upper_bound import upper_bound
from thinwire.observe.trace import Event


@dataclass(frozen=True)
class Strategy:
    """Decision of Espresso, and its gain.

    Attributes:
        job: the planned job.
        choices: option of each tensor, in backward order.
        iteration_seconds: F(S): from the start of backward until the last tensor is there.
        published_seconds: F(S) after Algorithms 1 and 2, before it was refined.
        gpu_seconds: F(S) after Algorithm 1, before anything was offloaded.
        dense_seconds: F(S) without compression.
        upper_bound_seconds: no plan beats this: see `espresso.upper_bound`.
        offloaded: result of Algorithm 2; None if it was not run.
        refined: result of the addition, which is the strategy if it is shorter; None if it was not run.
        trials: timelines that Algorithm 1 evaluated.
        selection_seconds, offload_seconds, refine_seconds: processor time of the two algorithms and the addition.
    """

    job: EspressoJob
    choices: tuple[Option, ...]
    iteration_seconds: float
    published_seconds: float
    gpu_seconds: float
    dense_seconds: float
    upper_bound_seconds: float
    offloaded: Offload | None
    refined: Refinement | None
    trials: int
    selection_seconds: float = field(compare=False)
    offload_seconds: float = field(compare=False)
    refine_seconds: float = field(compare=False)

    @property
    def compressed(self) -> tuple[int, ...]:
        """Indices of the compressed tensors."""
        return tuple(tensor for tensor, option in enumerate(self.choices) if option.compressions)

    @property
    def from_upper_bound(self) -> float:
        """Loss of throughput against the upper bound, forward included: 0.1 is 10 % (the paper's figure 14)."""
        step = self.job.step_seconds
        return 1 - step(self.upper_bound_seconds) / step(self.iteration_seconds)

    @property
    def speedup(self) -> float:
        """Speed-up of a whole step, over no compression."""
        return self.job.step_seconds(self.dense_seconds) / self.job.step_seconds(self.iteration_seconds)

    def events(self) -> tuple[Event, ...]:
        """Return the timeline, for `thinwire.observe.trace.chrome_trace`."""
        pricer = Pricer(self.job.size_bytes, self.job.cluster, self.job.compression)
        works = [pricer.works(option, size) for option, size in zip(self.choices, self.job.size_bytes, strict=True)]
        chains = [tuple((work.resource, work.seconds) for work in tensor) for tensor in works]
        names = [self.job.name(tensor) for tensor in range(self.job.num_tensors)]
        served = Engine(self.job.backward_seconds, chains).served
        return events(served, names, [[work.label for work in tensor] for tensor in works])

    def explain(self) -> str:
        """Return the decision in words, a line for each option that is used."""
        job, cluster = self.job, self.job.cluster
        step, dense, best = (
            1e3 * job.step_seconds(seconds)
            for seconds in (self.iteration_seconds, self.dense_seconds, self.upper_bound_seconds)
        )
        lines = [
            f"{job.num_tensors} tensors, {sum(job.size_bytes) / 2**20:.1f} MiB, {job.compression.name}, "
            f"{cluster.hosts} hosts x {cluster.ranks_per_host} ranks{f', {cluster.name}' if cluster.name else ''}",
            f"step {step:.1f} ms, uncompressed {dense:.1f} ms ({self.speedup:.2f}x), "
            f"{100 * self.from_upper_bound:.1f} % from the upper bound of {best:.1f} ms",
        ]
        uses = Counter(self.choices)
        for option, count in sorted(uses.items(), key=lambda use: (not use[0].compressions, -self._bytes(use[0]))):
            lines.append(f"{count:4d} tensors, {self._bytes(option) / 2**20:8.1f} MiB: {option}")
        return "\n".join(lines)

    def _bytes(self, option: Option) -> float:
        return sum(size for size, choice in zip(self.job.size_bytes, self.choices, strict=True) if choice == option)


def espresso(
    job: EspressoJob,
    tree: Sequence[Option] | None = None,
    offloading: bool = True,
    rounds: int = 1,
    exhaustive: bool = False,
    bound: bool = True,
    refining: bool = True,
) -> Strategy:
    """Return the best strategy that Algorithms 1 and 2 find, refined.

    Args:
        tree: options to choose from, as from `espresso.options.options`. Those of the accelerator by
        default, all
            174; Algorithm 2 adds the processors.
        offloading: whether Algorithm 2 is run.
        rounds: 1 as published. More decide every tensor again, compressed or not, until nothing changes or that many
            rounds are over.
        exhaustive: try every option of the tree. Otherwise those are left out that need no less of any resource than
            another: of 174 about a dozen remain, and the plans lose at most 3 % on the published models.
        bound: whether to compute the upper bound; otherwise it is 0.
        refining: whether to search for a faster strategy than that of Algorithms 1 and 2, for up to a few seconds.
            False: as published.

    Raises:
        ValueError: no options, or less than one round.

    Example:
        >>> from published.models import MODELS
        >>> from espresso.testbeds import nvlink_100g
        >>> strategy = espresso(job_of(MODELS["lstm"](), nvlink_100g()))
        >>> strategy.iteration_seconds < strategy.dense_seconds
        True
    """
    tree = options(devices=(GPU,)) if tree is None else tuple(tree)
    if not tree or rounds < 1:
        raise ValueError(f"{len(tree)} options and {rounds} rounds: Espresso needs at least one of each")
    start = time.thread_time()
    search = _Search(job, tree, exhaustive)
    for index in range(rounds):
        if not search.decide_all(again=index > 0):
            break
    gpu_seconds, selected = search.engine.seconds, time.thread_time()
    moved = search.offload() if offloading else None
    published_seconds, done = search.engine.seconds, time.thread_time()
    refined = refine(job, _refinable(tree, offloading), published_seconds) if refining else None
    ended = time.thread_time()
    choices, seconds = tuple(choice.option for choice in search.choices), published_seconds
    if refined and refined.seconds < published_seconds * (1 - ENOUGH):
        choices, seconds = refined.choices, refined.seconds
    return Strategy(
        job=job,
        choices=choices,
        iteration_seconds=seconds,
        published_seconds=published_seconds,
        gpu_seconds=gpu_seconds,
        dense_seconds=search.dense_seconds,
        upper_bound_seconds=upper_bound(job, (DENSE, *tree)) if bound else 0.0,
        offloaded=moved,
        refined=refined,
        trials=search.trials,
        selection_seconds=selected - start,
        offload_seconds=done - selected,
        refine_seconds=ended - done,
    )


def _refinable(tree: Sequence[Option], offloading: bool) -> tuple[Option, ...]:
    """No compression, the tree, and its options with any encoding and decoding moved to the processors."""
    return tuple(dict.fromkeys((DENSE, *(with_processors(tree) if offloading else tree))))


class _Search:
    """The strategy so far, and its timeline."""

    def __init__(self, job: EspressoJob, tree: Sequence[Option], exhaustive: bool) -> None:
        self._sizes = job.size_bytes
        self._pricer = Pricer(job.size_bytes, job.cluster, job.compression)
        self._menu = self._pricer.menus(tree, exhaustive)
        self._dense = {size: self._pricer.choice(DENSE, size) for size in self._pricer.sizes}
        self._order = sorted(range(job.num_tensors), key=lambda tensor: (-self._sizes[tensor], -tensor))
        self.choices: list[PricedOption] = [self._dense[size] for size in self._sizes]
        self.engine = Engine(job.backward_seconds, [choice.chain for choice in self.choices])
        self.dense_seconds = self.engine.seconds
        self.trials = 0

    def decide_all(self, again: bool) -> bool:
        """One pass of Algorithm 1; whether it changed anything."""
        changed, exposed = False, self._exposed()
        for tensor in self._order:
            if tensor not in exposed and not self.choices[tensor].option.compressions:
                continue
            best = self._best(tensor, again)
            if best is not None:
                self.choices[tensor] = best
                self.engine.change({tensor: best.chain})
                changed, exposed = True, self._exposed()
        return changed

    def _exposed(self) -> set[int]:
        """Tensors with a communication that is not before the last bubble of its link."""
        bubbles = last_bubbles(self.engine.served)
        return {
            task.tensor for task in self.engine.served if task.end_seconds > bubbles.get(task.resource, float("inf"))
        }

    def _best(self, tensor: int, again: bool) -> PricedOption | None:
        """The option with the shortest timeline; of equal ones the current one, else that with the least work."""
        size, best, limit = self._sizes[tensor], None, self.engine.seconds * (1 - LEAST_GAIN)
        for choice in (*((self._dense[size],) if again else ()), *self._menu(size)):
            if choice.chain != self.choices[tensor].chain:
                self.trials += 1
                seconds = self.engine.trial({tensor: choice.chain}, limit)
                if seconds < limit:
                    best, limit = choice, seconds * (1 - LEAST_GAIN)
        return best

    def offload(self) -> Offload:
        """Algorithm 2."""
        groups: dict[tuple[float, Option], list[int]] = {}
        moved: dict[int, PricedOption] = {}
        for tensor, (size, choice) in enumerate(zip(self._sizes, self.choices, strict=True)):
            if choice.option.devices - {CPU}:
                groups.setdefault((size, choice.option), []).append(tensor)
                moved[tensor] = self._pricer.choice(choice.option.on(CPU), size)
        found = offload(self.engine, list(groups.values()), {tensor: choice.chain for tensor, choice in moved.items()})
        self.engine.change({tensor: moved[tensor].chain for tensor in found.tensors})
        for tensor in found.tensors:
            self.choices[tensor] = moved[tensor]
        return found
