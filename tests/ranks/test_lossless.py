"""attach(dense=): the bits of a sum in rank order on all ranks, whatever the model; decisions of "auto"; failures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.gradients.lossless import ROW
from thinwire.lab.testbed.launch import RankContext, run_ranks

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Network(nn.Module):
    """Layers of several dtypes, one that only some batches reach, and one of complex numbers."""

    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float32,), table: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 40) if table else None
        self.first = nn.Linear(40, 70)
        self.middle = nn.ModuleList([nn.Linear(70, 70, dtype=dtype) for dtype in dtypes])
        self.side = nn.Linear(70, 70)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: Tensor, reaches_side: bool = True) -> Tensor:
        hidden = self.first(batch if self.table is None else self.table(batch)).tanh()
        for layer in self.middle:
            values = hidden.to(layer.weight.dtype)
            out = layer(values)
            hidden = (out.real + out.imag if out.is_complex() else out).float().tanh()
        if reaches_side:
            hidden = hidden + self.side(hidden)
        return (hidden * self.scalar).square().mean()


def batch_of(model: Network, rank: int, step: int) -> Tensor:
    """A batch of a size that changes from step to step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if model.table is None:
        return torch.randn(3 + 5 * step, 40, generator=generator)
    return torch.randint(0, 500, (3 + 5 * step,), generator=generator)


def rank_order_mean(mine: Tensor) -> Tensor:
    """The mean that an uncoded sum in rank order gives, from the gradients of all ranks."""
    real = (torch.view_as_real(mine) if mine.is_complex() else mine).contiguous()
    found = [torch.empty_like(real) for _ in range(dist.get_world_size())]
    dist.all_gather(found, real)
    wide = torch.float32 if real.element_size() == 2 else real.dtype
    total = found[0].to(wide)
    for other in found[1:]:
        total = total + other.to(wide)
    mean = (total * (1.0 / len(found))).to(real.dtype)
    return torch.view_as_complex(mean) if mine.is_complex() else mean


def same_bits(one: Tensor, other: Tensor) -> bool:
    pair = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (one, other)]
    first, second = (tensor.contiguous().view(BITS[tensor.element_size()]) for tensor in pair)
    return torch.equal(first, second)


def expected_gradients(model: Network, batches: Sequence[Tensor], reaches: bool, autocast: bool) -> dict[str, Tensor]:
    """The means of the gradients of all ranks, computed without any wrapper; None for those that nobody has."""
    alone = copy.deepcopy(model)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            alone(batch, reaches).backward()
    used = torch.tensor([float(p.grad is not None) for p in alone.parameters()])
    dist.all_reduce(used)
    found = {}
    for (name, parameter), count in zip(alone.named_parameters(), used, strict=True):
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        mean = rank_order_mean(gradient.detach())
        if count:
            found[name] = mean
    return found


def check_steps(
    context: RankContext,
    wrap: Callable[[Network], nn.Module],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    table: bool = False,
    autocast: bool = True,
    uneven: bool = False,
    accumulate: int = 1,
    exact: Callable[[str], bool] = lambda name: not name.startswith("table"),
    **options: Any,
) -> thinwire.Synchronizer:
    """Train some steps, and compare each dense gradient with the mean in rank order, bit by bit."""
    torch.manual_seed(0)
    model = Network(dtypes, table)
    wrapped = wrap(model)
    sync = thinwire.attach(wrapped, **{"dense": "lossless", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        reaches = not (uneven and (step + context.rank) % 2)
        batches = [batch_of(model, context.rank, accumulate * step + part) for part in range(accumulate)]
        expected = expected_gradients(model, batches, reaches, autocast)
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if number + 1 < accumulate:
                    with sync.no_sync():
                        wrapped(batch, reaches).backward()
                else:
                    wrapped(batch, reaches).backward()
        for name, parameter in model.named_parameters():
            if exact(name) and (name in expected or parameter.grad is not None):
                mean = expected.get(name, torch.zeros_like(parameter))
                assert same_bits(parameter.grad, mean), f"step {step}, {name}"
        optimizer.step()
    rows = {str(row["name"]): row for row in sync.table()}
    stats = sync.stats()
    assert stats["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in rows.values())
    assert rows[ROW]["scheme"] == "lossless"
    assert "all other parameters" not in rows, "nothing dense went natively"
    assert stats["lossless/values"] > 0
    return sync


def _models(context: RankContext) -> None:
    ddp, mixed = DistributedDataParallel, (torch.bfloat16, torch.float64, torch.float16, torch.complex64)

    def small(model: Network) -> nn.Module:
        return ddp(model, bucket_cap_mb=0.02)

    for wrap in (ddp, small, lambda model: model):
        check_steps(context, wrap).detach()
        check_steps(context, wrap, table=True).detach()
        check_steps(context, wrap, dtypes=mixed, autocast=False).detach()
        check_steps(context, wrap, accumulate=3).detach()
    check_steps(context, lambda model: ddp(model, static_graph=True)).detach()
    check_steps(context, lambda model: ddp(model, gradient_as_bucket_view=True)).detach()
    check_steps(context, lambda model: ddp(model, find_unused_parameters=True), uneven=True).detach()
    check_steps(context, lambda model: model, uneven=True).detach()


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_of_a_sum_in_rank_order(world_size: int) -> None:
    run_ranks(_models, world_size=world_size, timeout_seconds=110)
