"""Measurement of recovery: a training is killed repeatedly, at last with a host, and compared with an undisturbed
one."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch.distributed as dist

from thinwire.lab.bench.checkpoint.hosts import HolderHosts
from thinwire.lab.bench.checkpoint.methods import NONE, Destination
from thinwire.lab.bench.checkpoint.rivals import make
from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark
from thinwire.lab.bench.checkpoint.work import Trainer, TrainingWork
from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.digests import digest_of
from thinwire.lab.testbed.launch import RanksFailed, run_ranks
from thinwire.lab.testbed.rank import RankContext

STEPS_BETWEEN_KILLS = 6


@dataclass(frozen=True)
class RankStarted:
    """Message that a rank's process has started."""

    pid: int


@dataclass(frozen=True)
class RankRestored:
    """Message that a rank restored the state after ``step`` steps (0: fresh start), and the seconds that it needed."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Stepped:
    """Message that a rank has made its optimizer step; ``at`` by `time.perf_counter`, common to all processes."""

    step: int
    loss: float
    at: float


def train(
    context: RankContext, work: TrainingWork, method: str, destination: Destination, steps: int, data: Data | None
) -> str:
    """Train on one rank up to ``steps``, unless it is killed before, and return the digest of its parameters.

    It reports its progress by ``context.send``.
    """
    context.send(RankStarted(os.getpid()))
    trainer = Trainer(work, data, context.rank, context.world_size)
    dist.barrier()
    started = time.perf_counter()
    saving = make(method, trainer, destination, context.rank)
    first = saving.restore() or 0
    context.send(RankRestored(first, time.perf_counter() - started))
    for step in range(first + 1, steps + 1):
        loss = trainer.step()
        context.send(Stepped(step, loss.item(), time.perf_counter()))
        saving.step(step)
    saving.close()
    return digest_of(trainer.model.parameters())


@dataclass
class Watcher:
    """Receiver of the messages of a run's ranks, which kills them all at the planned moment.

    Args:
        kill_at: number of steps on all ranks before the kill; 0 for never.
        delay_seconds: delay after that, so that death comes at any point of an iteration.
        also: function called together with the kill, to lose more than the ranks.
    """

    world_size: int
    kill_at: int = 0
    delay_seconds: float = 0.0
    also: Callable[[], None] | None = None
    pids: list[int] = field(default_factory=list)
    restored: list[RankRestored] = field(default_factory=list)
    steps: dict[int, list[Stepped]] = field(default_factory=dict)
    killed_at: float | None = None

    def __call__(self, rank: int, message: object) -> None:
        if isinstance(message, RankStarted):
            self.pids.append(message.pid)
        elif isinstance(message, RankRestored):
            self.restored.append(message)
        elif isinstance(message, Stepped):
            self.steps.setdefault(rank, []).append(message)
            if self.kill_at and self.killed_at is None and self.reached() >= self.kill_at:
                time.sleep(self.delay_seconds)
                self._kill()

    def reached(self) -> int:
        """Return the optimizer steps that all ranks have made."""
        if len(self.steps) < self.world_size:
            return 0
        return min(steps[-1].step for steps in self.steps.values())

    def _kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.killed_at = time.perf_counter()
        if self.also is not None:
            self.also()

    def progress(self, iteration_seconds: float) -> float:
        """Return the iterations done when the ranks were killed, including the fraction of the running one."""
        assert self.killed_at is not None
        reached = self.reached()
        begun = max(next(each.at for each in steps if each.step == reached) for steps in self.steps.values())
        return reached + min(1.0, max(0.0, self.killed_at - begun) / iteration_seconds)

    def losses(self) -> dict[tuple[int, int], str]:
        """Return the exact loss of each rank and step."""
        return {(rank, each.step): each.loss.hex() for rank, steps in self.steps.items() for each in steps}


@dataclass(frozen=True)
class Recovery:
    """Results of a method's recovery.

    Args:
        processes_seconds: for each kill of all trainers: from the moment when all processes had started until the
            slowest rank could train again.
        host_seconds: the same after the last host was lost too, with its holder's memory.
        iterations_lost: for each kill of all trainers: iterations done, less the step that was restored.
        fetched_bytes_per_second: speed of fetching the lost host's state from its peer; None if it was not fetched.
        bitwise_equal: all losses of all ranks, and the parameters at the end, equal the undisturbed training's.
    """

    processes_seconds: tuple[float, ...]
    host_seconds: float
    iterations_lost: tuple[float, ...]
    fetched_bytes_per_second: float | None
    bitwise_equal: bool


Undisturbed = tuple[dict[tuple[int, int], str], tuple[str, ...]]
"""Losses by rank and step of a training without any kill, and the digests of its ranks."""


@dataclass(frozen=True)
class Campaign:
    """Series of kills in one benchmark: ``kills`` times all trainers, then all trainers and a host.

    Args:
        iteration_seconds: approximate length of an iteration; trainers die at any point of it.
        on_kill: function called with (method, kills so far).
    """

    benchmark: CheckpointBenchmark
    data: Data | None
    hosts: HolderHosts
    destination: Destination
    iteration_seconds: float
    on_kill: Callable[[str, int], None]

    @property
    def steps(self) -> int:
        return STEPS_BETWEEN_KILLS * (self.benchmark.kills + 2)

    def undisturbed(self) -> Undisturbed:
        """Run the training without any kill. Raises RanksFailed."""
        watcher = Watcher(self.hosts.hosts)
        digests = self._run(NONE, watcher)
        return watcher.losses(), digests

    def recover(self, method: str, undisturbed: Undisturbed) -> Recovery:
        """Run a training by one method, in ``kills + 2`` runs. Raises RanksFailed if a rank fails by itself."""
        draw, lost_host = random.Random(0), self.hosts.hosts - 1
        watchers: list[Watcher] = []
        digests: tuple[str, ...] = ()
        for run in range(self.benchmark.kills + 2):
            watcher = Watcher(self.hosts.hosts)
            if run <= self.benchmark.kills:
                watcher.kill_at = STEPS_BETWEEN_KILLS * (run + 1)
                watcher.delay_seconds = draw.random() * self.iteration_seconds
            if run == self.benchmark.kills:
                watcher.also = lambda: self.hosts.lose(lost_host)
            digests = self._run(method, watcher)
            if run == self.benchmark.kills:
                self.hosts.start(lost_host)
            watchers.append(watcher)
            self.on_kill(method, run + 1)
        status = self.hosts.status(lost_host)
        rate = status["bytes_fetched"] / status["seconds_fetched"] if status["seconds_fetched"] else None
        return self._judge(watchers, digests, undisturbed, rate)

    def _run(self, method: str, watcher: Watcher) -> tuple[str, ...]:
        """Digests of the ranks that completed."""
        outcomes = run_ranks(
            train,
            self.benchmark.work,
            method,
            self.destination,
            self.steps,
            self.data,
            world_size=self.hosts.hosts,
            network=self.hosts.network,
            timeout_seconds=self.benchmark.timeout_seconds,
            check=not watcher.kill_at,
            on_message=watcher,
        )
        failed = [outcome for outcome in outcomes if outcome.value is None and outcome.exit_code != -signal.SIGKILL]
        if failed or (watcher.kill_at and watcher.killed_at is None):
            first = (failed or outcomes)[0]
            raise RanksFailed(f"rank {first.rank}, {method}, before it was killed: {first.error}", outcomes)
        return tuple(str(outcome.value) for outcome in outcomes)

    def _judge(
        self, watchers: list[Watcher], digests: tuple[str, ...], undisturbed: Undisturbed, rate: float | None
    ) -> Recovery:
        seconds = [max(each.seconds for each in watcher.restored) for watcher in watchers]
        lost = [
            killed.progress(self.iteration_seconds) - restored.restored[0].step
            for killed, restored in pairwise(watchers[:-1])
        ]
        losses, ends = undisturbed
        equal = all(losses[key] == loss for watcher in watchers for key, loss in watcher.losses().items())
        return Recovery(
            processes_seconds=tuple(seconds[1:-1]),
            host_seconds=seconds[-1],
            iterations_lost=tuple(lost),
            fetched_bytes_per_second=rate,
            bitwise_equal=equal and digests == ends,
        )
