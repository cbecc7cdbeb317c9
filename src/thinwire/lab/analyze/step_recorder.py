# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.
"""Recorder that times the training steps of a script by hooks on its DDP model, and measures its link and compressors.

The script is not changed. While its steps are timed nothing is synchronized, so that the times are those of computing
alone (the parameters of the ranks drift apart, and are not used afterwards).
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.lane import Lane
from thinwire.lab.analyze.site import find_site, follows_plans
from thinwire.measure.ready import WARM_STEPS, StepWatch
from thinwire.measure.training import How, OnStage, begin_together, finish, trained_parameters
from thinwire.plan.measurement import DdpSite, Measurement


class StepRecorder:
    """Recorder of the first DDP model of a script; after enough timed steps it measures the rest and ends the script.

    Args:
        how: settings of the measurement.
        on_stage: function called with the name of the next measurement.

    Attributes:
        measurement: the result when the script has ended; None if it had no DDP model.
    """

    def __init__(self, how: How, on_stage: OnStage = lambda stage: None) -> None:
        self.how = how
        self.finished = False
        self.num_models = 0
        self.measurement: Measurement | None = None
        self._on_stage = on_stage
        self._lane: Lane | None = None
        self._watch: StepWatch | None = None
        self._trained: dict[str, Tensor] = {}
        self._tables: frozenset[str] = frozenset()
        self._hook: Unsynchronized | None = None
        self._site = DdpSite()

    def watch(self, model: DistributedDataParallel) -> "Unsynchronized":
        """Watch a model; called on all ranks for each model that is built."""
        self.num_models += 1
        if self._lane is None:
            self._lane = Lane(model.process_group)
            self._trained, self._tables = trained_parameters(model.module)
            self._watch = StepWatch(model.module, self._trained, self._before_step, self._tables)
            self._hook = Unsynchronized(model.module)
            self._site = replace(find_site(), follows_plans=follows_plans(model))
            self._on_stage("training steps")
            return self._hook
        return Unsynchronized(model.module)

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
        self.measurement = replace(measured, ddp=replace(self._site, buckets=tuple(self._hook.buckets)))

    def close(self) -> None:
        """Close the lane to the other ranks, also after a failed script."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _before_step(self) -> None:
        assert self._lane is not None
        if self.num_steps >= WARM_STEPS + self.how.steps:
            self.finish()
            sys.exit(0)
        begin_together(self._lane)


class Unsynchronized:
    """Communication hook of a DDP model that leaves gradients as they are, and notes which share a bucket."""

    def __init__(self, module: nn.Module) -> None:
        self.buckets: list[tuple[str, ...]] = []
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        del state
        if bucket.index() == 0:
            self.buckets = []
        self.buckets.append(tuple(self._names[id(parameter)] for parameter in bucket.parameters()))
        buffer = bucket.buffer()
        future: Future[Tensor] = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])
        future.set_result(buffer)
        return future

    def hand_over_to(self, state: object, hook: Callable[..., Any]) -> None:
        """Ignore a hook of the script."""
