"""Dense gradients by the all-reduce of the model's own group, as over NCCL: here it is Gloo's, on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import synchronizer
from thinwire.hooks import native
from thinwire.testbed.launch import RankContext, run_ranks
from thinwire.wire import Header


def _train(context: RankContext, attached: bool) -> tuple[list[Tensor], thinwire.Synchronizer | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(900, 16), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    sync = thinwire.attach(ddp, "zen") if attached else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(context.rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randint(0, 900, (20,), generator=data)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], sync


def _as_stock(context: RankContext) -> None:
    assert not native.is_native(torch.distributed.group.WORLD, torch.device("cpu"))
    synchronizer.is_native = lambda group, device: True
    stock, _ = _train(context, False)
    mine, sync = _train(context, True)
    for ours, theirs in zip(mine, stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert sync is not None
    rows = {str(row["name"]): row for row in sync.table()}
    assert rows["all other parameters"]["scheme"] == "NCCL"
    assert rows["0.weight"]["kind"] == "dense gradient, rows known"
    opening = (context.world_size - 1) * Header.NUM_BYTES
    assert sync.stats()["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in rows.values()) + opening
    sync.detach()


def test_dense_gradients_by_the_group_of_the_model() -> None:
    run_ranks(_as_stock, world_size=3, timeout_seconds=60)


@pytest.mark.parametrize(("backend", "device", "expected"), [
    ("cpu:gloo,cuda:nccl", "cuda", True), ("cpu:gloo,cuda:nccl", "cpu", False), ("cpu:gloo,cuda:gloo", "cuda", False),
])  # fmt: skip
def test_when_that_is_taken(monkeypatch: pytest.MonkeyPatch, backend: str, device: str, expected: bool) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backend)
    assert native.is_native(None, torch.device(device)) == expected  # type: ignore[arg-type]
