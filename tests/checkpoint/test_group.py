"""What one rank lacks, or was given otherwise, is an error of all: nobody waits for a rank that has given up."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holders import SECRET, running_holders
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, Storage, registration
from thinwire.checkpoint.dcp.memory import MemoryReader, MemoryWriter
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

BRIDGE = "172.17.0.1:7411"


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    with running_holders(tmp_path, "20MB", "ab") as made:
        yield made


def make(place: str, model: Any = None, policy: CheckpointPolicy | None = None, **storage: Any) -> Checkpointer:
    model = nn.Linear(3, 3) if model is None else model
    named = Storage(**{"run_id": "run", "holder_socket": place, **storage})
    return Checkpointer(
        model, torch.optim.SGD(nn.Linear(3, 3).parameters()), policy=policy or CheckpointPolicy(), storage=named
    )


def refuses(context: RankContext, sockets: list[str], directory: str) -> None:
    for name in ("LOCAL_WORLD_SIZE", "THINWIRE_RUN_ID", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    place, is_odd = sockets[context.rank], context.rank == 1
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
            make(place, **(odd if is_odd else {}))
    for writer in (MemoryReader, MemoryWriter):
        with pytest.raises(ValueError, match="rank 1: a run needs a name"):
            writer(None if is_odd else "run", holder_socket=place)
    with make(place) as checkpointer:
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


def at_another_address(context: RankContext, sockets: list[str], closed: str) -> list[str]:
    """Rank 1 on an address of its host that others do not reach; then both on one that each of their hosts has."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    status, said = HolderClient.holder_status, []
    for machine, addresses in (
        ("one machine", {1: closed}),
        (f"machine {context.rank}", dict.fromkeys((0, 1), BRIDGE)),
    ):

        def holder_status(client: HolderClient, of: dict[int, str] = addresses) -> dict[str, Any]:
            result = status(client)
            return {**result, "address": of.get(context.rank, result["address"])}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HolderClient, "holder_status", holder_status)
            patch.setattr(registration, "boot_id", lambda machine=machine: machine)
            with pytest.raises(ValueError) as caught:
                make(sockets[context.rank])
        said.append(str(caught.value))
    make(sockets[context.rank]).close()
    return said


def test_a_holder_at_an_address_that_others_do_not_reach_is_refused_with_what_corrects_it(sockets: list[str]) -> None:
    """Such as that of a bridge, or of a second interface: nobody would get a copy, and a lost host would be the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    outcomes = run_ranks(at_another_address, sockets, closed, world_size=2, timeout_seconds=60)
    first, second = (outcome.value for outcome in outcomes)
    assert first == second, "on all ranks"
    (unreached, shared), host = first, os.uname().nodename
    assert re.match(rf"rank 0: {host} cannot reach the holder of {host} at {closed}: .*refused\. ", unreached)
    assert shared.startswith(f"{host} and {host} have their holders at {BRIDGE}: ")
    for remedy in ("thinwire holder --stop", "--bind ADDRESS", "--local-addr ADDRESS", "THINWIRE_BIND"):
        assert remedy in unreached
        assert remedy in shared
