"""Measure by training what a step costs beyond the timeline's prediction, for each way of sending gradients.

The timeline adds up what was measured apart: backward without synchronization, collectives without backward, and
compressors without either. In training they share processors and caches, ranks are not in step, and hooks and threads
cost time too: of four ranks on two cores at 200 Mbit/s a step predicted at 102 ms lasted 163. So a few steps are
trained with the best groups of each compressor, and the difference is added to all its ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach
from thinwire.comm.agree import longest
from thinwire.comm.lane import Lane
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import Way, plan_of, ways
from thinwire.lab.planning.speeds import Extra
from thinwire.plan.plan import STOCK, Plan

if TYPE_CHECKING:
    from thinwire.lab.planning.training import Training

WARM_STEPS, STEPS = 3, 8
TOLERANCE = 1.2
"""Ratio to the predicted step of stock DDP above which a way is not trained, because it will not be chosen."""

OnStage = Callable[[str], None]


def calibrate(
    training: Training,
    measurement: Measurement,
    compressors: Iterable[str],
    on_stage: OnStage = lambda stage: None,
) -> Measurement:
    """Return the measurement with what its timeline leaves out; a collective call of the default process group.

    The model is trained for `WARM_STEPS` + `STEPS` steps each: under DDP, with exact gradients, and with each
    compressor that may pay.

    Raises:
        LostPeerError: a rank died.
    """
    found = ways(measurement, tuple(compressors))
    stock, extras = found[0], []
    if _suits_ddp(training.model):
        on_stage(f"training with {STOCK}")
        taken = _seconds_of_ddp(training) - measurement.other_seconds
        extras.append(Extra(STOCK, "all_reduce", taken - stock.seconds))
    for way in best_of_codecs(found[1:]):
        if (way.is_exact and not way.is_lossless) or way.seconds <= TOLERANCE * stock.seconds:
            on_stage(f"training with {way.name}")
            taken = _seconds_of_plan(training, plan_of(way, measurement, found)) - measurement.other_seconds
            extras.append(Extra(*way.codecs[0], taken - way.seconds))
    return replace(measurement, extras=tuple(extras))


def best_of_codecs(found: Iterable[Way]) -> list[Way]:
    """Return the fastest exact way and the fastest of each compressor and exchange, in the order of ``found``."""
    best: dict[tuple[str, str], Way] = {}
    for way in found:
        codec, *others = way.codecs
        if not others and (codec not in best or way.seconds < best[codec].seconds):
            best[codec] = way
    return list(best.values())


def _suits_ddp(model: nn.Module) -> bool:
    """Return whether stock DDP can train the model with its default settings, on all ranks; a collective call.

    DDP needs a setting for parameters that a step gives no gradient, and over NCCL it cannot sum sparse ones.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    fails = any(gradient is None or (gradient.is_sparse and gradient.is_cuda) for gradient in gradients)
    return not _slowest(float(fails))


def _seconds_of_ddp(training: Training) -> float:
    return _step_seconds(training, DistributedDataParallel(training.model, init_sync=False))


def _seconds_of_plan(training: Training, plan: Plan) -> float:
    synchronizer = attach(training.model, plan=plan if plan.groups else None)
    try:
        return _step_seconds(training, training.model)
    finally:
        synchronizer.detach()


def _step_seconds(training: Training, model: nn.Module) -> float:
    """Return the median step of the slowest rank: one lost packet stops a connection for 0.2 s, so a mean is no use."""
    step, moments = training.stepper(model), []
    for _ in range(WARM_STEPS + STEPS + 1):
        moments.append(time.perf_counter())
        step()
        training.settle()
    return _slowest(statistics.median(end - start for start, end in pairwise(moments[WARM_STEPS:])))


def _slowest(seconds: float) -> float:
    """Return the largest number of any rank, on all ranks."""
    lane = Lane()
    try:
        return lane.submit(lambda lane: longest(lane.exchange, seconds)).wait()
    finally:
        lane.close()
