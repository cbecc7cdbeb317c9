"""Holders in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holders_of_hosts import SECRET, wait_for
from thinwire.checkpoint.holder.server import Holder, HolderConfig


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    """Start holders in this process, each as on a host of its own."""
    with contextlib.ExitStack() as stack:

        def start(name: str, **options: Any) -> Holder:
            given = {"timeout_seconds": 2.0, "deadline_seconds": 5.0, "budget_bytes": 200 << 20}
            given |= {"drain_seconds": 0.0, "secret": SECRET, **options}
            config = HolderConfig(socket=str(tmp_path / name), **given)
            return stack.enter_context(Holder(config))

        yield start
    wait_for(lambda: not any(thread.name.startswith("replicator") for thread in threading.enumerate()))
