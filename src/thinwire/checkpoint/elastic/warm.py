"""Workers that start warm: ``torchrun --rdzv-backend=thinwire ... -m thinwire.checkpoint.elastic.warm train.py``.

Most of the time of a restart is spent on imports. So the agent of each host, also of one that stands by, keeps a
process that has imported torch and what the script imports, and nothing else. What torchrun starts is then a process
without torch, which asks that one for a fork and stands for it: it passes signals on, and ends as the worker ends. The
kernel kills the worker when either of the two is gone.
"""

import ast
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from thinwire.checkpoint.holder.acceptor import listen_unix
from thinwire.checkpoint.holder.start import beside, end_with_parent, socket_path
from thinwire.errors import LostPeerError

MODULE = "thinwire.checkpoint.elastic.warm"
_MOST_BYTES = 1 << 21  # of a message: an environment, as large as the kernel allows
_REQUEST_SECONDS = 10.0
_START_SECONDS = 120.0  # of the imports
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Warm:
    """The warm process of an agent, for the script on the command line of torchrun; none if that does not say so."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        at = sys.argv.index(MODULE) + 1 if MODULE in sys.argv else None
        self._argv = [] if at is None else sys.argv[at:]

    def ensure(self) -> None:
        """Start the process if it does not run. Call it in the main thread, with whose end the process ends, too."""
        if self._argv and (self._process is None or self._process.poll() is not None):
            command = [sys.executable, "-u", "-c", f"import {MODULE} as warm; warm.serve()", *self._argv]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def serve() -> None:
    """Import what the script imports, and fork a worker for each request; returns never, except in the workers."""
    end_with_parent()
    with listen_unix(_path(), socket.SOCK_SEQPACKET) as listener:  # so workers wait for the imports
        _preload(sys.argv[1:])
        gc.collect()
        gc.freeze()  # so the collector of a worker does not copy the pages of the modules
        request = _serve(listener)
    _become_worker(*request)


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int], socket.socket]:
    """Return the request, in the process that was forked for it."""
    workers: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([listener, *workers], [], [])[0]:
            if isinstance(ready, int):
                pid, connection = workers.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection, contextlib.suppress(OSError):
                    _send(connection, {"status": status})
                continue
            connection, _ = listener.accept()
            content, files, pid = dict[str, Any](), list[int](), -1
            try:
                connection.settimeout(_REQUEST_SECONDS)
                content, files = _receive(connection, 3)
                pid = os.fork()
            except (OSError, LostPeerError):  # it has ended meanwhile, and needs no worker; or it starts cold
                connection.close()
            if pid == 0:
                for worker, (_, other) in workers.items():
                    os.close(worker)
                    other.close()
                return content, files, connection
            for file in files:
                os.close(file)
            if pid > 0:
                workers[os.pidfd_open(pid)] = pid, connection
                with contextlib.suppress(OSError):
                    _send(connection, {"pid": pid})


def _become_worker(content: dict[str, Any], files: list[int], connection: socket.socket) -> None:
    """Make this fork the process that torchrun wanted to start, and run the script."""
    os.setsid()
    end_with_parent()
    descriptor = connection.detach()  # open until the end; the other end closes when what torchrun started is gone
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    with socket.socket(fileno=os.dup(descriptor)) as other, contextlib.suppress(BlockingIOError):
        if other.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":  # gone before the kernel looked
            os.kill(os.getpid(), signal.SIGKILL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(content["environment"])
    os.chdir(content["directory"])
    os.sched_setaffinity(0, content["cores"])
    random.seed()  # forks have one state in common, and fresh processes do not
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    _run(content["argv"])


def _preload(argv: list[str]) -> None:
    """Import what the script imports. The script itself runs in the workers alone, and what fails there is seen."""
    _place(argv)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or to ask for a GPU would take it away from forks
    source = importlib.util.find_spec(argv[1]).origin if argv[0] == "-m" else argv[0]  # type: ignore[union-attr]
    for node in ast.walk(ast.parse(Path(source or "").read_bytes())):
        with contextlib.suppress(Exception):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    getattr(module, alias.name, None)  # which may import on first use
    torch, reason = sys.modules.get("torch"), "starts threads" * (threading.active_count() > 1)
    if torch is not None:
        torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # the first optimizer imports more
        reason = reason or "uses the GPU" * torch.cuda.is_initialized()
    if reason:
        sys.exit(f"thinwire: importing what {source} imports {reason}, so its workers cannot be forks and start cold")


def main() -> None:
    """Run the script in a fork of the warm process, or here if there is none."""
    argv = sys.argv[1:]
    if not argv or argv == ["-m"]:
        sys.exit(f"usage: torchrun --rdzv-backend=thinwire [options] -m {MODULE} SCRIPT [arguments], or -m MODULE")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
    content = {
        "argv": argv, "environment": dict(os.environ), "directory": str(Path.cwd()),
        "cores": list(os.sched_getaffinity(0)),
    }  # fmt: skip
    try:
        connection.settimeout(_START_SECONDS)
        connection.connect(str(_path()))
        _send(connection, content, [0, 1, 2])
        pid = _receive(connection)[0]["pid"]
    except (OSError, LostPeerError) as error:
        warnings.warn(f"this worker starts cold: no warm process of an agent at {_path()}: {error}", stacklevel=1)
        connection.close()
        _run(argv)
    else:
        _stand_for(pid, connection)


def _stand_for(pid: int, connection: socket.socket) -> NoReturn:
    """Pass signals on to the worker, and end as it ends."""
    with contextlib.suppress(ProcessLookupError):
        worker = os.pidfd_open(pid)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: signal.pidfd_send_signal(worker, number))
    connection.settimeout(None)
    try:
        status = _receive(connection)[0]["status"]
    except (OSError, LostPeerError):
        sys.exit("the warm process of the agent has ended, and its workers with it")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _run(argv: list[str]) -> None:
    sys.argv = _place(argv)
    if argv[0] == "-m":
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


def _place(argv: list[str]) -> list[str]:
    """Have the first directory of imports be that of the script; return the script and its arguments."""
    sys.path[0] = str(Path.cwd() if argv[0] == "-m" else Path(argv[0]).resolve().parent)
    return argv[1:] if argv[0] == "-m" else argv


def _path() -> Path:
    return beside(socket_path())


def _send(connection: socket.socket, content: dict[str, Any], files: Sequence[int] = ()) -> None:
    socket.send_fds(connection, [json.dumps(content).encode()], files)


def _receive(connection: socket.socket, num_files: int = 0) -> tuple[dict[str, Any], list[int]]:
    data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, num_files)
    if not data:
        raise LostPeerError("it ended")
    return json.loads(data), files


if __name__ == "__main__":
    main()
