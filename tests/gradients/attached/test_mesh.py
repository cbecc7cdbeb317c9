"""`attach` in the data-parallel dimension of a mesh: beside tensor parallelism and pipeline stages, as stock DDP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.gradients.module import local_of
from thinwire.lab.testbed.launch import RankContext, preload, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

preload("torch.distributed.tensor.parallel")
preload("torch.distributed.pipelining")
WORDS, TAGS, WIDTH, STEPS, MICRO_BATCHES = 1200, 600, 16, 4, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}  # GPipe with DDP fails without thinwire too, in torch 2.13


class Bottom(nn.Module):
    """A table that all ranks of a replica have, one whose rows or columns are split among them, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.tags = nn.Embedding(TAGS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.norm(self.words(words) + self.tags(words % TAGS))


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 7)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.down(torch.relu(self.up(hidden))))


SPLIT = {
    "tags": RowwiseParallel(input_layouts=Replicate()),
    "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(),
}


def split(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the layers of a module for tensor parallelism, wherever they are in it."""
    for name, child in module.named_modules():
        if name.endswith("norm"):
            whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
            parallelize_module(child, mesh, whole)
        if (style := SPLIT.get(name.rpartition(".")[2])) is not None:
            parallelize_module(child, mesh, style)
    return module


def wrapped(module: nn.Module, mesh: DeviceMesh, kind: str) -> nn.Module:
    """The model to attach: in DDP over the data-parallel dimension, sharded over it, or plain."""
    if kind == "fsdp":
        return fully_shard(module, mesh=mesh["dp"])
    return DistributedDataParallel(module, device_mesh=mesh["dp"]) if kind == "ddp" else module


def attached(model: nn.Module, mesh: DeviceMesh, options: dict[str, Any] | None) -> thinwire.Synchronizer | None:
    if options is None:
        return None
    group = {} if isinstance(model, (DistributedDataParallel, FSDPModule)) else {"process_group": mesh["dp"]}
    return thinwire.attach(model, **group, **options)


def average(model: nn.Module, mesh: DeviceMesh) -> None:
    """What attach does for a plain module, by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = local_of(parameter.grad)
            dist.all_reduce(gradient, group=mesh["dp"].get_group())
            gradient /= mesh["dp"].size()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten() % 7)


def state_of(model: nn.Module) -> list[Tensor]:
    return [local_of(parameter.detach()).clone() for parameter in model.parameters()]


def spread(mesh: DeviceMesh, tensors: list[Tensor]) -> float:
    """The largest difference from the mean of the replicas: 0.0 if all have the same bits."""
    largest = 0.0
    for tensor in tensors:
        low, high = tensor.clone(), tensor.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh["dp"].get_group())
        dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh["dp"].get_group())
        largest = max(largest, (high - low).max().item())
    return largest


def train_split(mesh: DeviceMesh, kind: str, options: dict[str, Any] | None) -> tuple[list[float], Any, list[Tensor]]:
    torch.manual_seed(0)
    model = wrapped(split(nn.Sequential(Bottom(), Top()), mesh["tp"]), mesh, kind)
    sync = attached(model, mesh, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    losses = []
    for step in range(STEPS):
        words = torch.randint(WORDS, (4 + 2 * step,), generator=data)
        optimizer.zero_grad()
        loss = loss_of(model(words), words)
        loss.backward()
        if kind == "plain" and sync is None:
            average(model, mesh)
        optimizer.step()
        losses.append(loss.item())
    return losses, sync, state_of(model)


def _beside_tensor_parallelism(context: RankContext, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses, _, state = train_split(mesh, kind, None)
    for options in ({}, {"rows": "zen"}):
        mine, sync, after = train_split(mesh, kind, options)
        assert mine == losses, f"{options}: {mine}, stock {losses}"
        for one, other in zip(after, state, strict=True):
            torch.testing.assert_close(one, other)
        assert spread(mesh, after) == 0.0
        assert sync is not None
        rows = {row["name"]: row for row in sync.table()}
        assert {"0.words.weight", "0.tags.weight"} <= set(rows), "tables travel as rows, whole ones and split ones"
        assert rows["0.tags.weight"]["dense_bytes"] == TAGS // 2 * WIDTH * 4, "this rank has half of the table"
    mine, sync, after = train_split(mesh, kind, {"dense": thinwire.compress.power_sgd(2)})
    assert sync is not None
    assert {"1.up.weight", "1.down.weight"} <= {row["name"] for row in sync.table()}
    assert spread(mesh, after) == 0.0
    assert mine != losses
    assert abs(mine[-1] - losses[-1]) < 0.2 * losses[-1]


def _sharded(context: RankContext) -> None:
    """Sharded over one dimension and split over the other: exact is left to FSDP, compressed means are of each part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses, _, state = train_split(mesh, "fsdp", None)
    mine, _, after = train_split(mesh, "fsdp", {})
    assert mine == losses
    assert all(map(torch.equal, after, state))
    mine, sync, after = train_split(mesh, "fsdp", {"dense": {"1.*": thinwire.compress.power_sgd(2)}})
    assert sync is not None
    assert {"1.up.weight", "1.down.weight"} <= {row["name"] for row in sync.table()}
    assert not all(map(torch.equal, after, state))
    assert mine[-1] == pytest.approx(losses[-1], rel=0.2)


@pytest.mark.slow
def test_trains_sharded_beside_tensor_parallelism() -> None:
    run_ranks(_sharded, world_size=4)


@pytest.mark.parametrize("kind", ["ddp", pytest.param("plain", marks=pytest.mark.slow)])
def test_trains_beside_tensor_parallelism(kind: str) -> None:
    run_ranks(_beside_tensor_parallelism, kind, world_size=4)


def train_stages(
    mesh: DeviceMesh, schedule: str, kind: str, options: dict[str, Any] | None
) -> tuple[list[float], Any, list[Tensor]]:
    torch.manual_seed(0)
    module = (Bottom, Top)[mesh["pp"].get_local_rank()]()
    if "tp" in (mesh.mesh_dim_names or ()):
        module = split(module, mesh["tp"])
    model = wrapped(module, mesh, kind)
    sync = attached(model, mesh, options)
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
    steps = SCHEDULES[schedule](stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    losses: list[float] = []
    for _ in range(STEPS):
        words = torch.randint(WORDS, (2 * MICRO_BATCHES, 4), generator=data)
        optimizer.zero_grad()
        found: list[Tensor] = []
        steps.step(*([words] if rank == 0 else []), **({"target": words, "losses": found} if rank else {}))
        if kind == "plain" and sync is None:
            average(model, mesh)
        optimizer.step()
        losses += [loss.item() for loss in found]
    return losses, sync, state_of(model)


def _beside_stages(context: RankContext, shape: tuple[int, ...], schedule: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp")[: len(shape)])
    losses, _, state = train_stages(mesh, schedule, kind, None)
    mine, sync, after = train_stages(mesh, schedule, kind, {"rows": "zen"})
    assert bool(losses) == (mesh["pp"].get_local_rank() == 1)
    assert mine == pytest.approx(losses, rel=1e-6)
    assert spread(mesh, after) == 0.0
    for one, other in zip(after, state, strict=True):
        torch.testing.assert_close(one, other)
    if kind == "plain":
        assert sync.stats()["comm/steps"] == STEPS * MICRO_BATCHES
    names = {row["name"] for row in sync.table()}
    assert ("words.weight" in names) == (mesh["pp"].get_local_rank() == 0)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("gpipe", "plain"), *(pytest.param("1f1b", kind, marks=pytest.mark.slow) for kind in ("ddp", "plain"))],
)
def test_trains_beside_pipeline_stages(schedule: str, kind: str) -> None:
    run_ranks(_beside_stages, (2, 2), schedule, kind, world_size=4)


@pytest.mark.slow
def test_trains_on_three_dimensions() -> None:
    run_ranks(_beside_stages, (2, 2, 2), "1f1b", "ddp", world_size=8)


def _refused(context: RankContext) -> None:
    """Every wrong mesh is refused on each rank, without waiting for another."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = split(Top(), mesh["tp"])

    def refused(error: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=error):
            thinwire.attach(module, timeout=timedelta(seconds=20), **options)

    refused(
        r"'up.weight' is a DTensor, Shard\(dim=0\) over ranks \[[0-3], [0-3]\].*mesh\['dp'\]", process_group=mesh["tp"]
    )
    refused(r"'up.weight' is a DTensor.*pass process_group=mesh\['dp'\]")
    refused(r"the DeviceMesh has 2 dimensions; pass one of them", process_group=mesh)
    refused(r"process_group is 'dp'", process_group="dp")
    ranks = [0, 1]
    part = DeviceMesh("cpu", ranks, mesh_dim_names=("dp",))
    if context.rank not in ranks:
        with pytest.raises(ValueError, match="this rank is not in the mesh"):
            thinwire.attach(Top(), process_group=part)
    with pytest.raises(KeyError, match="data"):
        thinwire.attach(module, process_group=mesh["data"])
    sync = thinwire.attach(module, process_group=mesh["dp"])
    sync.detach()


def test_refuses_a_wrong_mesh_on_all_ranks() -> None:
    run_ranks(_refused, world_size=4)


def _apart(context: RankContext) -> None:
    """Stages attach at the same time, in any order, and fail without each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    model = (Bottom, Top)[stage]()
    if stage and replica:
        model.out = nn.Linear(WIDTH, 9)
    if stage:
        with pytest.raises(thinwire.MismatchError, match=r"out\.weight"):
            thinwire.attach(model, timeout=timedelta(seconds=20), process_group=mesh["dp"])
        return
    sync = thinwire.attach(model, process_group=mesh["dp"])
    for step in range(2):
        model(torch.arange(4 + step) + 7 * replica).sum().backward()
    assert spread(mesh, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]) == 0.0
    sync.detach()


def test_a_stage_that_fails_does_not_disturb_another() -> None:
    run_ranks(_apart, world_size=4)


def _sharded_stages(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    losses, _, state = train_stages(mesh, "1f1b", "fsdp", None)
    mine, _, after = train_stages(mesh, "1f1b", "fsdp", {})
    assert mine == losses
    assert all(map(torch.equal, after, state))
    bf16 = {"dense": {"*.weight": thinwire.compress.bf16()}}
    one, _, first = train_stages(mesh, "1f1b", "fsdp", bf16)
    assert one == pytest.approx(losses, rel=1e-2)
    for value, exact in zip(first, state, strict=True):
        torch.testing.assert_close(value, exact, rtol=2e-2, atol=2e-3)


@pytest.mark.slow
def test_trains_sharded_stages() -> None:
    """The schedule reduces outside of any backward, so every mean is there when that returns."""
    run_ranks(_sharded_stages, world_size=4)
