"""Tables summed by the model's own process group, as over NCCL: here it is Gloo's, with tensors on the CPU.

``THINWIRE_ROUTE=collective`` runs the code that NCCL runs. What it must give are the bits of the staged route.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

STEPS = 4


class Tables(nn.Module):
    """Tables of several widths, dense and sparse gradients, and layers."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words, self.users = nn.Embedding(900, 16), nn.Embedding(300, 8, sparse=sparse)
        self.items = nn.EmbeddingBag(700, 24, mode="sum")
        self.hidden, self.last = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, ids: Tensor, skip: bool = False) -> Tensor:
        hidden = self.hidden(self.words(ids)).tanh()
        if not skip:
            hidden = hidden + self.items(ids % 700, torch.arange(len(ids)))
        return self.last(hidden) * self.users(ids % 300)


def batch(rank: int, step: int) -> Tensor:
    """Ids of a step: another number on each rank and in each step, none at all on the last rank of step 1."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    size = 0 if step == 1 and rank == dist.get_world_size() - 1 else 1 + (17 * step + 29 * rank) % 61
    return torch.randint(0, 900, (size,), generator=draw)


@contextmanager
def route(name: str) -> Iterator[None]:
    os.environ["THINWIRE_ROUTE"] = name
    try:
        yield
    finally:
        del os.environ["THINWIRE_ROUTE"]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.coalesce().to_dense() if parameter.grad.is_sparse else parameter.grad.clone()
    return found


def train(
    context: RankContext, way: str, how: str, dtype: torch.dtype = torch.float32, scheme: str = "zen", **options: Any
) -> tuple[list[dict[str, Tensor]], dict[str, float], list[dict[str, Any]]]:
    """The gradients of each step, and the statistics."""
    torch.manual_seed(0)
    sparse, compress = options.pop("sparse", True), options.pop("compress", None)
    accumulates = options.pop("accumulates", False)
    model = Tables(sparse).to(dtype)
    trained = DistributedDataParallel(model, bucket_cap_mb=0.02, **options) if how == "DDP" else model
    with route(way):
        sync = thinwire.attach(trained, scheme, compress=compress)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        if accumulates:
            with sync.no_sync():
                trained(batch(context.rank, step + 7)).square().sum().backward()
        trained(batch(context.rank, step)).square().sum().backward()
        steps.append(gradients(model))
    stats, table = sync.stats(), sync.table()
    assert (sync._collective is not None) == (way == "collective" and context.world_size > 1)
    sync.detach()
    return steps, stats, table


def check_same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys(), f"step {step}"
        for name in mine:
            assert torch.equal(mine[name], other[name]), f"step {step}, {name}"


def _as_staged(context: RankContext, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        staged, _, _ = train(context, "staged", **case)
        mine, stats, table = train(context, "collective", **case)
        check_same(mine, staged)
        if context.world_size == 1:
            continue
        assert stats["comm/host_waits"] <= 2 * STEPS + 2 * 3, (
            "twice a step, apart in the first, in which tables are new"
        )
        assert stats["comm/bytes_sent"] == sum(row["total_bytes"] for row in table)
        if "compress" not in case:
            by = {row["name"]: (row["scheme"], row["formats"]) for row in table}
            tables = {"words.weight", "items.weight", *(["users.weight"] if case.get("sparse", True) else [])}
            assert {name for name, way in by.items() if way == ("zen", "by collectives")} == tables


CASES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"how": "DDP"}, {"how": "plain"}, {"how": "DDP", "dtype": torch.bfloat16, "sparse": False},
              {"how": "plain", "dtype": torch.float64}],
    "ways of DDP": [{"how": "DDP", "sparse": False, "gradient_as_bucket_view": True, "accumulates": True},
                    {"how": "DDP", "static_graph": True}, {"how": "DDP", "find_unused_parameters": True},
                    {"how": "plain", "accumulates": True}],
}  # fmt: skip


@pytest.mark.parametrize(("world_size", "cases"), [(1, "plain"), (2, "plain"), (3, "ways of DDP"), (4, "plain")])
def test_the_bits_of_the_staged_route(world_size: int, cases: str) -> None:
    run_ranks(partial(_as_staged, cases=CASES[cases]), world_size=world_size, timeout_seconds=100)
