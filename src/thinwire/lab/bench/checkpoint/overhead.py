"""Measurement of the cost of checkpoints: one training whose steps go through all methods in turn, in blocks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from thinwire.checkpoint.state.encode import flatten
from thinwire.lab.bench.checkpoint.methods import THINWIRE, Call, CheckpointMethod, Destination, InPeers, cpu_seconds
from thinwire.lab.bench.checkpoint.rivals import make
from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark
from thinwire.lab.bench.checkpoint.work import Trainer
from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.testbed.rank import RankContext

WARM_UP_STEPS = 3
SETTLED_STEPS = 20 + 32  # of thinwire, until it has profiled, and knows how often it may make a checkpoint
TRACED_STEPS = 5


@dataclass(frozen=True)
class Block:
    """Consecutive iterations under one method, measured on one rank; times in seconds.

    Args:
        iterations: seconds from the end of one step, its checkpoint included, to the end of the next.
        blocking: the part of each in which training stood still for the method.
        versions: number of checkpoints made, not skipped.
        checkpoint_seconds: seconds from the last call to a safe checkpoint; None if the call itself made it safe.
        cpu_seconds: CPU time of the rank, with that of its holder, until then.
    """

    method: str
    turn: int
    iterations: tuple[float, ...]
    blocking: tuple[float, ...]
    versions: int
    checkpoint_seconds: float | None
    cpu_seconds: float = 0.0


@dataclass
class OverheadRecord:
    """Measurements of one rank. ``gaps``: ``stats`` of the Checkpointer; ``traced``: begin and end of traced steps."""

    state_bytes: int = 0
    blocks: list[Block] = field(default_factory=list)
    gaps: dict[str, float | str] = field(default_factory=dict)
    traced: list[tuple[float, float]] = field(default_factory=list)


def order_of(methods: Sequence[str], turn: int) -> list[str]:
    """Return the methods in the order of a turn: each is first, second, ... equally often.

    Example:
        >>> order_of(["a", "b", "c"], 1)
        ['b', 'c', 'a']
    """
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def measure(
    context: RankContext, benchmark: CheckpointBenchmark, destination: Destination, data: Data | None
) -> OverheadRecord:
    """Measure ``repeat`` blocks of ``steps`` iterations of each method on one rank.

    It sends ("progress", method, turn) after each block, and ("trace", whether it runs).
    """
    trainer = Trainer(benchmark.work, data, context.rank, context.world_size)
    trainer.step()  # the optimizer's state is there from now on
    layout, _ = flatten(trainer.training.capture(0))
    record = OverheadRecord(layout.payload_bytes)
    # The Checkpointer that listens to the lane comes last: a lane has one listener.
    names = sorted(benchmark.methods, key=lambda name: name == THINWIRE)
    methods = {name: make(name, trainer, destination, context.rank) for name in names}
    runner = _Runner(trainer, methods, lambda: cpu_seconds(destination, context.rank))
    for method in benchmark.methods:
        runner.block(method, SETTLED_STEPS if method == THINWIRE else WARM_UP_STEPS)
        context.send(("progress", method, -1))
    for turn in range(benchmark.repeat):
        for method in order_of(benchmark.methods, turn):
            record.blocks.append(runner.block(method, benchmark.steps, turn))
            context.send(("progress", method, turn))
    if THINWIRE in methods:
        checkpointing = methods[THINWIRE]
        assert isinstance(checkpointing, InPeers)
        record.gaps = checkpointing.checkpointer.stats()
        if benchmark.traced and benchmark.link.mbit is not None:
            record.traced = runner.trace(context)
    for method in methods.values():
        method.close()
    return record


class _Runner:
    def __init__(
        self, trainer: Trainer, methods: dict[str, CheckpointMethod], cpu_seconds: Callable[[], float]
    ) -> None:
        self._trainer, self._methods, self._steps, self._cpu_seconds = trainer, methods, 0, cpu_seconds

    def block(self, name: str, steps: int, turn: int = -1) -> Block:
        """A block of ``steps`` iterations after one that is not counted: it sends nothing of a checkpoint before it."""
        method = self._methods[name]
        dist.barrier()
        self._step(method)
        iterations, calls, cpu_seconds = [], [], self._cpu_seconds()
        ended = time.perf_counter()
        for _ in range(steps):
            called, returned, made = self._step(method)
            iterations.append(returned - ended)
            calls.append(Call(returned - called, made))
            ended = returned
        seconds = method.finish()
        cpu_seconds = self._cpu_seconds() - cpu_seconds
        calls = method.account(calls)
        blocking = tuple(call.blocking_seconds for call in calls)
        return Block(name, turn, tuple(iterations), blocking, sum(call.made for call in calls), seconds, cpu_seconds)

    def _step(self, method: CheckpointMethod) -> tuple[float, float, bool]:
        """When the method was called, when it returned, and whether it made a checkpoint."""
        self._trainer.step()
        self._steps += 1
        called = time.perf_counter()
        made = method.step(self._steps)
        return called, time.perf_counter(), made

    def trace(self, context: RankContext) -> list[tuple[float, float]]:
        dist.barrier()
        self._step(self._methods[THINWIRE])
        context.send(("trace", True))
        marks = [self._step(self._methods[THINWIRE])[:2] for _ in range(TRACED_STEPS)]
        context.send(("trace", False))
        self._methods[THINWIRE].finish()
        return marks
