"""FSDP2 without replicas on Gloo, whose reduce-scatter sends a whole all-reduce: ours sends each part to its owner."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire
from thinwire.gradients.sharded.layout import ShardedHooks
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


def network() -> nn.Sequential:
    """Layers of which one is tiny, and none that a number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(61, 211), nn.Tanh(), nn.Linear(211, 97), nn.Linear(97, 3))


def sharded(model: nn.Sequential, **options: Any) -> nn.Module:
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, rank: int, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    found: list[Any] = []
    for step in range(steps):
        model.set_requires_gradient_sync(step != 1)  # type: ignore[operator]
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(7, 61, generator=generator)).float().square().mean()
        loss.backward()
        found.append(loss.item())
        if step != 1:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item())  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(tensor.full_tensor() for tensor in model.state_dict().values())]


def _scatters(context: RankContext) -> None:
    os.environ["THINWIRE_HOST"] = str(context.rank)
    dist.init_process_group()  # whose back end has no name of its own
    policies: tuple[dict[str, Any], ...] = ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)})
    for options in policies:
        stock, ours = sharded(network(), **options), sharded(network(), **options)
        sync = thinwire.attach(ours)
        for got, expected in zip(train(ours, context.rank), train(stock, context.rank), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
        rows = [row for row in sync.table() if row["kind"] == "reduce-scatter"]
        assert [row["scheme"] for row in rows] == ["owners"]
        assert "twice the bytes" in str(rows[0]["reason"])
        assert rows[0]["predicted_bytes"] == rows[0]["bytes"]
        stats = sync.stats()
        assert 0.48 < stats["comm/bytes_sent"] / stats["comm/bytes_dense"] < 0.52
        assert "lossless/values" not in stats
        sync.detach()
    native = thinwire.attach(ours, dense="native")
    assert train(ours, context.rank)
    assert native.stats()["comm/bytes_sent"] == 0
    native.detach()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_go_straight_to_owners(world_size: int) -> None:
    run_ranks(_scatters, world_size=world_size, timeout_seconds=60, init_process_group=False)


def _one_host(context: RankContext) -> None:
    ours = sharded(network())
    sync = thinwire.attach(ours)
    before = copy.deepcopy(train(ours, context.rank))
    assert sync.stats()["comm/bytes_sent"] == 0
    assert all(isinstance(one, (float, Tensor)) for one in before)
    assert dist.get_world_size() == 2


def test_on_one_host_gradients_stay_with_fsdp() -> None:
    run_ranks(_one_host, world_size=2, timeout_seconds=60)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # the latter for a GPU, whose NCCL leaves each rank its part
def test_what_stays_with_a_reduce_scatter_beside_a_compressor_is_counted_as_that(device: str) -> None:
    """Gloo's is an all-reduce, which sends twice as much."""
    shards = [SimpleNamespace(name=name, padded_shape=shape) for name, shape in {"a": (3, 5), "b": (7,)}.items()]
    unit = SimpleNamespace(name="unit", cut=lambda numel: [(shards[0], 0), (shards[1], 15)], has_replicas=False)
    queue = SimpleNamespace(
        alike="native", compresses="a".__eq__, goes_lossless=lambda *of: False, submit=lambda contents: None
    )
    moved: list[int] = []
    hooks: Any = SimpleNamespace(
        _clock=SimpleNamespace(ready=lambda name: None), _count=moved.append, _finish=lambda *of: None
    )
    flat, output = torch.empty(4 * 22, device=device), torch.empty(22, device=device)
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 4)
    of: Any = unit, queue, lambda **of: None
    ShardedHooks._scatter(hooks, *of, output, flat, group, dist.ReduceOp.AVG)
    assert moved == [(6 if device == "cpu" else 3) * 7 * 4]
