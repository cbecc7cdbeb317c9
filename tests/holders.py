"""Holders as on two hosts, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from thinwire.holder.client import HolderClient
from thinwire.holder.start import HolderOptions, start_holder, stop_holder

SECRET = "a secret of the tests, long enough"


@contextmanager
def two_holders(directory: Path, memory_budget: str) -> Iterator[list[str]]:
    """Run two holders under `SECRET`, and yield their sockets."""
    places = [str(directory / name) for name in "ab"]
    with ExitStack() as stack:
        for place in places:
            start_holder(HolderOptions(socket=place, memory_budget=memory_budget, drain_seconds=0.0))
            stack.callback(lambda place=place: stop_holder(HolderClient.connect(place, SECRET.encode())))
        yield places
