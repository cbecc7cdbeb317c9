"""Rounds in the background on the simulated CUDA device: copies, corrections and evaluations without a race."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from simgpu.torch_semantics import simulated
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import pace

pytestmark = pytest.mark.ranks


def of_a_device(context: RankContext) -> tuple[list[str], int]:
    pace.LEAST_PATIENCE, pace.SHARE = 0.02, 1.0
    with simulated() as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 5)).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync: Any = thinwire.outer.attach(model, optimizer, thinwire.outer.shadow_sync("bmuf"))

        def train_until(rounds: int) -> None:
            step = 0
            while sync._rounds.landed < rounds:
                step += 1
                ids = torch.arange(20, device="cuda") * (step + context.rank) % 300
                optimizer.zero_grad()
                model(ids).square().mean().backward()
                optimizer.step()

        train_until(4)
        with sync.global_parameters():
            model(torch.arange(9, device="cuda"))
        train_until(6)
        state = sync.state_dict()
        train_until(8)
        sync.load_state_dict(state)
        train_until(9)
        sync.synchronize()
        sync.detach()
        torch.cuda.synchronize()
        return list(world.races), sync._rounds.landed


@pytest.mark.slow
def test_no_race() -> None:
    for outcome in run_ranks(of_a_device, world_size=2):
        races, rounds = outcome.value
        assert races == []
        assert rounds >= 9


def of_anchors_that_were_just_stepped(context: RankContext) -> list[str]:
    """Evaluate on the anchors after a round has stepped them and before it has left its correction."""
    pace.LEAST_PATIENCE, pace.SHARE = 0.02, 1.0
    with simulated() as world:
        torch.manual_seed(0)
        model = nn.Linear(8, 5).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync: Any = thinwire.outer.attach(model, optimizer, thinwire.outer.shadow_sync("bmuf"))
        stepped, read = threading.Event(), threading.Event()
        correct = sync._rounds._correct

        def correct_later(is_refused: bool) -> None:
            stepped.set()
            read.wait(60)
            correct(is_refused)

        sync._rounds._correct = correct_later
        while not stepped.is_set():
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="cuda") * context.rank).square().mean().backward()
            optimizer.step()
        with sync.global_parameters():
            read.set()
            model(torch.ones(4, 8, device="cuda"))
        sync.synchronize()
        sync.detach()
        torch.cuda.synchronize()
        return list(world.races)


def test_anchors_are_read_behind_the_step_of_a_round_that_goes_on() -> None:
    assert [outcome.value for outcome in run_ranks(of_anchors_that_were_just_stepped, world_size=2)] == [[], []]
