"""FSDP2 whose tables are summed by its own groups, as over NCCL: here they are Gloo's, with tensors on the CPU.

``THINWIRE_ROUTE=collective`` runs the code that NCCL runs. It must give the bits of the lane's route, and means
that are those of float64 to rounding.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks
ROWS, WIDTH, STEPS = 1501, 24, 5


class Net(nn.Module):
    """A table that is looked up twice, one that no rank uses in step 2, a small one that FSDP keeps, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.users, self.kinds = (nn.Embedding(rows, WIDTH) for rows in (ROWS, 1409, 300))
        self.hidden, self.out = nn.Linear(WIDTH, 40), nn.Linear(40, 3)

    def forward(self, ids: Tensor, step: int) -> Tensor:
        rows = self.words(ids) * self.kinds(ids % 300) + self.words((ids + 7) % ROWS)
        if step != 2:
            rows = rows + self.users(ids % 1409)
        return self.out(self.hidden(rows).tanh())


def batch(rank: int, step: int) -> Tensor:
    """Ids of a step, none at all on rank 1 in step 1."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    size = 0 if (rank, step) == (1, 1) else 1 + (37 * step + 29 * rank) % 61
    return (torch.rand(size, generator=draw) ** 3 * ROWS).long()


def sharded(kind: str, world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model: Any = Net()
    if "replicate" in kind:
        return replicate(model)
    shape = (2, world_size // 2) if "replicas" in kind else (world_size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {"mesh": mesh}
    if "bfloat16" in kind:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "ignored" in kind:
        options["ignored_params"] = thinwire.embedding_tables(model)
    for module in (model.words, model.hidden) if "own" in kind else (model.hidden,):
        fully_shard(module, **options)
    return fully_shard(model, **options)


def train(context: RankContext, kind: str, route: str) -> tuple[list[Any], list[dict[str, Tensor]]]:
    """Losses and parameters of a training, and the gradients of its steps."""
    os.environ["THINWIRE_ROUTE"] = route
    model = sharded(kind, context.world_size)
    sync = thinwire.attach(model, "zen", "native")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: list[Any] = []
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if "accumulates" in kind:
            with sync.no_sync():
                model(batch(context.rank, 50 + step), 0).square().sum().backward()
        loss = model(batch(context.rank, step), step).float().square().sum()
        loss.backward()
        found.append(loss.item())
        gradients.append({name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None})
        optimizer.step()
    stats = sync.stats()
    assert stats["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in sync.table())
    waits = stats["comm/host_waits"] > 0
    assert waits == (route == "collective" or not any(word in kind for word in ("ignored", "replicate,")))
    sync.detach()
    return [*found, *(whole(one) for one in model.parameters())], gradients


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def exact(context: RankContext, kind: str, step: int) -> dict[str, Tensor]:
    """The mean gradients of all ranks in float64, of the parameters of a step that nothing has trained yet."""
    torch.manual_seed(0)
    model = Net().double()
    for rank in range(context.world_size):
        parts = [(batch(rank, step), step)]
        if "accumulates" in kind:
            parts.append((batch(rank, 50 + step), 0))
        for part in parts:
            (model(*part).square().sum() / context.world_size).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _laws(context: RankContext, kinds: list[str]) -> None:
    for kind in kinds:
        (mine, gradients), (theirs, _) = (train(context, kind, route) for route in ("collective", "rows"))
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, kind
        right = exact(context, kind, 0)
        close = 2e-2 if "bfloat16" in kind else 1e-5
        for name, mean in right.items():
            most = close * float(mean.abs().max())
            torch.testing.assert_close(gradients[0][name].double(), mean, rtol=close, atol=most)


MORE = [
    *("replicas, own, bfloat16", "replicas, ignored, accumulates"),
    *("shards, own", "own, bfloat16", "replicate, accumulates"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (2, ["shards", "ignored", "replicate, whole"]),
        pytest.param(4, ["replicas", "replicas, accumulates", "replicas, ignored"], id="replicas"),
        pytest.param(4, MORE, marks=pytest.mark.slow, id="more"),
    ],
)
def test_the_bits_of_the_lane_and_means_of_float64(world_size: int, kinds: list[str]) -> None:
    run_ranks(_laws, kinds, world_size=world_size, timeout_seconds=100)
