"""`attach(dense="lossless")`: values of rows travel coded too, with the bits of those that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

ROWS, WIDTH = 3000, 64


class Model(nn.Module):
    """A table whose gradients are those of a layer in bfloat16, under autocast."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, 10))

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(self.table(ids)).float()


def trained(context: RankContext, sparse: bool, scheme: str, dense: str) -> tuple[list[Tensor], thinwire.Synchronizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(sparse))
    sync = thinwire.attach(model, scheme, dense=dense)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    seen = []
    for step in range(4):
        data = torch.Generator().manual_seed(10 * step + context.rank)
        ids = torch.randint(0, ROWS, (0 if (step, context.rank) == (2, 1) else 150 + 60 * step,), generator=data)
        nn.functional.cross_entropy(model(ids), ids % 10, reduction="sum").backward()
        seen.append(model.module.table.weight.grad.to_dense().clone())
        optimizer.step()
        optimizer.zero_grad()
    return seen, sync


def _rows(context: RankContext) -> None:
    for sparse, scheme in ((True, "zen"), (False, "column_split"), (True, "auto")):
        coded, sync = trained(context, sparse, scheme, "lossless")
        (row,) = [row for row in sync.table() if row["name"] == "table.weight"]
        sent = row["total_bytes"]
        if scheme != "auto":
            assert row["formats"].endswith("coded values"), row
        if scheme in ("zen", "column_split"):
            assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=0.15), row
        sync.detach()
        plain, sync = trained(context, sparse, scheme, "native")
        (row,) = [row for row in sync.table() if row["name"] == "table.weight"]
        assert not row["formats"].endswith("coded values"), row
        assert sent < 0.7 * row["total_bytes"] or scheme == "auto", (scheme, sent, row)
        sync.detach()
        for one, other in zip(coded, plain, strict=True):
            if scheme != "auto":
                assert torch.equal(one, other), scheme
            else:
                torch.testing.assert_close(one, other)


def test_rows_travel_coded_with_the_same_bits() -> None:
    run_ranks(_rows, world_size=3, timeout_seconds=60)
