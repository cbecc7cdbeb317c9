"""Rounds in the background on the simulated CUDA device: copies, corrections and evaluations without a race."""

from __future__ import annotations

import threading
import time
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


def of_a_copy_after_a_round_of_no_steps(context: RankContext) -> list[str]:
    """Copy on the stream of training what the last round, which had nothing to correct, may still be reading."""
    pace.LEAST_PATIENCE = 60.0
    pace.RoundPace.wait = lambda self: time.sleep(0.001)  # type: ignore[method-assign]
    with simulated() as world:
        model = nn.Linear(8, 5).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        copied = threading.Event()

        def wait_for_a_round(*_: object) -> None:
            deadline = time.monotonic() + 60.0
            while not rounds._is_copy_due and time.monotonic() < deadline:
                time.sleep(0.001)

        optimizer.register_step_post_hook(wait_for_a_round)  # before that of the rounds
        sync: Any = thinwire.outer.attach(model, optimizer, thinwire.outer.shadow_sync("bmuf"))
        rounds: Any = sync._rounds
        take_copy = rounds._take_copy

        def note_copy() -> None:
            if threading.current_thread() is threading.main_thread():
                copied.set()
            take_copy()

        rounds._take_copy = note_copy
        model(torch.ones(4, 8, device="cuda")).square().mean().backward()
        while rounds._copied is None or not rounds._finished:  # a round before the first step
            time.sleep(0.001)
        optimizer.step()
        assert copied.is_set(), "the round that began within the step was to copy at its end"
        sync.detach()
        torch.cuda.synchronize()
        return list(world.races)


def test_a_copy_is_written_behind_the_round_that_read_the_last_one() -> None:
    outcomes = run_ranks(of_a_copy_after_a_round_of_no_steps, world_size=2)
    assert [outcome.value for outcome in outcomes] == [[], []]
