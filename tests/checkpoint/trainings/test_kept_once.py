"""Ranks that train the same keep one state on each host, and send no more than what is theirs alone; to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holders import SECRET, running_holders
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, Storage
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import stop_holder
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Of the holders of three hosts."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with running_holders(tmp_path, "60MB", "abc") as made:
        yield made


def train(
    context: RankContext, sockets: list[str], steps: int, until: int, sharding: str, on_disk: bool = False
) -> tuple[int | None, list[float], float]:
    """Train to a step; what was restored, the parameters and moments of this rank at the end, and its state's bytes."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 20_000), nn.ReLU(), nn.Linear(20_000, 1))
    if sharding:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    disk = Disk(Path(sockets[0]).parent / "disk", every="1d") if on_disk else None
    storage = Storage("run", disk=disk, holder_socket=sockets[context.rank])
    policy = CheckpointPolicy(max_overhead=None)
    with Checkpointer(model, optimizer, storage=storage, policy=policy) as checkpointer:
        restored = checkpointer.restore()
        for step in range(restored or 0, until):
            optimizer.zero_grad()
            model(torch.full((4, 8), 0.1 * step)).square().mean().backward()
            for parameter in model.parameters() if not sharding else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            checkpointer.step()
            assert checkpointer.flush(30)
            dist.barrier()
        size = checkpointer.stats()["checkpoint/bytes"]
        assert checkpointer.stats()["checkpoint/certified_step"] >= min(until - 2, 2)
        assert checkpointer.stats()["checkpoint/at_risk_steps"] <= 1
        if on_disk:
            checkpointer.persist_now()  # which compares ranks that should be alike
        else:  # so the default makes a version of every step but one in a hundred
            assert checkpointer._governor.sends_little
    local = [getattr(each, "_local_tensor", each).detach() for each in model.parameters()]
    moments = [getattr(each["exp_avg"], "_local_tensor", each["exp_avg"]) for each in optimizer.state.values()]
    return restored, torch.cat([each.flatten() for each in (*local, *moments)]).tolist(), size


def start(sockets: list[str], until: int, sharding: str) -> list[Any]:
    outcomes = run_ranks(train, sockets, 0, until, sharding, world_size=4, timeout_seconds=100)
    return [outcome.value for outcome in outcomes]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_state_is_kept_once_on_a_host_and_a_lost_one_is_filled_again(sockets: list[str], sharding: str) -> None:
    """4 ranks on 2 hosts. Then the ranks of the second one go on on a third, with an empty memory, to the same bits as
    without that; and so they do renumbered, the ranks of the two hosts exchanged."""
    a, b, c = sockets
    first = start([a, a, b, b], 5, sharding)
    # of a rank's state; a host has the parts of two ranks if it is sharded
    whole = first[0][2] * (2 if sharding else 1)
    for socket in (a, b):
        with HolderClient.connect(socket, SECRET.encode()) as client:
            status = client.holder_status()
            assert status["used_bytes"] < 2.1 * whole + 500_000, "the rest is the ranks' own, and layouts"
            assert status["bytes_sent"] < 5 * 0.02 * whole
    with HolderClient.connect(b, SECRET.encode()) as client:
        stop_holder(client)
    second = start([a, a, c, c], 7, sharding)
    assert [restored for restored, *_ in second] == [5] * 4
    third = start([c, c, a, a], 8, sharding)
    assert [restored for restored, *_ in third] == [7] * 4
    with HolderClient.connect(a, SECRET.encode()) as client:
        client.forget("run")
    with HolderClient.connect(c, SECRET.encode()) as client:
        client.forget("run")
    undisturbed = start([a, a, c, c], 8, sharding)
    assert [values for _, values, _ in third] == [values for _, values, _ in undisturbed]


@pytest.mark.slow
def test_ranks_with_other_parts_are_not_compared_on_a_disk(sockets: list[str], tmp_path: Path) -> None:
    """Parts of a sharded model differ, in memory and on a disk; copies of a part are the same."""
    hosts = [sockets[0]] * 2 + [sockets[1]] * 2
    for until, restored in ((4, None), (5, 4)):
        outcomes = run_ranks(train, hosts, 0, until, "hybrid", True, world_size=4, timeout_seconds=100)
        assert [outcome.value[0] for outcome in outcomes] == [restored] * 4
        for socket in sockets[:2]:  # the disk has it alone
            with HolderClient.connect(socket, SECRET.encode()) as client:
                client.forget("run")
