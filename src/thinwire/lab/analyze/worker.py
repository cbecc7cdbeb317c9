"""One rank of torchrun: ``python -m thinwire.lab.analyze.worker DIRECTORY STEPS SCRIPT [ARGS...]``."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
    from thinwire.lab.leave import leave

    os.dup2(2, 1)  # the script's output goes to standard error: standard output is for the JSON of the parent
    directory, steps, script, *arguments = sys.argv[1:]
    rank = int(os.environ["RANK"])
    recorder = Recorder(int(steps), partial(_add_byte, progress_file(Path(directory))) if rank == 0 else lambda: None)
    with kept_errors(Path(directory), rank, script):
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
        run_as_main(script, arguments, lambda: recorder.finished)
    finally:
        uninstall()


def run_as_main(script: str, arguments: list[str], is_finished: Callable[[], bool]) -> None:
    """Run a script as ``python SCRIPT ARGS...`` would; how it exits does not matter if it was ended by us."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0) and not is_finished():
            raise


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, and without a traceback
    main()
