"""Launcher that runs a training script on several ranks of this machine and collects the recording of its gradients."""

from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.lab.analyze.failure import ScriptFailed, leaving_on_error, naming_script, raised_by_script
from thinwire.lab.analyze.recorder import Recorder, fail
from thinwire.lab.analyze.recording import RankRecording, Recording, recording_of
from thinwire.lab.analyze.trials import as_torchrun, run_on_ranks
from thinwire.lab.analyze.worker import run_recorded
from thinwire.lab.harmless import harmless
from thinwire.lab.testbed.rank import RankContext

__all__ = ["MODELS", "ScriptFailed", "run_script"]

MODELS = {"lstm-lm": Path(__file__).with_name("models") / "lstm_lm.py"}
"""Paths of the built-in scripts by name."""

_TIMEOUT_SECONDS = 7 * 86400.0
"""As long as it takes: a recording asks for as many steps as the user likes."""


def run_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int = 4,
    steps: int = 20,
    on_step: Callable[[int], None] = lambda done: None,
) -> Recording:
    """Run ``SCRIPT ARGUMENTS...`` as torchrun does, until ``steps`` training steps are done, and record them.

    A script that ends earlier gives fewer steps. ``on_step`` is called with the number of recorded steps.

    Raises:
        ValueError: a script without DDP model or without a synchronized backward.
        ScriptFailed: the script failed on a rank; the text has its traceback.

    Example:
        >>> recording = run_script(Path("train.py"), ["--lr", "0.1"], workers=4, steps=20)  # doctest: +SKIP
    """
    where = {"world_size": workers, "network": None, "kernels": (), "timeout_seconds": _TIMEOUT_SECONDS}
    with naming_script(script):
        ranks = run_on_ranks(
            _record_rank, str(script), list(arguments), steps, on_message=lambda rank, done: on_step(done), **where
        )
    recording = recording_of(ranks)
    _check(recording, script)
    return recording


def _record_rank(context: RankContext, script: str, arguments: list[str], steps: int) -> RankRecording:
    """Record on one rank, until there are enough steps or the script ends."""
    as_torchrun(context)
    recorder = Recorder(steps, context.send if context.rank == 0 else lambda done: None)
    recorder.on_enough = lambda: context.leave(recorder.recording)
    recorder.on_missing = leaving_on_error(context.leave, script, fail)
    with raised_by_script(script), harmless():
        run_recorded(recorder, script, arguments)
    return recorder.recording()


def _check(recording: Recording, script: Path) -> None:
    if recording.num_models == 0:
        raise ValueError(
            f"{script.name} ended without wrapping a model in torch.nn.parallel.DistributedDataParallel, so there"
            " were no gradients to record; ranks that it starts itself are not seen"
        )
    if recording.num_steps == 0:
        raise ValueError(f"{script.name} ended before a single training step was synchronized: there is no statistic")
