"""What a step with one tiny table costs the processor, in Python calls, which are the same on every machine."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 5
MAX_CALLS = 850
"""It takes 790 by zen on two ranks, all threads together, half of them on the lane's two rounds of messages."""


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(1000, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(ids))


def _calls_of_a_step(context: RankContext) -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(Tiny())
    sync = thinwire.attach(model, "zen")
    ids = torch.randint(0, 1000, (32,))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for step in range(3 + STEPS):
        model.zero_grad()
        loss = model(ids).square().mean()
        if step == 3:
            sync._lane.submit(lambda lane: sys.setprofile(count)).wait()
        sys.setprofile(count if step >= 3 else None)
        loss.backward()
        sys.setprofile(None)
    sync._lane.submit(lambda lane: sys.setprofile(None)).wait()
    sync.detach()
    return calls / STEPS


def test_calls_of_a_step_with_a_tiny_table() -> None:
    for outcome in run_ranks(_calls_of_a_step, world_size=2, timeout_seconds=60):
        assert outcome.value < MAX_CALLS
