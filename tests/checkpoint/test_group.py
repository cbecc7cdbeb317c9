"""What one rank lacks, or was given otherwise, is an error of all: nobody waits for a rank that has given up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holders import SECRET, running_holders
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, Storage, registration
from thinwire.checkpoint.dcp.memory import MemoryReader, MemoryWriter
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    with running_holders(tmp_path, "20MB", "ab") as made:
        yield made


def make(socket: str, model: Any = None, policy: CheckpointPolicy | None = None, **storage: Any) -> Checkpointer:
    model = nn.Linear(3, 3) if model is None else model
    named = Storage(**{"run_id": "run", "holder_socket": socket, **storage})
    return Checkpointer(
        model, torch.optim.SGD(nn.Linear(3, 3).parameters()), policy=policy or CheckpointPolicy(), storage=named
    )


def refuses(context: RankContext, sockets: list[str], directory: str) -> None:
    for name in ("LOCAL_WORLD_SIZE", "THINWIRE_RUN_ID", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    socket, is_odd = sockets[context.rank], context.rank == 1
    for reason, odd in (
        ("rank 1: a run needs a name", {"run_id": None}),
        ("rank 1: /nonexistent is not a directory", {"holder_socket": "/nonexistent/holder.sock"}),
        ("rank 1: model is of class object", {"model": object()}),
        ("rank 1: max_overhead=-1", {"policy": CheckpointPolicy(max_overhead=-1)}),
        ("every is 1 on some ranks and 2 on others", {"policy": CheckpointPolicy(every=2)}),
        ("on_divergence is 'off' on some ranks", {"policy": CheckpointPolicy(on_divergence="off")}),
        ("replicas is 1 on some ranks and 2 on others", {"replicas": 1}),
        ("disk is 'a Disk' on some ranks and None on others", {"disk": Disk(directory)}),
        ("another run_id", {"run_id": "other"}),
    ):
        with pytest.raises(ValueError, match=reason):
            make(socket, **(odd if is_odd else {}))
    for writer in (MemoryReader, MemoryWriter):
        with pytest.raises(ValueError, match="rank 1: a run needs a name"):
            writer(None if is_odd else "run", holder_socket=socket)
    with make(socket) as checkpointer:
        with pytest.raises(ValueError, match="step is 4 on some ranks and None on others"):
            checkpointer.restore(step=4 if is_odd else None)
        with pytest.raises(ValueError, match="fresh is False on some ranks and True on others"):
            checkpointer.restore(fresh=is_odd)
        with pytest.raises(ValueError, match="pass one of them"):
            checkpointer.restore(fresh=True, step=1)
        assert checkpointer.restore() is None


def test_what_one_rank_lacks_is_an_error_of_all(sockets: list[str], tmp_path: Path) -> None:
    run_ranks(refuses, sockets, str(tmp_path), world_size=2, timeout_seconds=45)


def in_containers(context: RankContext, sockets: list[str]) -> None:
    """Of one machine, each with a network of its own."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    registration.network_identity = lambda: f"network {context.rank}"
    with pytest.raises(ValueError, match=r"other hosts cannot reach the holder at 127.*thinwire holder --stop.*--bind"):
        make(sockets[context.rank])
    with pytest.warns(UserWarning, match="all ranks are on one machine") if context.rank == 0 else open(os.devnull):
        make(sockets[0]).close()  # which both have by its socket


def test_holders_that_containers_cannot_reach_are_no_hosts(sockets: list[str]) -> None:
    run_ranks(in_containers, sockets, world_size=2, timeout_seconds=45)
