"""Train a script for a short while in one process that simulates all ranks, without a network.

The script is not changed. Of its calls of ``optimizer.step()`` each ``world_size`` in turn are the ranks of one step:
the first ones give their gradients and change nothing, and the last one steps with what the method makes of all of
them, by the compressors, memories and exchanges that train. Schedules go on with every call, so they have the shape of
the whole run.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.compress.assign import Dense, assign
from thinwire.compress.base import Parameter
from thinwire.compress.reductions.base import Result, Stopwatch, Task
from thinwire.gradients.compression import planned
from thinwire.lab.analyze.failure import ScriptError, raised_by_script
from thinwire.lab.analyze.trials import run_on_ranks, silence, torchrun_environment
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.doctor.advice import method
from thinwire.lab.doctor.equal_loss import ShortCurve, ShortRun
from thinwire.lab.harmless import harmless, without_attach
from thinwire.lab.planning.codecs import EchoedMessage, EchoPeers
from thinwire.lab.planning.ready import living
from thinwire.lab.testbed.launch import free_port
from thinwire.lab.testbed.rank import RankContext
from thinwire.rows.formats import ring_all_reduce_bytes

_SEEDS_APART = 1000
MOST_AT_ONCE = 4
"""Largest number of short trainings at once, each of them with a model of its own."""
_MEETING_SECONDS = 60.0


class MeetingPeers(EchoPeers):
    """An implementation of `thinwire.compress.reductions.base.Peers` among threads of one process.

    Args:
        meeting: the barrier of all ranks.
        table: a slot for each rank, shared by all.
    """

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Any]) -> None:
        super().__init__(rank, meeting.parties)
        self.sent_bytes = 0
        self._meeting, self._table = meeting, table

    def all_reduce(self, tensor: Tensor) -> None:
        self.sent_bytes += ring_all_reduce_bytes(tensor.nbytes, self.world_size)
        tensor.copy_(torch.stack(self._swapped(tensor.clone())).sum(0))

    def all_gather(self, prepare: Callable[[], Tensor], max_bytes: int) -> Sequence[EchoedMessage]:
        return self.all_to_all(lambda: [prepare()] * self.world_size, max_bytes)

    def all_to_all(self, prepare: Callable[[], Sequence[Tensor]], max_bytes: int) -> Sequence[EchoedMessage]:
        messages = list(prepare())
        self.sent_bytes += sum(message.numel() for message in messages) - messages[self.rank].numel()
        return [EchoedMessage(row[self.rank]) for row in self._swapped(messages)]

    def _swapped(self, mine: Any) -> list[Any]:
        """Return what all ranks give, in rank order."""
        self._table[self.rank] = mine
        self._meeting.wait()
        everyone = list(self._table)
        self._meeting.wait()
        return everyone


class SimulatedRanks:
    """The ranks that train the parameters of one optimizer, each with its memories.

    Args:
        dense: how gradients travel, as in `thinwire.attach`; "native" for exact sums.
        trained: parameters by name.
        tables: names of the embedding tables among them, whose gradients are summed exactly.

    Attributes:
        held: the gradients that ranks have given for the next step.
        is_averaged: whether the gradients are the means, so that the optimizer steps.
        rates: the script's learning rates meanwhile.
    """

    def __init__(self, dense: Dense, trained: Mapping[str, Tensor], tables: frozenset[str], world_size: int) -> None:
        self.trained, self.held, self.is_averaged = trained, list[dict[str, Tensor]](), False
        self.rates: list[Any] = []
        coded = {name: tensor for name, tensor in trained.items() if name not in tables}
        parameters = [Parameter(name, tuple(tensor.shape), tensor.dtype) for name, tensor in coded.items()]
        self._plans = planned(assign(dense, parameters), parameters, world_size)
        plans, ranks = self._plans.items(), range(world_size)
        self._states = [
            {name: one.reduction.init(one.compressor, one.parameter, rank, world_size) for name, one in plans}
            for rank in ranks
        ]
        meeting, table = threading.Barrier(world_size, timeout=_MEETING_SECONDS), [None] * world_size
        self._peers = [MeetingPeers(rank, meeting, table) for rank in ranks]
        self._threads = ThreadPoolExecutor(world_size)
        self._exact_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that rank 0 has sent, without the rows of sparse gradients."""
        return self._exact_bytes + self._peers[0].sent_bytes

    def hold(self) -> None:
        """Take the gradients of the next rank."""
        present = {name: entry.grad for name, entry in self.trained.items() if entry.grad is not None}
        self.held.append({name: gradient.detach().clone() for name, gradient in present.items()})

    def average(self) -> None:
        """Make the gradients the means over all ranks."""
        means, self.held, self.is_averaged = self.mean(self.held), [], True
        for name, mean in means.items():
            entry = self.trained[name]
            if entry.grad is None or entry.grad.layout != mean.layout:
                entry.grad = mean
            else:
                entry.grad.copy_(mean)  # DDP may have it in a bucket

    def mean(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the means of the gradients that each rank has, by name; a missing gradient counts as zeros."""
        means, coded = {}, []
        for name in dict.fromkeys(name for of_rank in gradients for name in of_rank):
            first, *rest = (of_rank[name] for of_rank in gradients if name in of_rank)
            total = sum(rest, start=first)
            if name in self._plans and not total.is_sparse and bool(total.isfinite().all()):
                coded.append(name)
            else:
                self._exact_bytes += 0 if total.is_sparse else ring_all_reduce_bytes(total.nbytes, len(gradients))
            means[name] = total / len(gradients)
        if coded:
            results, *_ = self._threads.map(partial(self._reduced, coded, gradients), range(len(gradients)))
            means |= {name: one.mean.to(means[name]) for name, one in zip(coded, results, strict=True)}
        return means

    def _reduced(self, names: Sequence[str], gradients: Sequence[Mapping[str, Tensor]], rank: int) -> list[Result]:
        tasks = []
        for name in names:
            plan = self._plans[name]
            given = torch.zeros(plan.parameter.shape, dtype=plan.parameter.working_dtype)
            if name in gradients[rank]:
                given.copy_(gradients[rank][name])
            tasks.append(Task(plan.compressor, plan.parameter, given, self._states[rank][name]))
        return self._plans[names[0]].reduction.run(tasks, self._peers[rank], Stopwatch())


class SimulatedTraining:
    """A watcher of a script in this process, whose calls of ``optimizer.step()`` are ranks in turn.

    Args:
        run: the method, the rate and the seed.
        steps: simulated steps after which the script is ended.

    Attributes:
        on_enough: ends the script.
        losses: mean over ranks of what ``backward`` was called on, for each simulated step.
    """

    def __init__(self, run: ShortRun, world_size: int, steps: int) -> None:
        self.losses: list[float] = []
        self.on_enough: Callable[[], object] = sys.exit
        self._run, self._world_size, self._steps = run, world_size, steps
        self._optimizers: dict[Optimizer, SimulatedRanks] = {}
        self._clips: dict[frozenset[int], Callable[[], object]] = {}
        self._loss: Tensor | float = 0.0
        self._scale = 1.0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(one.sent_bytes for one in self._optimizers.values()) / max(1, len(self.losses))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Simulate ranks until the context ends."""
        seed, backward, clip = torch.manual_seed, torch.autograd.backward, nn.utils.clip_grad_norm_
        scale, shift = torch.amp.GradScaler.scale, _SEEDS_APART * self._run.seed

        def noted(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if grad_tensors is None:
                losses = [tensors] if isinstance(tensors, Tensor) else tensors
                self._loss = self._loss + sum(loss.detach().double() for loss in losses) / self._scale
            backward(tensors, grad_tensors, *args, **kwargs)

        def scaled(scaler: Any, outputs: Any) -> Any:
            self._scale = scaler.get_scale()
            return scale(scaler, outputs)

        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._clips[frozenset(map(id, given))] = partial(clip, given, *args, **kwargs)
            return nn.utils.get_total_norm([entry.grad for entry in given if entry.grad is not None])

        with ExitStack() as undo:
            for owner, name, value in (
                (torch, "manual_seed", lambda number: seed(int(number) + shift)),
                (torch.autograd, "backward", noted),
                (torch.amp.GradScaler, "scale", scaled),
                (nn.utils, "clip_grad_norm_", clipped),
                (DistributedDataParallel, "register_comm_hook", lambda *args: None),
            ):
                undo.enter_context(mock.patch.object(owner, name, value))
            undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
            torch.manual_seed(0)
            random.seed(shift)
            yield

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS evaluates a loss several times a step, as no simulated rank can: leave out --loss")
        closure = kwargs.pop("closure", None) or next(iter(args[1:]), None)
        if closure is not None:
            with torch.enable_grad():
                value = closure()
            args = (args[0], lambda: value)
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = self._stepped_by(optimizer)
        one = self._optimizers[optimizer]
        if not one.is_averaged:
            one.hold()
        if len(one.held) == self._world_size:
            self._average(one)
        if one.is_averaged:
            one.rates = [group.get("lr") for group in optimizer.param_groups]
            self._set_rates(optimizer, [rate and rate * self._run.rate for rate in one.rates])
        else:
            for entry in one.trained.values():
                entry.grad = None  # so that the optimizer leaves it alone
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        one = self._optimizers[optimizer]
        if not one.is_averaged:
            return
        one.is_averaged = False
        self._set_rates(optimizer, one.rates)
        if one is next(iter(self._optimizers.values())):
            self.losses.append(float(self._loss) / self._world_size)
            self._loss = 0.0
            if len(self.losses) >= self._steps:
                self.on_enough()

    @staticmethod
    def _set_rates(optimizer: Optimizer, rates: Sequence[Any]) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _average(self, one: SimulatedRanks) -> None:
        """Average the gradients of an optimizer, and of others that are clipped with them; then clip."""
        ids = set(map(id, one.trained.values()))
        clipped = [clipped for clipped in self._clips if clipped & ids]
        one.average()
        for other in self._optimizers.values():
            is_clipped_too = any(clipped & set(map(id, other.trained.values())) for clipped in clipped)
            if is_clipped_too and len(other.held) == self._world_size - 1:
                other.hold()
                other.average()
        for each in clipped:
            self._clips.pop(each)()

    def _stepped_by(self, optimizer: Optimizer) -> SimulatedRanks:
        """Return the parameters of an optimizer; whose weights are tables is known by the modules of this process."""
        entries = [entry for group in optimizer.param_groups for entry in group["params"]]
        weights = {id(one.weight) for one in living(nn.Embedding, nn.EmbeddingBag)}
        trained = {f"{len(self._optimizers)}.{index}": entry for index, entry in enumerate(entries)}
        tables = frozenset(name for name, entry in trained.items() if id(entry) in weights)
        codec = self._run.codec
        dense = method(codec) if codec else "native"
        return SimulatedRanks(dense, trained, tables, self._world_size)


def train_shortly(
    script: Path,
    arguments: Sequence[str],
    world_size: int,
    steps: int,
    at_once: int,
    on_stage: Callable[[str], object],
    runs: Sequence[ShortRun],
) -> list[ShortCurve]:
    """Run ``SCRIPT ARGUMENTS...`` once for each short training, on each core one, in a process of its own.

    Args:
        at_once: largest number of processes at a time.

    Raises:
        RanksFailed: a process ended, or lasted for ten minutes.
    """
    at_once = min(at_once, os.cpu_count() or 1)
    curves: list[ShortCurve] = []
    began = time.monotonic()
    while len(curves) < len(runs):
        common = str(script), list(arguments), list(runs[len(curves) :][:at_once]), world_size, steps
        curves += run_on_ranks(_train_shortly, *common, world_size=len(common[2]), network=None)
        left = (time.monotonic() - began) / len(curves) * (len(runs) - len(curves))
        on_stage(f"Training shortly: {len(curves)} of {len(runs)} done, about {left:.0f} s left")
        steps = min([steps, *(len(curve.losses) for curve in curves if not curve.failure)])  # not to see its end again
    return curves


def _train_shortly(
    context: RankContext, script: str, arguments: list[str], runs: list[ShortRun], world_size: int, steps: int
) -> ShortCurve:
    """Train as the only rank of a job."""
    alone = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    os.environ.update(torchrun_environment(RankContext(0, 1, 0, 0, context.send)) | alone)
    os.environ["MASTER_PORT"] = str(free_port())
    silence()
    run = runs[context.rank]

    def curve(failure: str = "") -> ShortCurve:
        return ShortCurve(run, tuple(training.losses), training.sent_bytes, failure)

    training = SimulatedTraining(run, world_size, steps)
    training.on_enough = lambda: context.leave(curve)
    try:
        with raised_by_script(script), harmless(), without_attach(), training.watching():
            run_as_main(script, arguments)
    except ScriptError as error:
        return curve(str(error).splitlines()[-1])
    return curve()
