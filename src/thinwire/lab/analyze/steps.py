"""Launcher that runs a training script until some of its steps are timed, and measures its link and compressors."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.lab.analyze.failure import ScriptFailed, leaving_on_error, naming_script, raised_by_script
from thinwire.lab.analyze.recorder import fail
from thinwire.lab.analyze.step_recorder import StepRecorder
from thinwire.lab.analyze.trials import as_torchrun, run_on_ranks
from thinwire.lab.analyze.worker import run_recorded
from thinwire.lab.harmless import harmless, without_attach
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.ready import WARM_STEPS
from thinwire.lab.planning.training import How, OnStage, check
from thinwire.lab.testbed.network import EmulatedNetwork
from thinwire.lab.testbed.rank import RankContext


def measure_script(
    script: Path,
    arguments: Sequence[str],
    workers: int | None,
    how: How,
    network: EmulatedNetwork | None = None,
    on_stage: OnStage = lambda stage: None,
) -> Measurement:
    """Run ``SCRIPT ARGUMENTS...`` as torchrun does, on this machine, until its steps are timed.

    Args:
        workers: number of ranks, at least 2; None if torchrun started this process as one, which measures over its own
            network.
        network: emulated hosts with one rank each; None for processes of this machine.

    Raises:
        ValueError: a script without DDP model; see `How`.
        ScriptFailed: the script failed on a rank, or has too few steps; its traceback is in the text.
    """
    check(how.compressors or ())
    if network is not None and network.link.mbit is not None:
        how = replace(how, link=f"emulated, {network.link.mbit:g} Mbit/s, {network.hosts} hosts")
    where = {"network": network, "on_message": lambda rank, stage: on_stage(stage)}
    with naming_script(script):
        measurement, *_ = run_on_ranks(_measure_rank, str(script), list(arguments), how, world_size=workers, **where)
    if measurement is None:
        raise ValueError(
            f"{script.name} ended without wrapping a model in torch.nn.parallel.DistributedDataParallel, so there was"
            " no training to measure; ranks that it starts itself are not seen"
        )
    return Measurement.from_json(measurement)


def _measure_rank(context: RankContext, script: str, arguments: list[str], how: How) -> Any:
    """Measure on one rank; the result is JSON, or None if the script has no DDP model."""
    as_torchrun(context)
    recorder = StepRecorder(how, context.send if context.rank == 0 else lambda stage: None)

    def result() -> Any:
        with raised_by_script(script):
            recorder.finish()
        recorder.close()
        return None if recorder.measurement is None else recorder.measurement.to_json()

    recorder.on_enough = lambda: context.leave(result)
    recorder.on_missing = leaving_on_error(context.leave, script, fail)
    with raised_by_script(script):
        measurement = run_watched(recorder, Path(script), arguments)
    return None if measurement is None else measurement.to_json()


def run_watched(recorder: StepRecorder, script: Path, arguments: Sequence[str]) -> Measurement | None:
    """Run a script in this process until the recorder has enough steps; its lane is always closed.

    Raises:
        ScriptFailed: it ended before that.
    """
    try:
        with harmless(), without_attach(recorder.leave_out):
            run_recorded(recorder, str(script), list(arguments))
        if not recorder.finished and recorder.num_models:
            if not dist.is_initialized() or recorder.num_steps < WARM_STEPS:  # the last step has not ended
                raise ScriptFailed(
                    f"{script.name} ended before {WARM_STEPS + recorder.how.steps} training steps were timed: let it"
                    " train longer, or ask for fewer --steps"
                )
            recorder.finish()  # with the steps so far
        return recorder.measurement
    finally:
        recorder.close()
