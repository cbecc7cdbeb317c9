"""Launcher that runs a training script until some of its steps are timed, and measures its link and compressors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.lab.analyze.run import ScriptFailed
from thinwire.lab.analyze.step_recorder import StepRecorder
from thinwire.lab.analyze.trials import last_line, run_on_ranks, torchrun_environment
from thinwire.lab.analyze.worker import run_recorded
from thinwire.lab.testbed.launch import RanksFailed
from thinwire.lab.testbed.network import EmulatedNetwork
from thinwire.lab.testbed.rank import RankContext
from thinwire.measure.ready import WARM_STEPS
from thinwire.measure.training import How, OnStage, check
from thinwire.plan.measurement import Measurement


def measure_script(
    script: Path,
    arguments: Sequence[str],
    workers: int,
    how: How,
    network: EmulatedNetwork | None = None,
    on_stage: OnStage = lambda stage: None,
) -> Measurement:
    """Run ``SCRIPT ARGUMENTS...`` as torchrun does, on this machine, until its steps are timed.

    Args:
        network: emulated hosts with one rank each; None for processes of this machine.

    Raises:
        FileNotFoundError: no such script.
        ValueError: fewer than 2 workers; a script without DDP model or with too few steps; see `How`.
        ScriptFailed: the script failed on a rank; its traceback is in the text.
    """
    if workers < 2:
        raise ValueError(f"at least 2 workers are needed, because one has nobody to talk to; got {workers}")
    _check_script(script)
    check(how.compressors)
    if network is not None and network.link.mbit is not None:
        how = replace(how, link=f"emulated, {network.link.mbit:g} Mbit/s, {network.hosts} hosts")
    try:
        found, *_ = run_on_ranks(
            _measure_rank,
            str(script),
            list(arguments),
            how,
            world_size=workers,
            network=network,
            on_message=lambda rank, stage: on_stage(stage),
        )
    except RanksFailed as failed:
        reason = last_line(failed)
        if reason.startswith(f"ValueError: {script.name} "):  # ours, about the script: it says all
            raise ValueError(reason.removeprefix("ValueError: ")) from failed
        text = f"{script.name} failed: {reason}\n{failed}\n{script.name} must run under torchrun; try that first."
        raise ScriptFailed(text) from failed
    return _checked(None if found is None else Measurement.from_json(found), script)


def _measure_rank(context: RankContext, script: str, arguments: list[str], how: How) -> Any:
    """Measure on one rank; the result is JSON, or None if the script has no DDP model."""
    os.environ.update(torchrun_environment(context))
    os.dup2(2, 1)  # the script's output goes to standard error: standard output is for the JSON of the parent
    tell = context.send if context.rank == 0 else lambda stage: None
    measurement = run_watched(StepRecorder(how, tell), Path(script), arguments)
    return None if measurement is None else measurement.to_json()


def measure_script_in_job(script: Path, arguments: Sequence[str], how: How, on_stage: OnStage) -> Measurement:
    """Measure a script as a rank of a job that torchrun started, over its own network.

    The script's output goes to standard error.

    Raises:
        FileNotFoundError, ValueError: as `measure_script`; and any error of the script.
    """
    _check_script(script)
    check(how.compressors)
    with contextlib.redirect_stdout(sys.stderr):
        found = run_watched(StepRecorder(how, on_stage), script, arguments)
    return _checked(found, script)


def run_watched(recorder: StepRecorder, script: Path, arguments: Sequence[str]) -> Measurement | None:
    """Run a script in this process until the recorder has enough steps; its lane is always closed.

    Raises:
        ValueError: it ended before that, and closed its process group.
    """
    try:
        run_recorded(recorder, str(script), list(arguments))
        if not recorder.finished and recorder.num_models:
            if not dist.is_initialized():
                raise ValueError(
                    f"{script.name} ended before {WARM_STEPS + recorder.how.steps} training steps were timed: let it"
                    " train longer, or ask for fewer --steps"
                )
            recorder.finish()  # with the steps so far
        return recorder.measurement
    finally:
        recorder.close()


def _check_script(script: Path) -> None:
    if not script.is_file():
        raise FileNotFoundError(f"there is no script {script}: give the path of a Python file, or module:function")


def _checked(measurement: Measurement | None, script: Path) -> Measurement:
    if measurement is None:
        raise ValueError(
            f"{script.name} ended without wrapping a model in torch.nn.parallel.DistributedDataParallel, so there was"
            " no training to measure"
        )
    return measurement
