"""Models that ranks hold in parts (FSDP2): restored in place bitwise, and by another number of ranks."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from holders import SECRET
from tests.checkpoint.dcp.sharded import Sharded, same
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, Storage
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.version import Version
from thinwire.checkpoint.state import coding
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


def restored_by_as_many(context: RankContext, sockets: list[str]) -> None:
    """In place, and what follows is bitwise the same, whether the optimizer has moments to load into or not."""
    undisturbed = Sharded(dist.group.WORLD, seed=1)
    with undisturbed.checkpointer(sockets) as checkpointer:
        assert checkpointer.restore() is None
        undisturbed.train(3, checkpointer)
        assert [record.skipped for record in checkpointer.records()] == ["", "", ""]
    stored = undisturbed.mine()
    undisturbed.train(2)
    for seed, steps in ((2, 1), (3, 0)):
        again = Sharded(dist.group.WORLD, seed)
        again.train(steps)
        places = [t.to_local().data_ptr() for t in again.kept() if isinstance(t, DTensor)]
        with again.checkpointer(sockets) as checkpointer:
            assert checkpointer.restore() == 3
        assert [t.to_local().data_ptr() for t in again.kept() if isinstance(t, DTensor)][: len(places)] == places
        assert same(again.mine(), stored)
        again.train(2)
        assert same(again.mine(), [*undisturbed.mine()[:-1], torch.get_rng_state()])


@pytest.mark.slow
def test_as_many_ranks_restore_bitwise(sockets: list[str]) -> None:
    run_ranks(restored_by_as_many, sockets, world_size=4, timeout_seconds=100)


def restored_by_others(context: RankContext, sockets: list[str], directory: str, compress: str | None) -> None:
    """4 ranks, 3, 4 again from memory, and 2 from the disk: each goes on where the last one was."""
    coding.LEAST_VALUES, coding.floats.is_compiled = 1, lambda: True
    first_three = dist.new_group([0, 1, 2])
    four = Sharded(dist.group.WORLD, seed=1)
    with four.checkpointer(sockets, compress=compress) as checkpointer:
        four.train(2, checkpointer)
    stored, random = four.whole(), torch.get_rng_state()
    if context.rank < 3:
        three = Sharded(first_three, seed=2)
        with three.checkpointer(sockets, compress, disk=Disk(directory, every=0.0)) as checkpointer:
            assert checkpointer.restore() == 2
            assert same(three.whole(), stored)
            assert same(list(three.model.buffers()), list(four.model.buffers()))
            assert torch.equal(torch.get_rng_state(), random)
            three.train(3, checkpointer)
        stored = three.whole()
    dist.barrier()
    topologies = {version.shard.topology for version in inventory(sockets[context.rank])}
    assert len(topologies) == 1, "versions of four ranks are not needed any more"
    four = Sharded(dist.group.WORLD, seed=3)
    own = torch.get_rng_state()
    with four.checkpointer(sockets) as checkpointer:
        assert checkpointer.restore() == 5
    found = four.whole()
    assert torch.equal(torch.get_rng_state(), own) == (context.rank == 3), "nobody else's random numbers"
    if context.rank < 3:
        assert same(found, stored)
    first_two = dist.new_group([0, 1])
    if context.rank == 0:
        for socket in set(sockets):  # the disk has it alone
            with HolderClient.connect(socket, SECRET.encode()) as client:
                client.forget("run")
    dist.barrier()
    if context.rank < 2:
        two = Sharded(first_two, seed=4)
        with two.checkpointer(sockets, disk=Disk(directory), replicas=1) as checkpointer:
            assert checkpointer.restore() in (3, 4, 5), "what was on the disk when the training ended"
        read_by_anyone(directory, checkpointer.steps, two.model.state_dict())


def read_by_anyone(directory: str, step: int, state: dict[str, Any]) -> None:
    """What is on the disk is plain DCP."""
    expected = {name: t.full_tensor() for name, t in state.items() if isinstance(t, DTensor)}
    found = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=f"{directory}/step-{step:08d}", no_dist=True)
    assert same(list(found.values()), list(expected.values()))


def inventory(socket: str) -> list[Version]:
    with HolderClient.connect(socket, SECRET.encode()) as client:
        return client.inventory("run")


@pytest.mark.slow
@pytest.mark.parametrize("compress", [pytest.param(None, marks=pytest.mark.slow), "lossless"])
def test_another_number_of_ranks_restores(sockets: list[str], tmp_path: Path, compress: str | None) -> None:
    """Also what is coded; on the disk tensors are as they are."""
    run_ranks(restored_by_others, sockets, str(tmp_path / "disk"), compress, world_size=4, timeout_seconds=100)


def with_frozen_parts(context: RankContext, sockets: list[str], compress: str | None) -> None:
    """A large model of which a small part is trained: only that is sent, once the peer has the rest."""
    coding.floats.is_compiled = lambda: True
    torch.manual_seed(1)
    model = nn.ModuleDict({"head": nn.Linear(512, 4), "rows": nn.Embedding(4000, 64), "body": nn.Linear(512, 512)})
    model["body"].bfloat16().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    storage, coded = (
        Storage(f"frozen {compress}", holder_socket=sockets[context.rank]),
        CheckpointPolicy(compress="lossless"),
    )
    if (context.rank, compress) == (1, None):
        with pytest.raises(ValueError, match=r"compress is .* on some ranks"):
            Checkpointer(model, optimizer, policy=coded, storage=storage)
    elif compress is None:
        with pytest.raises(ValueError, match=r"compress is .* on some ranks"):
            Checkpointer(model, optimizer, storage=storage)
    sent = []
    with Checkpointer(
        model, optimizer, policy=CheckpointPolicy(on_divergence="off", compress=compress), storage=storage
    ) as checkpointer:
        checkpointer.restore()
        for step in range(6):
            model["head"].weight.grad = torch.randn(4, 512)
            model["rows"].weight.grad = torch.zeros(4000, 64)
            model["rows"].weight.grad[17 * step] = 1.0
            optimizer.step()
            expected = [tensor.clone() for tensor in model.state_dict().values()]
            checkpointer.step()
            assert checkpointer.flush(20)
            checkpointer.step()  # nothing but the step has changed
            assert checkpointer.flush(20)
            sent.append(checkpointer.stats())
    assert all(record.skipped == "" for record in checkpointer.records())
    size = sent[0]["checkpoint/coded_bytes"]
    bytes_sent = [each["checkpoint/bytes_sent"] for each in sent]
    # a piece, or 64 KiB, for each of the head, the row and what is never the same (random states, the step)
    assert max(after - before for before, after in itertools.pairwise(bytes_sent)) < 0.5 * size
    assert sent[-1]["checkpoint/bytes_unchanged"] > 5 * size
    dist.barrier()
    storage = replace(storage, holder_socket=sockets[1 - context.rank])
    with Checkpointer(model, optimizer, storage=storage) as checkpointer:
        for tensor in model.state_dict().values():
            tensor.zero_()
        assert checkpointer.restore() == 12
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("compress", [None, "lossless"])
def test_what_does_not_change_is_not_sent(sockets: list[str], compress: str | None) -> None:
    run_ranks(with_frozen_parts, sockets[::2], compress, world_size=2, timeout_seconds=100)
