"""Run a function on N ranks, each a process of its own, and get back what every rank returned.

    def work(context: RankContext, scale: float) -> float:
        total = torch.tensor([scale * context.rank])
        dist.all_reduce(total)
        return total.item()

    outcomes = run_ranks(work, 2.0, world_size=4)

The processes are forked from a server that has torch imported, so a rank starts in milliseconds. What crosses the
pipes between a rank and its parent is pickled by value; these pipes never leave the machine.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from thinwire.testbed.network import EmulatedNetwork, in_namespace
from thinwire.testbed.rank import RankContext, RankSetup, rank_main, stacks_path

_PRELOAD = ["torch", "torch.distributed"]
_GRACE_SECONDS = 5.0  # for the other ranks, after one has failed
_STACK_DUMP_SECONDS = 0.5

# What Gloo says when the process at the other end has gone, or has stopped answering.
_PEER_LOST = (
    "by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "pair closure",
)

__all__ = ["Outcome", "RankContext", "RanksFailed", "run_ranks"]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its return value, or the traceback of its error.

    A rank killed by a signal has `exit_code == -signal` and no error text of its own.
    """

    rank: int
    value: Any
    error: str | None
    exit_code: int | None


class RanksFailed(RuntimeError):
    """Some ranks failed. The text has the root cause first; `outcomes` has all ranks in order."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    ranks_per_host: int | None = None,
    network: EmulatedNetwork | None = None,
    timeout_seconds: float = 120.0,
    check: bool = True,
    init_process_group: bool = True,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Outcome]:
    """Call `function(context, *args)` on `world_size` ranks and return their outcomes in rank order.

    Every rank has one torch thread, the environment that torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR ...) and, with `init_process_group`, a Gloo process group. With a `network`, consecutive blocks of
    `ranks_per_host` ranks (default: as even as it goes) live on its hosts. `on_message(rank, message)` gets what
    the ranks pass to `context.send`. `function` and `args` must be picklable: define the function in a module.

    With `check`, the first failure gives the other ranks 5 s to report theirs, and RanksFailed is raised. Without,
    the ranks run to their end or to the timeout, and failures are read from the outcomes. At the timeout all ranks
    are killed, and the errors of those that were still running hold their Python stacks. However this function is
    left, no process stays behind.
    """
    payload = _pickle_call(function, args)
    with (
        tempfile.TemporaryDirectory(prefix="thinwire-ranks-") as directory,
        contextlib.ExitStack() as cleanup,
    ):
        ranks = []
        for setup in _plan_ranks(
            world_size, ranks_per_host, network, timeout_seconds, init_process_group, directory
        ):
            ranks.append(_start(setup, payload))
            cleanup.callback(ranks[-1].close)
        _supervise(ranks, directory, timeout_seconds, check, on_message or (lambda rank, message: None))
        outcomes = [rank.outcome() for rank in ranks]
        if check and any(rank.failed for rank in ranks):
            raise RanksFailed(_describe(ranks), outcomes)
        return outcomes


@dataclass
class _Rank:
    """The parent's view of one rank."""

    number: int
    process: BaseProcess
    connection: Connection
    value: Any = None
    error: str | None = None
    returned: bool = False
    running: bool = True
    reporting: bool = True  # its end of the pipe is open
    failed_at: float = math.inf  # by the parent's clock

    def handles(self) -> list[Any]:
        return [self.process.sentinel, self.connection] if self.reporting else [self.process.sentinel]

    def attend(self, on_message: Callable[[int, Any], None]) -> None:
        """Take the messages that are there, then see whether the process has ended."""
        ended = bool(wait([self.process.sentinel], timeout=0))
        while self.reporting and self.connection.poll():
            try:
                kind, content = pickle.loads(self.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                self.reporting = False
                break
            if kind == "message":
                on_message(self.number, content)
            elif kind == "value":
                self.value, self.returned = content, True
            else:
                self._fail(content)
        if ended:
            self.process.join()
            self.running = self.reporting = False
            if self.process.exitcode != 0 or not self.returned:
                self._fail(None)

    def stop(self, reason: str) -> None:
        """Kill the rank if it still runs."""
        if self.running:
            self.process.kill()
            self.process.join()
            self.running = False
            self._fail(reason)

    def close(self) -> None:
        self.stop("stopped by the launcher")
        self.connection.close()
        self.process.close()

    @property
    def failed(self) -> bool:
        return self.failed_at < math.inf

    def outcome(self) -> Outcome:
        return Outcome(self.number, self.value, self.error, self.process.exitcode)

    def _fail(self, error: str | None) -> None:
        self.error = self.error or error
        self.failed_at = min(self.failed_at, time.monotonic())


def _plan_ranks(
    world_size: int,
    ranks_per_host: int | None,
    network: EmulatedNetwork | None,
    timeout_seconds: float,
    init_process_group: bool,
    directory: str,
) -> list[RankSetup]:
    """One setup per rank; raises ValueError when the ranks do not fit on the hosts."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    hosts = 1 if network is None else network.hosts
    per_host = -(-world_size // hosts) if ranks_per_host is None else ranks_per_host
    if per_host < 1:
        raise ValueError(f"ranks_per_host must be at least 1, got {per_host}")
    if network is not None and per_host * hosts < world_size:
        raise ValueError(f"{world_size} ranks do not fit on {hosts} hosts with {per_host} ranks each")
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1" if network is None else network.address(0),
        "MASTER_PORT": str(_free_port(network)),
        "GLOO_SOCKET_IFNAME": "lo" if network is None else network.interface,
    }
    setups = []
    for rank in range(world_size):
        host, local_rank = divmod(rank, per_host)
        environment = {
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(min(per_host, world_size - host * per_host)),
        }
        namespace = None if network is None else network.namespace(host)
        setups.append(
            RankSetup(
                rank=rank,
                world_size=world_size,
                local_rank=local_rank,
                host=host,
                environment=environment,
                namespace=namespace,
                directory=directory,
                timeout_seconds=timeout_seconds,
                init_process_group=init_process_group,
            )
        )
    return setups


def _free_port(network: EmulatedNetwork | None) -> int:
    """A port for user code that reads MASTER_PORT, free now where rank 0 runs. The group of ours needs none."""

    def bind() -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    return bind() if network is None else in_namespace(network.namespace(0), bind)


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the ranks cannot be given {function!r} with its arguments: {error}. Define the function at the top "
            "of a module, and pass picklable arguments"
        ) from error


def _start(setup: RankSetup, payload: bytes) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    receiver, sender = context.Pipe(duplex=False)
    with sender:
        process = context.Process(target=rank_main, args=(setup, sender, payload), name=f"rank {setup.rank}")
        process.start()
    return _Rank(setup.rank, process, receiver)


def _supervise(
    ranks: list[_Rank],
    directory: str,
    timeout_seconds: float,
    check: bool,
    on_message: Callable[[int, Any], None],
) -> None:
    """Attend to the ranks until all have ended; kill those that outlive the timeout or a failure's grace."""
    deadline = time.monotonic() + timeout_seconds
    while running := [rank for rank in ranks if rank.running]:
        first = min(ranks, key=lambda rank: rank.failed_at)
        grace_end = first.failed_at + _GRACE_SECONDS if check else math.inf
        remaining = min(deadline, grace_end) - time.monotonic()
        if remaining > 0:
            ready = set(wait([handle for rank in running for handle in rank.handles()], remaining))
            for rank in running:
                if ready.intersection(rank.handles()):
                    rank.attend(on_message)
        elif grace_end < deadline:
            for rank in running:
                rank.stop(f"killed {_GRACE_SECONDS:.0f} s after rank {first.number} had failed")
        else:
            _stop_at_timeout(running, directory, timeout_seconds)


def _stop_at_timeout(running: list[_Rank], directory: str, timeout_seconds: float) -> None:
    """Kill the ranks that still run; their errors are the Python stacks in which they hang."""
    for rank in running:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(_STACK_DUMP_SECONDS)
    for rank in running:
        stacks = stacks_path(directory, rank.number)
        text = stacks.read_text() if stacks.exists() else ""
        rank.stop(f"still running after {timeout_seconds:g} s\n{text or '(no Python stack)'}")


def _describe(ranks: list[_Rank]) -> str:
    """All failures, in full where they are a cause, in a line where they follow from another rank's."""
    failed = sorted(
        (rank for rank in ranks if rank.failed), key=lambda rank: (_is_consequence(rank), rank.failed_at)
    )
    lines = [f"{len(failed)} of {len(ranks)} ranks failed; first rank {failed[0].number}"]
    for rank in failed:
        text = _reason(rank).strip()
        if rank is not failed[0] and _is_consequence(rank):
            text = text.splitlines()[-1]
        lines.append(f"rank {rank.number}: {text}")
    return "\n".join(lines)


def _is_consequence(rank: _Rank) -> bool:
    """Whether the rank failed because another one did: it lost its peer, or did not end in the grace."""
    text = rank.error or ""
    return text.startswith("killed ") or any(sign in text for sign in _PEER_LOST)


def _reason(rank: _Rank) -> str:
    if rank.error is not None:
        return rank.error
    code = rank.process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code} before the function returned"
