"""Process of a rank: enter its host, tie its life to the launcher, call the function, report."""

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from thinwire.checkpoint.holder.start import end_with_parent
from thinwire.lab.leave import end_now
from thinwire.lab.testbed.network import enter_namespace


@dataclass(frozen=True)
class RankContext:
    """Arguments of a rank's function; `send(message)` hands a picklable message to the parent.

    `leave(result)` ends the rank at once with the value of ``result()``: no handler of the code that runs sees it.
    """

    rank: int
    world_size: int
    local_rank: int
    host: int
    send: Callable[[Any], None]
    leave: Callable[..., NoReturn] = sys.exit


@dataclass(frozen=True)
class RankSetup:
    """Settings that a rank's process needs before it can call the function."""

    rank: int
    world_size: int
    local_rank: int
    host: int
    environment: Mapping[str, str]
    namespace: str | None  # of its host; None is the machine's own
    directory: str  # shared by all ranks: the store of the process group, the stack dumps
    timeout_seconds: float
    init_process_group: bool
    kernels: tuple[str, ...] | None = None  # those that may be compiled while ranks run; None is all


def stacks_path(directory: str, rank: int) -> Path:
    """Return the file to which `rank` writes the Python stacks of its threads when it gets SIGUSR1."""
    return Path(directory) / f"stacks-{rank}"


def rank_main(setup: RankSetup, connection: Connection, payload: bytes) -> None:
    """Run the process of a rank. It reports ("value", v) or ("error", text), and messages before that."""
    _die_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which ends its ranks
    if setup.namespace is not None:
        enter_namespace(setup.namespace)
    os.environ.clear()
    os.environ.update(setup.environment)
    lock = threading.Lock()

    def send(kind: str, content: Any) -> None:
        # By value: torch's own pickling of tensors for pipes is shared memory, which ends with this process.
        message = pickle.dumps((kind, content))
        with lock:
            connection.send_bytes(message)

    with open(stacks_path(setup.directory, setup.rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            _call(setup, payload, send, connection)
        except BaseException:
            send("error", traceback.format_exc())
            sys.exit(1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _call(setup: RankSetup, payload: bytes, send: Callable[[str, Any], None], connection: Connection) -> None:
    import torch

    from thinwire.comm.c10d import show_native_stacks
    from thinwire.kernels import dispatch

    torch.set_num_threads(1)
    if faulthandler.is_enabled():  # a thread of C++ has no frames of Python
        show_native_stacks()
    if setup.kernels is not None:
        dispatch.only(setup.kernels)
    function, args = pickle.loads(payload)

    def leave(result: Callable[[], Any]) -> NoReturn:
        try:
            send("value", result())
            connection.recv_bytes()
        except BaseException:
            send("error", traceback.format_exc())
            end_now(1)
        end_now(0)

    context = RankContext(
        setup.rank, setup.world_size, setup.local_rank, setup.host, lambda message: send("message", message), leave
    )
    with _process_group(setup) if setup.init_process_group else contextlib.nullcontext():
        send("value", function(context, *args))
        # The launcher's signal that all ranks have returned: one that leaves early resets connections which the
        # others still set up or read from (1 of 20 runs of an empty function failed so).
        connection.recv_bytes()


@contextlib.contextmanager
def _process_group(setup: RankSetup) -> Iterator[None]:
    """The default Gloo group. It meets in a file, so that no port has to be guessed free."""
    from torch import distributed as dist

    # Later than the launcher's own timeout, which shows the stacks of the ranks.
    timeout = timedelta(seconds=setup.timeout_seconds + 10)
    store = dist.FileStore(str(Path(setup.directory) / "store"), setup.world_size)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout)
    yield
    with contextlib.suppress(Exception):  # the function may have destroyed it already
        dist.destroy_process_group()


def _die_with_launcher() -> None:
    """Have the kernel kill this process when the fork server or the launcher ends in any way.

    The fork server is the parent in the eyes of the kernel, and it lives as long as its children do; so the
    launcher is watched through the pipe that it holds open, whose end raises SIGKILL instead of SIGIO.
    """
    end_with_parent()
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a rank runs in a child process"
    pipe = launcher.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], timeout=0):  # it ended before the signal was armed
        os._exit(1)
