"""What a step with one tiny table costs the processor, in Python calls, which are the same on every machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 5
MAX_CALLS = 820
"""It takes 762 by zen on two ranks of torch 2.13, and 785 of 2.15, all threads together, half of them on the lane's two
rounds of messages."""
OURS = str(Path(thinwire.__file__).parent)


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
        callers = (
            (frame, frame.f_back) if event == "call" else ()
        )  # not what torch calls inside, another number in each
        calls += any(one is not None and one.f_code.co_filename.startswith(OURS) for one in callers)

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
