"""How a script runs in the process of a rank: as its own main program, and not if it starts ranks itself."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

from thinwire.lab.leave import end_now

if TYPE_CHECKING:
    from thinwire.lab.analyze.recorder import ScriptWatcher


def run_recorded(recorder: ScriptWatcher, script: str, arguments: list[str]) -> None:
    """Run a script as ``python SCRIPT ARGS...`` would. Its errors pass through, an orderly exit is swallowed."""
    from thinwire.lab.analyze.recorder import installed

    with installed(recorder, script):
        run_as_main(script, arguments)


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
    """Refuse that a script starts ranks itself: by `torch.multiprocessing` before they start, else when it has ended.

    A process is a rank if it asks for a process group, see `_run_process`.
    """
    from torch import distributed as dist
    from torch import multiprocessing

    from thinwire.lab.analyze.failure import ScriptFailed

    start_ranks, start_process = multiprocessing.start_processes, BaseProcess.start
    started: list[BaseProcess] = []
    failure = ScriptFailed(
        f"{Path(script).name} starts its ranks itself, by multiprocessing, and here they are started as by torchrun:"
        " let it read RANK and WORLD_SIZE from the environment, and call its training function once"
    )

    def refuse(*args: Any, **options: Any) -> Any:
        if dist.is_initialized():
            return start_ranks(*args, **options)
        raise failure

    def start(process: BaseProcess) -> None:
        if not dist.is_initialized():
            process.run = partial(_run_process, process)  # type: ignore[method-assign]
            started.append(process)
        start_process(process)

    with (
        mock.patch.multiple(multiprocessing, spawn=refuse, start_processes=refuse),
        mock.patch.object(BaseProcess, "start", start),
    ):
        try:
            yield
        finally:
            if any(map(_was_rank, started)):
                raise failure


_RANK = 97
"""Exit status of a process that a script started, and that was about to be a rank."""


def _run_process(process: BaseProcess) -> None:
    """Run a process that a script started before it had a process group; where it asks for one itself, it ends."""
    from torch.distributed import distributed_c10d

    with mock.patch.object(distributed_c10d, "rendezvous", _end_rank):
        type(process).run(process)


def _end_rank(*args: object, **options: object) -> NoReturn:
    end_now(_RANK)


def _was_rank(process: BaseProcess) -> bool:
    with contextlib.suppress(ValueError):  # it is closed
        return process.exitcode == _RANK
    return False
