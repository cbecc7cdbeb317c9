"""Layouts of models by FSDP2 on one mesh and on several, each attached beside the same one without thinwire."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks
ROWS, WIDTH = 2100, 16


class Network(nn.Module):
    """A table, attention that is none, experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, WIDTH)
        self.att = nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 64))
        self.experts = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.experts(self.att(self.words(ids))))


class Meshes:
    """The meshes of four ranks that layouts use."""

    def __init__(self) -> None:
        self.dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        self.two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        self.wide = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
        self.tall = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))


Layout = Callable[[Network, Meshes], nn.Module]


def blocks(mesh: Callable[[Meshes], DeviceMesh], **options: Any) -> Layout:
    def lay_out(model: Network, meshes: Meshes) -> nn.Module:
        for part in (model.words, model.att, model.experts):
            fully_shard(part, mesh=mesh(meshes), **options)
        return fully_shard(model, mesh=mesh(meshes), **options)

    return lay_out


def moe(of_experts: Callable[[Meshes], DeviceMesh], of_rest: Callable[[Meshes], DeviceMesh], **options: Any) -> Layout:
    """Experts on a mesh of their own, as torchtitan lays them out."""

    def lay_out(model: Network, meshes: Meshes) -> nn.Module:
        fully_shard(model.experts, mesh=of_experts(meshes), **options)
        fully_shard(model.att, mesh=of_rest(meshes), **options)
        return fully_shard(model, mesh=of_rest(meshes), **options)

    return lay_out


def expert_parallel(model: Network, meshes: Meshes) -> nn.Module:
    """Experts whose parameters are parts on one dimension, and sharded on the other."""
    parallelize_module(model.experts, meshes.two["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model.experts, mesh=meshes.two["outer"])
    model.experts.set_gradient_divide_factor(4.0)  # type: ignore[operator]
    model.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return fully_shard(model, mesh=meshes.dp)


def tensor_parallel(model: Network, meshes: Meshes) -> nn.Module:
    parallelize_module(model.att, meshes.two["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model.att, mesh=meshes.two["outer"])
    return fully_shard(model, mesh=meshes.two["outer"])


def stage(model: Network, meshes: Meshes) -> nn.Module:
    """A stage of a pipeline of two, which its two ranks have for themselves."""
    is_first = meshes.two.get_local_rank("outer") == 0
    part = model.att if is_first else nn.Linear(WIDTH, 960)
    return fully_shard(nn.Sequential(model.words, part), mesh=meshes.two["inner"])


def replicated(model: Network, meshes: Meshes) -> nn.Module:
    replicate(model.att)
    return replicate(model)


def without_tables(model: Network, meshes: Meshes) -> nn.Module:
    fully_shard(model.att, mesh=meshes.two, ignored_params={model.words.weight})
    return fully_shard(model, mesh=meshes.two, ignored_params={model.words.weight})


def frozen(model: Network, meshes: Meshes) -> nn.Module:
    model.att.requires_grad_(False)
    model.words.requires_grad_(False)
    return blocks(lambda meshes: meshes.dp)(model, meshes)


def tied(model: Network, meshes: Meshes) -> nn.Module:
    model.experts = nn.Linear(64, WIDTH)  # type: ignore[assignment]
    model.head = nn.Linear(WIDTH, ROWS, bias=False)
    model.head.weight = model.words.weight
    return fully_shard(model, mesh=meshes.dp)


def one(mesh: Meshes) -> DeviceMesh:
    return mesh.dp


def pairs(mesh: Meshes) -> DeviceMesh:
    return mesh.two["outer"]


def both(mesh: Meshes) -> DeviceMesh:
    return mesh.two


BF16, HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
LOSSLESS: dict[str, Any] = {"dense": "lossless"}
BITS, ROUNDED, SIXTEEN = 0.0, 1e-5, 2e-2
LAYOUTS: dict[str, tuple[Layout, dict[str, Any], float]] = {
    "root": (lambda model, meshes: fully_shard(model, mesh=meshes.dp), {}, ROUNDED),
    "blocks": (blocks(one), {}, ROUNDED),
    "native": (blocks(one), {"dense": "native", "rows": "dense"}, BITS),
    "rows of tables": (blocks(one), {"dense": "native"}, ROUNDED),
    "not resharded": (blocks(one, reshard_after_forward=False), {}, ROUNDED),
    "bfloat16, sums of float32": (blocks(one, mp_policy=BF16), {}, SIXTEEN),
    "bfloat16": (blocks(one, mp_policy=HALF), {}, SIXTEEN),
    "coded": (blocks(one), LOSSLESS, ROUNDED),
    "pairs": (blocks(both), {}, ROUNDED),
    "pairs, coded": (blocks(both), LOSSLESS, ROUNDED),
    "replicas of one": (blocks(lambda meshes: meshes.wide), {}, ROUNDED),
    "shards of one replica": (blocks(lambda meshes: meshes.tall), {}, ROUNDED),
    "replicate": (replicated, {}, ROUNDED),
    "offloaded": (blocks(one, **OFFLOAD), {}, ROUNDED),
    "offloaded, coded": (blocks(one, **OFFLOAD), LOSSLESS, ROUNDED),
    "offloaded pairs": (blocks(both, **OFFLOAD), {}, ROUNDED),
    "experts": (moe(pairs, one), {}, ROUNDED),
    "experts, coded": (moe(pairs, one), LOSSLESS, ROUNDED),
    "experts, offloaded": (moe(pairs, one, **OFFLOAD), {}, ROUNDED),
    "experts beside pairs": (moe(pairs, both), {}, ROUNDED),
    "experts in pairs": (moe(both, one), {}, ROUNDED),
    "expert parallel": (expert_parallel, {}, ROUNDED),
    "expert parallel, coded": (expert_parallel, LOSSLESS, ROUNDED),
    "tensor parallel": (tensor_parallel, {}, ROUNDED),
    "stage": (stage, {}, ROUNDED),
    "columns": (blocks(one, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1)), {}, ROUNDED),
    "without tables": (without_tables, {}, ROUNDED),
    "frozen": (frozen, {}, ROUNDED),
    "tied": (tied, {}, ROUNDED),
}
LOSSY: dict[str, Any] = {"dense": thinwire.compress.bf16()}
SENDS_NOTHING = {"native"}


def train(model: nn.Module, rank: int) -> list[Any]:
    """Losses of steps, of which one has two micro-batches, and this rank's part of each parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    found: list[Any] = []
    for step in range(4):
        if step in (1, 2):
            model.set_requires_gradient_sync(step == 2)  # type: ignore[operator]
        draw = torch.Generator().manual_seed(10 * step + rank)
        loss = model((torch.rand(6, 5, generator=draw) ** 3 * ROWS).long()).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    parts = [entry.to_local() if isinstance(entry, DTensor) else entry for entry in model.parameters()]
    return [*found, *(part.detach().clone() for part in parts)]


def _layouts(context: RankContext, names: list[str]) -> None:
    os.environ["THINWIRE_HOST"] = str(context.rank)
    meshes = Meshes()
    for name in names:
        lay_out, options, apart = LAYOUTS[name]
        data = context.rank if "parallel" not in name or name.startswith("expert") else context.rank // 2
        stock = lay_out(Network(), meshes)
        if name == "without tables":  # whose gradients nobody averages but thinwire
            stock.words.weight.register_post_accumulate_grad_hook(_average)  # type: ignore[union-attr]
        expected = train(stock, data)
        model = lay_out(Network(), meshes)
        sync = thinwire.attach(model, **options)
        for got, wanted in zip(train(model, data), expected, strict=True):
            assert torch.equal(got, wanted) or apart, name
            torch.testing.assert_close(got, wanted, rtol=max(apart, 1e-6), atol=apart / 10, msg=name)
        assert (sync.stats()["comm/bytes_sent"] > 0) == (name not in SENDS_NOTHING), (name, sync.table())
        sync.detach()
        dist.barrier()
    logged: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("thinwire")
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    sync = thinwire.attach(moe(pairs, one)(Network(), meshes), **LOSSY)
    logger.removeHandler(handler)
    assert len(logged) == (context.rank == 0)
    assert all("experts.0.weight, experts.0.bias, experts.2.weight, experts.2.bias stay exact" in one for one in logged)
    sync.detach()


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


@pytest.mark.slow
def test_experts_and_offloaded_parameters_are_those_of_fsdp() -> None:
    run_ranks(_layouts, ["experts", "offloaded"], world_size=4, timeout_seconds=90)


@pytest.mark.slow
def test_layouts_are_those_of_fsdp() -> None:
    assert len(LAYOUTS) >= 25
    run_ranks(_layouts, list(LAYOUTS), world_size=4, timeout_seconds=300)
