"""One rank of torchrun: ``python -m thinwire.lab.analyze.worker DIRECTORY STEPS SCRIPT [ARGS...]``."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from thinwire.lab.analyze.recorder import ScriptWatcher


def rank_file(directory: Path, rank: int) -> Path:
    """Return the file in which a rank leaves its recording."""
    return directory / f"rank{rank}.npz"


def progress_file(directory: Path) -> Path:
    """Return the file to which rank 0 adds a byte after every step."""
    return directory / "progress"


def main() -> None:
    """Run the script as its own main program, and write the recording when it ends well, by itself or by us."""
    from thinwire.lab.analyze.failure import kept_errors
    from thinwire.lab.analyze.recorder import Recorder
    from thinwire.lab.harmless import harmless
    from thinwire.lab.leave import end_now, leave

    os.dup2(2, 1)  # the script's output goes to standard error: standard output is for the JSON of the parent
    directory, steps, script, *arguments = sys.argv[1:]
    rank = int(os.environ["RANK"])
    on_step = partial(_add_byte, progress_file(Path(directory))) if rank == 0 else lambda: None

    def end() -> NoReturn:
        """End the process without a word to the script, whose handlers would save, or go on."""
        recorder.save(rank_file(Path(directory), rank))
        end_now(0)

    recorder = Recorder(int(steps), on_step)
    recorder.on_enough = end
    with kept_errors(Path(directory), rank, script), harmless():
        run_recorded(recorder, script, arguments)
    recorder.save(rank_file(Path(directory), rank))
    leave(0)


def _add_byte(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b".")


def run_recorded(recorder: ScriptWatcher, script: str, arguments: list[str]) -> None:
    """Run a script as ``python SCRIPT ARGS...`` would. Its errors pass through, an orderly exit is swallowed."""
    from thinwire.lab.analyze.recorder import install

    uninstall = install(recorder)
    try:
        run_as_main(script, arguments)
    finally:
        uninstall()


def run_as_main(script: str, arguments: list[str]) -> None:
    """Run a script as ``python SCRIPT ARGS...`` would, or ``-m MODULE`` in one string; an orderly exit is swallowed.

    Raises:
        ScriptFailed: it starts ranks itself.
    """
    name = module_of(script)
    sys.argv = [script, *arguments]  # of a module, runpy puts the file there
    sys.path[0] = os.getcwd() if name else str(Path(script).resolve().parent)
    with refusing_spawn(script):
        try:
            if name:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as exit:
            if exit.code not in (None, 0):
                raise


def module_of(script: str) -> str:
    """Return the module of ``-m MODULE``; empty for the path of a script.

    Example:
        >>> module_of("-m package.train"), module_of("train.py")
        ('package.train', '')
    """
    return script.removeprefix("-m ") if script.startswith("-m ") else ""


@contextmanager
def refusing_spawn(script: str) -> Iterator[None]:
    """Refuse that a script starts ranks itself, before it has joined those that were started."""
    from unittest import mock

    from torch import distributed as dist
    from torch import multiprocessing

    from thinwire.lab.analyze.failure import ScriptFailed

    start = multiprocessing.start_processes

    def refuse(*args: Any, **options: Any) -> Any:
        if dist.is_initialized():
            return start(*args, **options)
        raise ScriptFailed(
            f"{Path(script).name} starts its ranks itself, by torch.multiprocessing, and here they are started as by"
            " torchrun: let it read RANK and WORLD_SIZE from the environment, and call its training function once"
        )

    with mock.patch.multiple(multiprocessing, spawn=refuse, start_processes=refuse):
        yield


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and without a traceback
    main()
