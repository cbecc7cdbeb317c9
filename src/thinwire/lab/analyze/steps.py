"""Launcher that runs a training script until some of its steps are timed, and measures its link and compressors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from thinwire.lab.analyze.run import ScriptFailed, launch
from thinwire.lab.analyze.step_recorder import StepRecorder
from thinwire.lab.analyze.worker import run_recorded
from thinwire.measure.ready import WARM_STEPS
from thinwire.measure.training import How, OnStage, check
from thinwire.plan.measurement import Measurement


def measure_script(script: Path, arguments: Sequence[str], workers: int, how: How) -> Measurement:
    """Run ``SCRIPT ARGUMENTS...`` as torchrun does, on this machine, until its steps are timed.

    Raises:
        FileNotFoundError: no such script.
        ValueError: fewer than 2 workers; a script without DDP model or with too few steps; see `How`.
        ScriptFailed: the script failed on a rank; its traceback is on standard error.
    """
    if workers < 2:
        raise ValueError(f"at least 2 workers are needed, because one has nobody to talk to; got {workers}")
    _check_script(script)
    check(how.compressors)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with tempfile.TemporaryDirectory(prefix="thinwire-doctor-") as directory:
        result = Path(directory) / "measurement.json"
        launch("thinwire.lab.analyze.steps", workers, directory, [json.dumps(asdict(how))], script, arguments)
        if not result.exists():
            raise ScriptFailed(f"{script.name} left nothing behind: does it call os._exit or exec?")
        found = json.loads(result.read_text())
    return _checked(None if found is None else Measurement.from_json(found), script)


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


@record
def main() -> None:
    """Run one rank of torchrun: ``python -m thinwire.lab.analyze.steps DIRECTORY HOW SCRIPT [ARGS...]``."""
    os.dup2(2, 1)  # the script's output goes to standard error: standard output is for the JSON of the parent
    directory, how, script, *arguments = sys.argv[1:]
    measurement = run_watched(StepRecorder(How(**json.loads(how))), Path(script), arguments)
    if os.environ["RANK"] == "0":
        found = None if measurement is None else measurement.to_json()
        (Path(directory) / "measurement.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


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


if __name__ == "__main__":
    main()
