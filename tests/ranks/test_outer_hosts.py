"""Outer loops between hosts whose ranks train as one, by DDP or FSDP2; and of models with embedding tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.gradients.model import is_dtensor
from thinwire.lab.testbed.launch import RankContext, run_ranks

STEPS = 6


class Net(nn.Module):
    """A table, layers of odd sizes, and a batch norm, whose buffers differ from host to host."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(900, 16)
        self.first = nn.Linear(16, 70)
        self.norm = nn.BatchNorm1d(70)
        self.last = nn.Linear(70, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(self.table(ids)))))


def batch(step: int, rank: int) -> Tensor:
    """More ids in every step, and on every rank of a host."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 900, (8 + 2 * step,), generator=drawn)


def mesh_of(hosts: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts), mesh_dim_names=("hosts", "host"))


def inside(kind: str, mesh: DeviceMesh) -> nn.Module:
    """A model of which the ranks of a host train one."""
    torch.manual_seed(0)
    if kind == "ddp":
        return DistributedDataParallel(Net(), process_group=mesh.get_group("host"))
    model = Net()
    fully_shard(model.first, mesh=mesh["host"])
    return fully_shard(model, mesh=mesh["host"])


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, put together from shards."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    named: Any = module.named_parameters()
    return {name: (entry.full_tensor() if is_dtensor(entry) else entry).detach().clone() for name, entry in named}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(ids).square().mean() * scale).backward()
    optimizer.step()


def by_hand(hosts: int, ranks: int, every: int, batches: Callable[[int, int], Tensor] = batch) -> dict[str, Tensor]:
    """Local SGD of hosts in one process; a host takes the mean of the gradients of its ranks."""
    torch.manual_seed(0)
    models = [Net()]
    models += [copy.deepcopy(models[0]) for _ in range(hosts - 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.5) for model in models]
    for step in range(STEPS):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(ranks):
                (model(batches(step, host * ranks + rank)).square().mean() / ranks).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([entry.detach() for entry in parameters]).mean(0)
                for entry in parameters:
                    entry.detach().copy_(mean)
    return {name: entry.detach() for name, entry in models[0].named_parameters()}


def gathered(tensors: dict[str, Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    mine = torch.cat([tensor.flatten() for tensor in tensors.values()])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(all_of_them[0], other) for other in all_of_them[1:])


def train_hosts(context: RankContext, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    mesh = mesh_of()
    model = inside(kind, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    recipe = thinwire.outer.local_sgd(every=2)
    sync = thinwire.attach(model, outer=recipe, optimizer=optimizer, process_group=mesh["hosts"], **options)
    for step in range(STEPS):
        step_of(model, optimizer, batch(step, context.rank))
    found = whole(model)
    stats, same = sync.stats(), gathered(found)
    sync.detach()
    return {"parameters": found, "same": same, "stats": stats}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_hosts_whose_ranks_train_as_one(kind: str) -> None:
    ranks = [outcome.value for outcome in run_ranks(train_hosts, kind, {}, world_size=4)]
    right = by_hand(2, 2, 2)
    assert all(rank["same"] for rank in ranks)
    for name, mean in right.items():
        torch.testing.assert_close(ranks[0]["parameters"][name], mean, rtol=1e-4, atol=1e-5, msg=name)
