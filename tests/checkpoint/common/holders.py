"""Holders as on several hosts, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.checkpoint.registration import holders_of

SECRET = "a secret of the tests, long enough"


@contextmanager
def running_holders(directory: Path, memory_budget: str, names: str = "ab") -> Iterator[list[str]]:
    """Run a holder for each letter under `SECRET`, and yield their sockets. Those that are gone at the end may be."""
    sockets = [str(directory / name) for name in names]
    with ExitStack() as stack:
        for socket in sockets:
            start_holder(HolderOptions(socket=socket, memory_budget=memory_budget, drain_seconds=0.0))
            stack.callback(_stop, socket)
        yield sockets


def survives(holders: Sequence[Collection[int]], failed: Collection[int]) -> bool:
    """Return whether every shard has a copy left when the machines ``failed`` are lost at once."""
    lost = set(failed)
    return not any(lost.issuperset(hosts) for hosts in holders)


def _stop(socket: str) -> None:
    with suppress(Exception), HolderClient.connect(socket, SECRET.encode()) as client:
        stop_holder(client)


def placed_at(holder: str, holders: Sequence[str], replicas: int, domains: Sequence[str] | None = None) -> list[int]:
    """Return the ranks whose shards are placed at a holder: its own host's and those it has copies of."""
    return [rank for rank, copies in enumerate(holders_of(holders, replicas, domains)) if holder in copies]
