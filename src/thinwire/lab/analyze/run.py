"""Launcher that runs a training script on several ranks of this machine and collects the recording of its gradients."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.lab.analyze.failure import ScriptFailed, describe, kept, quiet_launcher
from thinwire.lab.analyze.recording import Recording, load
from thinwire.lab.analyze.worker import module_of, progress_file, rank_file

MODELS = {"lstm-lm": Path(__file__).with_name("models") / "lstm_lm.py"}
"""Paths of the built-in scripts by name."""

_WATCH_SECONDS = 0.1


def run_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int = 4,
    steps: int = 20,
    on_step: Callable[[int], None] | None = None,
) -> Recording:
    """Run ``SCRIPT ARGUMENTS...`` as torchrun does, until ``steps`` training steps are done, and record them.

    A script that ends earlier gives fewer steps. ``on_step`` is called with the number of recorded steps, from a
    thread of its own, about ten times a second while that number grows.

    Raises:
        FileNotFoundError: no such script.
        ValueError: fewer than 2 workers or 1 step; a script without DDP model or without a synchronized backward.
        ScriptFailed: the script failed on a rank; the text has its traceback.

    Example:
        >>> recording = run_script(Path("train.py"), ["--lr", "0.1"], workers=4, steps=20)  # doctest: +SKIP
    """
    if not module_of(str(script)) and not script.is_file():
        raise FileNotFoundError(f"there is no script {script}: give the path of a Python file")
    if workers < 2:
        raise ValueError(f"at least 2 workers are needed to see how gradients overlap; got {workers}")
    if steps < 1:
        raise ValueError(f"at least 1 step is needed; got {steps}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    with tempfile.TemporaryDirectory(prefix="thinwire-analyze-") as directory:
        with _watching(progress_file(Path(directory)), on_step):
            launch("thinwire.lab.analyze.worker", workers, directory, [str(steps)], script, arguments)
        files = [rank_file(Path(directory), rank) for rank in range(workers)]
        if not all(file.exists() for file in files):
            raise ScriptFailed(f"{script.name} left nothing behind on some rank: does it call os._exit or exec?")
        recording = load(files)
    _check(recording, script)
    return recording


@contextmanager
def _watching(path: Path, on_step: Callable[[int], None] | None) -> Iterator[None]:
    """Call ``on_step`` with the growing number of bytes in ``path``, the last time before this ends."""
    if on_step is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        told, last = 0, False
        while not last:
            last = ended.wait(_WATCH_SECONDS)
            done = path.stat().st_size if path.exists() else 0
            if done > told:
                on_step(done)
            told = done

    watcher = threading.Thread(target=watch, name="thinwire-analyze-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def launch(
    worker: str, workers: int, directory: str, settings: Sequence[str], script: Path, arguments: Sequence[str]
) -> None:
    """Run ``python -m WORKER DIRECTORY SETTINGS... SCRIPT ARGUMENTS...`` on ranks of this machine, as torchrun does.

    Raises:
        ScriptFailed: a rank failed; the text has its traceback.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id="thinwire-analyze",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(directory) / "logs")),
    )
    try:
        with quiet_launcher():
            elastic_launch(config, sys.executable)("-u", "-m", worker, directory, *settings, str(script), *arguments)
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        codes = {rank: code for rank, code in codes.items() if not rank_file(Path(directory), rank).exists()}
        if codes:  # a rank that has left its recording has ended well, however its process did
            raise ScriptFailed(describe(script.name, kept(Path(directory)), codes)) from failed
    except SignalException as stopped:  # Ctrl-C: the launcher has ended the workers
        raise KeyboardInterrupt from stopped


def _check(recording: Recording, script: Path) -> None:
    if recording.num_models == 0:
        raise ValueError(
            f"{script.name} ended without wrapping a model in torch.nn.parallel.DistributedDataParallel, so there"
            " were no gradients to record; ranks that it starts itself are not seen"
        )
    if recording.num_steps == 0:
        raise ValueError(f"{script.name} ended before a single training step was synchronized: there is no statistic")
