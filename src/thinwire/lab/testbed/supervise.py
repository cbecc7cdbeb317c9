"""The launcher's side of running ranks: receive their messages, notice their ends, stop those that must not go on."""

import contextlib
import math
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from thinwire.lab.testbed.rank import stacks_path

_GRACE_SECONDS = 5.0  # for the other ranks, after one has failed
_LEAVE_SECONDS = 2.0  # for a rank that has returned, when others are stopped
_STACK_DUMP_SECONDS = 0.5
_RUNNING = "still running"

# Errors of Gloo when the process at the other end has gone, or has stopped answering.
_PEER_LOST = (
    "by peer", "Connection refused", "Broken pipe", "Socket closed", "Timed out waiting", "pair closure",
    "LostPeerError",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Result of one rank: its return value, or the traceback of its error.

    A rank killed by a signal has `exit_code == -signal` and no error text of its own. ``failed_at`` is a time of the
    launcher's clock, infinite for a rank that did not fail.
    """

    rank: int
    value: Any
    error: str | None
    exit_code: int | None
    failed_at: float = math.inf


@dataclass
class RankProcess:
    """The parent's view of one rank."""

    number: int
    process: BaseProcess
    connection: Connection
    value: Any = None
    error: str | None = None
    returned: bool = False
    running: bool = True
    reporting: bool = True  # its end of the pipe is open
    released: bool = False
    failed_at: float = math.inf  # by the parent's clock

    def handles(self) -> list[Any]:
        return [self.process.sentinel, self.connection] if self.reporting else [self.process.sentinel]

    def attend(self, on_message: Callable[[int, Any], None]) -> None:
        """Receive the pending messages, then check whether the process has ended."""
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
            if not self.returned:  # one that has returned has ended well, however its process did
                self._fail(None)

    def release(self) -> None:
        """Let a rank that has returned leave the process group and end."""
        if not self.released:
            self.released = True
            with contextlib.suppress(OSError):  # it has ended already
                self.connection.send_bytes(b"")

    def stop(self, reason: str) -> None:
        """Kill the rank if it still runs; one that has returned and only waits for the others may end."""
        if self.running and self.returned:
            self.release()
            self.process.join(_LEAVE_SECONDS)
        if self.running and self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        if self.running and not self.returned:
            self._fail(reason)
        self.running = False

    def close(self) -> None:
        self.stop("stopped by the launcher")
        self.connection.close()
        self.process.close()

    @property
    def failed(self) -> bool:
        return self.failed_at < math.inf

    def outcome(self) -> Outcome:
        return Outcome(self.number, self.value, self.error, self.process.exitcode, self.failed_at)

    def _fail(self, error: str | None) -> None:
        self.error = self.error or error
        self.failed_at = min(self.failed_at, time.monotonic())


def supervise(
    ranks: list[RankProcess],
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
            if all(rank.returned or rank.failed for rank in ranks):
                for rank in ranks:
                    rank.release()
        elif grace_end < deadline:
            _kill(running)
            for rank in running:
                rank.stop(f"killed {_GRACE_SECONDS:.0f} s after rank {first.number} had failed")
        else:
            _stop_at_timeout(running, directory, timeout_seconds)


def _stop_at_timeout(running: list[RankProcess], directory: str, timeout_seconds: float) -> None:
    """Kill the ranks that still run; their errors are the Python stacks in which they hang."""
    for rank in running:
        _signal(rank, signal.SIGUSR1)
    time.sleep(_STACK_DUMP_SECONDS)
    _kill(running)
    for rank in running:
        stacks = stacks_path(directory, rank.number)
        text = stacks.read_text() if stacks.exists() else ""
        rank.stop(f"{_RUNNING} after {timeout_seconds:g} s\n{text or '(no Python stack)'}")


def _kill(ranks: list[RankProcess]) -> None:
    """Kill all working ranks before waiting for any, so that none can still see another's end."""
    for rank in ranks:
        if not rank.returned:
            _signal(rank, signal.SIGKILL)


def _signal(rank: RankProcess, number: signal.Signals) -> None:
    pid = rank.process.pid
    assert pid is not None, "the process has been started"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def describe(ranks: list[RankProcess]) -> str:
    """Describe all failures: in full if they are a cause, in a line if they repeat or follow from another rank's.

    An error or an exit beats a signal: a rank that ends makes others abort in C++.
    """
    failed = sorted(
        (rank for rank in ranks if rank.failed),
        key=lambda rank: (_is_consequence(rank), rank.error is None and _signal_of(rank) > 0, rank.failed_at),
    )
    lines = [f"{len(failed)} of {len(ranks)} ranks failed; first rank {failed[0].number}"]
    told: set[str] = set()
    for rank in failed:
        text = _reason(rank).strip()
        last = text if text.startswith(_RUNNING) else text.splitlines()[-1]  # stacks end alike, and are not
        if rank is not failed[0] and (last in told or _is_consequence(rank)):
            text = last
        told.add(last)
        lines.append(f"rank {rank.number}: {text}")
    return "\n".join(lines)


def _is_consequence(rank: RankProcess) -> bool:
    """Whether the rank failed because another one did: it lost its peer, or did not end in the grace period."""
    text = rank.error or ""
    return text.startswith("killed ") or is_peer_lost(text)


def is_peer_lost(error: str) -> bool:
    """Return whether the text of an error says that a rank lost another one, and so is not a cause."""
    return any(sign in error for sign in _PEER_LOST)


def _reason(rank: RankProcess) -> str:
    if rank.error is not None:
        return rank.error
    if number := _signal_of(rank):
        return f"killed by {signal.Signals(number).name}"
    return f"exited with code {rank.process.exitcode} before the function returned"


def _signal_of(rank: RankProcess) -> int:
    """Return the signal that ended a rank, or 0."""
    return max(0, -(rank.process.exitcode or 0))
