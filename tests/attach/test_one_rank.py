"""One rank: everything works, and nothing is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.schemes import NAMED

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(600, 16)
        self.tags = nn.Embedding(600, 16, sparse=True)
        self.out = nn.Linear(16, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"loss": self.out(self.words(ids) + self.tags(ids)).square().sum()}


def _trains(context: RankContext, wrapped: bool, options: dict[str, Any]) -> list[str]:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        module = Net()
        model = DistributedDataParallel(module, find_unused_parameters=True) if wrapped else module
        sync = thinwire.attach(model, **options) if attached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.arange(5) + step)["loss"].backward()
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in module.parameters()])
        assert module.unused.grad is None
        if sync is not None:
            stats = sync.stats()
            assert stats["comm/steps"] == 4
            assert stats["comm/bytes_sent"] == stats["comm/bytes_received"] == stats["comm/bytes_dense"] == 0
            with sync.no_sync():
                model(torch.arange(5))["loss"].backward()
            assert sync.stats()["comm/steps"] == 4
            again = sync.state_dict()
            sync.load_state_dict(again)
            assert again["steps"] == 4
            sync.detach()
    assert all(map(torch.equal, *found))


@pytest.mark.few(3)
@pytest.mark.parametrize("scheme", ["auto", "zen", "two_level:zen"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_one_rank_trains_as_without_thinwire(wrapped: bool, scheme: str) -> None:
    run_ranks(_trains, wrapped, {"rows": scheme}, world_size=1, timeout_seconds=60)


def _has_no_hooks(context: RankContext) -> None:
    model = Net()
    sync = thinwire.attach(model)
    assert not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.children())
    sync.detach()


def test_one_rank_gets_no_hooks_on_its_parameters() -> None:
    run_ranks(_has_no_hooks, world_size=1, timeout_seconds=60)


def _keeps_options(context: RankContext, options: dict[str, Any]) -> None:
    """What changes gradients on one rank too, as compression does, goes on doing so."""
    model = nn.Sequential(nn.Embedding(600, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    sync = thinwire.attach(model, **options)
    for _ in range(12):
        model.zero_grad()
        model(torch.arange(2)).square().sum().backward()
    assert sync.stats()["comm/steps"] == 12
    sync.detach()


@pytest.mark.parametrize(
    "options",
    [{"dense": thinwire.compress.top_k(0.1)}, {"dense": thinwire.fuse.one_bucket()}],
    ids=["compress", "fuse"],
)
def test_compression_and_fusion_on_one_rank(options: dict[str, Any]) -> None:
    run_ranks(_keeps_options, options, world_size=1, timeout_seconds=60)


def _sums(context: RankContext) -> None:
    dense = torch.zeros(50, 4)
    dense[3] = 1.0
    coo = torch.sparse_coo_tensor([[3, 3, 9]], torch.ones(3, 4), (50, 4))
    for scheme in ("auto", "two_level:zen", *NAMED):
        for op in ("sum", "mean"):
            total = thinwire.sparse_all_reduce(dense, scheme, op=op)
            assert torch.equal(total, dense)
            assert total.data_ptr() != dense.data_ptr()
            assert torch.equal(thinwire.sparse_all_reduce(coo, scheme, op=op).to_dense(), coo.to_dense())
    assert torch.equal(thinwire.sparse_all_reduce(dense, async_op=True).wait(), dense)
    assert torch.equal(thinwire.sparse_all_reduce(torch.zeros(5, 0)), torch.zeros(5, 0))
    with pytest.raises(ValueError, match="legal are auto"):
        thinwire.sparse_all_reduce(dense, "zenith")
    with pytest.raises(ValueError, match="unknown op"):
        thinwire.sparse_all_reduce(dense, op="max")


def test_the_sum_over_one_rank_is_a_copy() -> None:
    run_ranks(_sums, world_size=1, timeout_seconds=60)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    for call in (lambda: thinwire.attach(Net()), lambda: thinwire.sparse_all_reduce(torch.zeros(5, 2))):
        with pytest.raises(ValueError, match="init_process_group"):
            call()
