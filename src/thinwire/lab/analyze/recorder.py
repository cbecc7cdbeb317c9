# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.
"""Recorder of the gradients of every DistributedDataParallel model of a process, before they are synchronized."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Protocol
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.lab.analyze.failure import ScriptFailed
from thinwire.lab.analyze.recording import RankRecording, Table, TableSteps
from thinwire.lab.harmless import why_not_measured
from thinwire.lab.planning.ready import nonzero_rows
from thinwire.rows.sparse import Layout

MIN_TABLE_BYTES = 16 * 1024
"""Smallest gradient with a scheme of its own; of smaller ones only the density is kept."""

MAX_DENSITY = 0.5
"""Density above which dense values are sent, so that ids are not kept."""


MOST_BEFORE = 50
"""Steps of optimizers before there is a DDP model after which a script is taken to train without: some train a part of
their model first."""


class Watch(Protocol):
    """Interface of the one communication hook of a DDP model."""

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]: ...
    def hand_over_to(self, state: object, hook: Callable[..., Any]) -> None: ...


class ScriptWatcher:
    """Base of a watcher of a script's models, which ends the script.

    Attributes:
        num_models: number of models seen so far.
        on_enough: function that ends the script when enough of it was seen.
        on_missing: function called with a sentence where an optimizer steps before there is any; it ends the script.
    """

    def __init__(self) -> None:
        self.num_models = 0
        self.on_enough: Callable[[], object] = sys.exit
        self.on_missing: Callable[[str], object] = fail

    def watch(self, model: DistributedDataParallel) -> Watch:
        """Watch a model; called on all ranks for each model that is built."""
        raise NotImplementedError


def fail(sentence: str) -> None:
    """Raise ScriptFailed."""
    raise ScriptFailed(sentence)


class Recorder(ScriptWatcher):
    """A recorder of the ids of non-zero rows, step by step; the forward pass after the last step ends the script.

    A step is a backward pass that DDP synchronizes, so accumulation under ``no_sync`` makes one step. With several
    models, the first to begin a step too many ends the script.
    """

    def __init__(self, num_steps: int, on_step: Callable[[int], None] = lambda done: None) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.on_step = on_step
        """Called after each step of the first model with their number."""
        self._tables: dict[str, TableSteps] = {}

    def watch(self, model: DistributedDataParallel) -> "ModelWatch":
        """Record a model that was just built."""
        self.num_models += 1
        prefix = f"model{self.num_models}." if self.num_models > 1 else ""
        return ModelWatch(self, model, prefix, self.on_step if self.num_models == 1 else lambda done: None)

    def add(self, name: str, gradient: Tensor) -> None:
        """Record the gradient of one parameter in one step."""
        layout = Layout.of(gradient)
        ids = nonzero_rows(gradient)
        density = ids.numel() / layout.num_rows if layout.num_rows else 0.0
        if name not in self._tables:
            dtype = str(gradient.dtype).removeprefix("torch.")
            kind = "dense" if layout.sparse_dim is None else "sparse"
            self._tables[name] = TableSteps(Table(name, layout.num_rows, layout.width, dtype, kind), [], [])
        large = gradient.dim() == 2 and gradient.numel() * gradient.element_size() >= MIN_TABLE_BYTES
        self._tables[name].densities.append(density)
        self._tables[name].ids.append(ids.cpu() if large and density < MAX_DENSITY else None)

    def recording(self) -> RankRecording:
        """Return what was recorded on this rank."""
        return self.num_models, list(self._tables.values())


class ModelWatch:
    """The one communication hook of a DDP model: it records, then synchronizes by the script's hook or as stock DDP."""

    def __init__(
        self, recorder: Recorder, model: DistributedDataParallel, prefix: str, on_step: Callable[[int], None]
    ) -> None:
        self._recorder = recorder
        self._on_step = on_step
        self._names = {id(parameter): prefix + name for name, parameter in model.module.named_parameters()}
        process_group = model.process_group
        assert isinstance(process_group, dist.ProcessGroup)
        self._process_group = process_group
        self._steps = 0
        self._theirs: tuple[object, Callable[..., Any]] | None = None
        model.register_forward_pre_hook(self._before_forward)

    def hand_over_to(self, state: object, hook: Callable[..., Any]) -> None:
        """Synchronize by a hook of the script from now on. Raises RuntimeError for a second one, as DDP does."""
        if self._theirs is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._theirs = (state, hook)

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Record and synchronize a bucket; DDP calls it with every bucket, in the order that all ranks share."""
        if self._steps < self._recorder.num_steps:
            gradients = [bucket.buffer()] if bucket.buffer().is_sparse else bucket.gradients()
            for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
                self._recorder.add(self._names[id(parameter)], gradient)
            if bucket.is_last():
                self._on_step(self._steps + 1)
        self._steps += bucket.is_last()
        if self._theirs is not None:
            their_state, their_hook = self._theirs
            return their_hook(their_state, bucket)
        return _mean_as_stock(self._process_group, bucket.buffer())

    def _before_forward(self, model: nn.Module, args: tuple[object, ...]) -> None:
        training = model.training and torch.is_grad_enabled()  # validation is not the next step
        if training and self._steps >= self._recorder.num_steps:
            self._recorder.on_enough()


@contextmanager
def installed(recorder: ScriptWatcher, script: str) -> Iterator[None]:
    """Watch every DDP model that this process builds, until the context ends; it ends without one after some steps."""
    build, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    watches: WeakKeyDictionary[DistributedDataParallel, Watch] = WeakKeyDictionary()

    @wraps(build)
    def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        watch = recorder.watch(model)
        register(model, None, watch.hook)
        watches[model] = watch

    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        self._check_comm_hook(hook)
        watches[self].hand_over_to(state, hook)

    steps = itertools.count(1)

    def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not recorder.num_models and next(steps) >= MOST_BEFORE:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            recorder.on_missing(f"{Path(script).name} trains {why_not_measured(stepped)}")

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with mock.patch.multiple(DistributedDataParallel, __init__=init, register_comm_hook=register_comm_hook):
            yield
    finally:
        handle.remove()


def _mean_as_stock(process_group: dist.ProcessGroup, gradient: Tensor) -> Future[Tensor]:
    """The all-reduce that DDP's reducer does by itself: bit for bit the same losses as without a hook."""
    if gradient.is_sparse:
        gradient.div_(process_group.size())
    else:
        gradient.mul_(1 / process_group.size())
    work = dist.all_reduce(gradient, group=process_group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])
