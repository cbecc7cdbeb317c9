"""What people put around a model, beside stock: torch.compile, no_sync, autocast, GradScaler, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WORDS, WIDTH, STEPS = 1500, 32, 5
COMPRESSED = {"dense": thinwire.compress.power_sgd(2)}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.words(words))))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).float(), words % 7)


def batches(rank: int, count: int = STEPS) -> list[Tensor]:
    """Batches of another size in each step."""
    data = torch.Generator().manual_seed(rank)
    return [torch.randint(WORDS, (6 + 3 * step,), generator=data) for step in range(count)]


def same_bits(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(torch.equal(low, high))


def train(
    rank: int, options: dict[str, Any] | None, run: Callable[..., list[float]], plain: bool = False, **how: Any
) -> tuple[list[float], nn.Module, thinwire.Synchronizer | None]:
    """Train by ``run(model, sync, batches)``, stock if there are no options; a plain model is averaged by hand then."""
    torch.manual_seed(0)
    model: nn.Module = Tagger() if plain else DistributedDataParallel(Tagger())
    sync = None if options is None else thinwire.attach(model, **options)
    losses = run(model, sync, batches(rank), **how)
    assert same_bits(model)
    return losses, model, sync


def compare(rank: int, run: Callable[..., list[float]], rel: float = 1e-6, **how: Any) -> None:
    """The same losses with thinwire as without, near ones if it compresses, and the same bits on all ranks."""
    stock, _, _ = train(rank, None, run, **how)
    exact, _, sync = train(rank, {}, run, **how)
    assert exact == pytest.approx(stock, rel=rel)
    assert sync is not None
    assert any(row["name"] == "words.weight" for row in sync.table())
    sync.detach()
    lossy, _, sync = train(rank, COMPRESSED, run, **how)
    assert sync is not None
    assert any(row["name"] == "hidden.weight" for row in sync.table())
    assert lossy[0] == pytest.approx(stock[0], rel=rel)
    assert lossy[-1] == pytest.approx(stock[-1], rel=0.05)


def accumulated(model: Any, sync: Any, data: list[Tensor]) -> list[float]:
    """Two micro-batches a step, the first in no_sync, the norm clipped."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    accumulating = model.no_sync if isinstance(model, DistributedDataParallel) else sync.no_sync
    for words in data:
        optimizer.zero_grad()
        with accumulating():
            loss_of(model, words.flip(0) // 2).backward()
        loss = loss_of(model, words)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        losses += [loss.item(), norm.item()]
    return losses


def scaled(model: Any, sync: Any, data: list[Tensor]) -> list[float]:
    """Autocast to bfloat16 and a GradScaler, which skips the steps whose gradients are not finite on some rank."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step, words in enumerate(data):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, words)
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses += [scaler.get_scale(), norm.item() if step != 2 else 0.0]
        losses += [loss_of(model, data[0]).item()]
    assert scaler.get_scale() != 2.0**10, "a step was skipped, or the scale grew"
    return losses


def _loops(context: RankContext) -> None:
    compare(context.rank, accumulated)
    compare(context.rank, scaled)


def test_no_sync_autocast_scaler_and_clipping() -> None:
    run_ranks(_loops, world_size=2)


def compiled(model: Any, sync: Any, data: list[Tensor], what: str, **given: Any) -> list[float]:
    """The module, the DDP or the train step compiled; the last loss is followed by the number of graph breaks."""
    options = {"backend": "aot_eager", **given}
    torch._dynamo.reset()
    counters.clear()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []

    def step(words: Tensor) -> Tensor:
        loss = loss_of(called, words)
        loss.backward()
        return loss

    called = model
    if what == "module":
        model.module.compile(**options)
    elif what == "ddp":
        called = torch.compile(model, **options)
    run = torch.compile(step, **options) if what == "step" else step
    for words in data:
        optimizer.zero_grad()
        losses.append(run(words).item())
        optimizer.step()
    return [*losses, float(sum(counters["graph_break"].values()))]


def _compiled(context: RankContext, what: str, options: dict[str, Any]) -> None:
    stock, _, _ = train(context.rank, None, compiled, what=what, **options)
    for mine in ({}, COMPRESSED):
        losses, _, sync = train(context.rank, mine, compiled, what=what, **options)
        assert losses[-1] <= stock[-1], f"{losses[-1]:g} graph breaks, stock {stock[-1]:g}"
        assert losses[0] == pytest.approx(stock[0], rel=1e-6)
        assert losses[:-1] == pytest.approx(stock[:-1], rel=1e-6 if mine == {} else 0.05)
        assert sync is not None
        assert sync.stats()["comm/steps"] == STEPS
        sync.detach()


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("module", {"fullgraph": True, "dynamic": True}),
        ("step", {"backend": "eager"}),
        pytest.param("module", {}, marks=pytest.mark.slow),
        pytest.param("ddp", {}, marks=pytest.mark.slow),
        pytest.param("step", {"dynamic": True}, marks=pytest.mark.slow),
    ],
)
def test_compiled_module_ddp_and_train_step(what: str, options: dict[str, Any]) -> None:
    run_ranks(_compiled, what, options, world_size=2)
