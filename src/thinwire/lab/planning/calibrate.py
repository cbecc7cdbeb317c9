"""Measure by training what a step costs beyond the timeline's prediction, for each option of sending gradients.

The timeline adds up what was measured apart: backward without synchronization, collectives without backward, and
compressors without either. In training they share processors and caches, ranks are not in step, and hooks and threads
cost time too: of four ranks on two cores at 200 Mbit/s a step predicted at 102 ms lasted 163. So a few steps are
trained with the best groups of each compressor, and the difference is added to all its options.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach
from thinwire.compress.assign import AUTO
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import Option, plan_of, price_options
from thinwire.lab.planning.ready import Training, slowest
from thinwire.lab.planning.speeds import Extra
from thinwire.plan.plan import STOCK, Plan

WARM_STEPS, STEPS = 3, 8
TOLERANCE = 1.2
"""Ratio to the predicted step of stock DDP above which an option is not trained, because it will not be chosen."""

OnStage = Callable[[str], None]
"""A callback that receives the name of what is measured next."""


def calibrate(
    training: Training,
    measurement: Measurement,
    compressors: Sequence[str] | None,
    on_stage: OnStage = lambda stage: None,
) -> Measurement:
    """Return the measurement with what its timeline leaves out; a collective call of the default process group.

    The model is trained for `WARM_STEPS` + `STEPS` steps each: under DDP, with exact gradients, and with each
    compressor that may pay.

    Raises:
        LostPeerError: a rank died.
    """
    priced = price_options(measurement, compressors)
    stock, extras = priced[0], []
    if _suits_ddp(training.model):
        on_stage(f"training with {STOCK}")
        stock_model = DistributedDataParallel(training.model, init_sync=False)
        taken = _step_seconds(training, stock_model) - measurement.other_seconds
        extras.append(Extra(STOCK, "all_reduce", taken - stock.seconds))
    for option in best_of_codecs(priced[1:]):
        if (option.is_exact and not option.is_lossless) or option.seconds <= TOLERANCE * stock.seconds:
            on_stage(f"training with {option.name}")
            taken = _seconds_of_plan(training, plan_of(option, measurement, priced)) - measurement.other_seconds
            extras.append(Extra(*option.codecs[0], taken - option.seconds))
    return replace(measurement, extras=tuple(extras))


def best_of_codecs(priced: Iterable[Option]) -> list[Option]:
    """Return the fastest exact option and the fastest of each compressor and exchange, in the order of ``priced``."""
    best: dict[tuple[str, str], Option] = {}
    for option in priced:
        codec, *others = option.codecs
        if not others and (codec not in best or option.seconds < best[codec].seconds):
            best[codec] = option
    return list(best.values())


def _suits_ddp(model: nn.Module) -> bool:
    """Return whether stock DDP can train the model with its default settings, on all ranks; a collective call.

    DDP needs a setting for parameters that a step gives no gradient, and over NCCL it cannot sum sparse ones.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    fails = any(gradient is None or (gradient.is_sparse and gradient.is_cuda) for gradient in gradients)
    return not slowest(float(fails))


def _seconds_of_plan(training: Training, plan: Plan) -> float:
    synchronizer = attach(training.model, dense=plan if plan.groups else AUTO)
    try:
        return _step_seconds(training, training.model)
    finally:
        synchronizer.detach()


def _step_seconds(training: Training, model: nn.Module) -> float:
    """Return the median step of the slowest rank: one lost packet stops a connection for 0.2 s, so a mean is no use."""
    return slowest(statistics.median(training.step_seconds(model, WARM_STEPS, STEPS)))
