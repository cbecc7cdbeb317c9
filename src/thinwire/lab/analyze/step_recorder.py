# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.
"""Recorder that times the training steps of a script by hooks on its DDP model, and measures its link and compressors.

The script is not changed. While its steps are timed nothing is synchronized, so that only computing is
timed (the parameters of the ranks drift apart, and are not used afterwards).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.agree import gather_numbers
from thinwire.comm.lane import Lane
from thinwire.lab.analyze.recorder import ScriptWatcher
from thinwire.lab.analyze.site import calling_line, find_site, follows_plans
from thinwire.lab.planning.measurement import DdpSite, Measurement
from thinwire.lab.planning.ready import WARM_STEPS, StepWatch
from thinwire.lab.planning.training import How, OnStage, begin_together, finish, trained_parameters

LONG_SECONDS, FEW_STEPS = 1.0, 3
"""Where a step lasts longer, so many are timed, which suffice: the doctor's answer is due in minutes."""


class StepRecorder(ScriptWatcher):
    """Recorder of the first DDP model of a script, which it ends after enough timed steps; `finish` measures the rest.

    Args:
        how: settings of the measurement.
        on_stage: function called with the name of the next measurement.

    Attributes:
        measurement: the result when the script has ended; None if it had no DDP model.
    """

    def __init__(self, how: How, on_stage: OnStage = lambda stage: None) -> None:
        super().__init__()
        self.how = how
        self.finished = False
        self.measurement: Measurement | None = None
        self._on_stage = on_stage
        self._lane: Lane | None = None
        self._watch: StepWatch | None = None
        self._trained: dict[str, Tensor] = {}
        self._tables: frozenset[str] = frozenset()
        self._hook: Unsynchronized | None = None
        self._site = DdpSite()
        self._left_out: dict[str, None] = {}
        self._steps = how.steps
        self._began = 0.0

    def watch(self, model: DistributedDataParallel) -> "Unsynchronized":
        """Watch a model; called on all ranks for each model that is built."""
        self.num_models += 1
        if self._lane is None:
            self._lane = Lane(model.process_group)
            self._trained, self._tables = trained_parameters(model.module)
            watch = StepWatch(
                model.module,
                self._trained,
                self._before_step,
                self._tables,
                samples=False,
                synchronizes=lambda: model.require_backward_grad_sync,
                vote=lambda ends: self._largest("the end of a step", ends) > 0,
            )
            self._watch, self._hook = watch, Unsynchronized(model.module, self.leave_out, watch.take)
            self._site = replace(find_site(), follows_plans=follows_plans(model))
            if dist.get_backend(model.process_group) == "thinwire":
                self._left_out['the word "thinwire" of init_process_group'] = None
            self._on_stage("training steps")
            return self._hook
        return Unsynchronized(model.module, self.leave_out)

    def leave_out(self) -> None:
        """Note the line of the script that is running, which does nothing."""
        self._left_out[calling_line()] = None

    @property
    def num_steps(self) -> int:
        """Number of steps timed so far."""
        return 0 if self._watch is None else self._watch.num_steps

    def finish(self) -> None:
        """Measure the link and the compressors; a collective call.

        Raises:
            ValueError: no steps were timed.
        """
        if self._lane is None or self._watch is None or self._hook is None or self.finished:
            return
        self.finished = True
        measured = finish(self._lane, self._watch, self._trained, self._tables, self.how, self._on_stage)
        buckets, left_out = tuple(self._hook.buckets), tuple(self._left_out)
        seen = {"others": self.num_models - 1, "left_out": left_out, "scaler": self._watch.boundary.scaler}
        self.measurement = replace(measured, ddp=replace(self._site, buckets=buckets, **seen))

    def close(self) -> None:
        """Close the lane to the other ranks, also after a failed script."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _before_step(self) -> None:
        assert self._lane is not None
        if self.num_steps == WARM_STEPS and self._largest("a step", time.perf_counter() - self._began) > LONG_SECONDS:
            self._steps = min(self.how.steps, FEW_STEPS)
        if self.num_steps >= WARM_STEPS + self._steps:
            self.on_enough()
        begin_together(self._lane)
        self._began = time.perf_counter()

    def _largest(self, what: str, number: float) -> float:
        """Return the largest of the numbers of all ranks; a collective call."""
        assert self._lane is not None
        ranks = self._lane.submit(lambda lane: gather_numbers(lane.exchange, what, [number])).wait()
        return max(number for (number,) in ranks)


class Unsynchronized:
    """Communication hook of a DDP model that leaves gradients as they are, and notes which share a bucket.

    Args:
        on_other: called where the script registers a hook of its own.
        on_gradient: called with the name of each gradient and the gradient, as DDP would synchronize it.
    """

    def __init__(
        self,
        module: nn.Module,
        on_other: Callable[[], None] = lambda: None,
        on_gradient: Callable[[str, Tensor], None] = lambda name, gradient: None,
    ) -> None:
        self.buckets: list[tuple[str, ...]] = []
        self._on_other, self._on_gradient = on_other, on_gradient
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self.buckets = []
        self.buckets.append(names := tuple(self._names[id(parameter)] for parameter in bucket.parameters()))
        buffer = bucket.buffer()
        if not buffer.is_sparse:  # the bucket of a sparse gradient, alone in it, gives no gradients
            for name, gradient in zip(names, bucket.gradients(), strict=True):
                self._on_gradient(name, gradient)
        future: Future[Tensor] = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])
        future.set_result(buffer)
        return future

    def hand_over_to(self, state: object, hook: Callable[..., Any]) -> None:
        """Ignore a hook of the script, but note its line."""
        self._on_other()
