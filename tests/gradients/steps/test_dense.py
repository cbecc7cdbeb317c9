"""The choice whether dense gradients travel losslessly coded: what it says, and of whom."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.gradients.steps.dense import DenseChoice
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.rank import RankContext


def two_hosts() -> Any:
    """Return a lane of two ranks on two hosts, on this rank, 7 among all."""
    lane = MagicMock(world_size=2, rank=1)
    lane.exchange.global_ranks, lane.exchange.hosts = [4, 7], [0, 1]
    lane.submit = lambda job: MagicMock(wait=lambda: job(lane))
    lane.agree = lambda what, numbers: [list(numbers)] * 2
    return lane


@pytest.mark.parametrize(("can", "free", "said"), [(1.0, 0.0, "has registered another"), (0.0, 1.0, "cannot run")])
def test_a_rank_of_a_group_is_named_as_in_logs(can: float, free: float, said: str) -> None:
    """By its number among all ranks, and not among those that train together."""
    lossless, lane = MagicMock(), two_hosts()
    lane.agree = lambda what, numbers: [[1.0, 1.0], [can, free]]
    assert not DenseChoice(lane, lossless, {}, MagicMock())._may_pay()
    assert f"rank 7 {said}" in lossless.reason


def _reasons(context: RankContext, hosts: int) -> list[str]:
    os.environ["THINWIRE_HOST"] = str(context.rank % hosts)
    model = nn.Linear(10, 10)
    sync = thinwire.attach(DistributedDataParallel(model))
    for _ in range(20):
        sync._model(torch.randn(4, 10)).sum().backward()
    return [row["reason"] for row in sync.table()]


@pytest.mark.parametrize(("hosts", "said"), [(1, "all ranks are on one host"), (2, "native: steps wait ")])
def test_gradients_that_stock_sums_say_why(hosts: int, said: str) -> None:
    """While a choice is watched, as a table does, and where there is none to make."""
    for outcome in run_ranks(_reasons, hosts, world_size=2, timeout_seconds=60):
        (reason,) = outcome.value
        assert reason.startswith(said)
