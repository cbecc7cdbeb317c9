"""The process of a rank: what it sends is a copy, what it returned stands, and a crash shows its stacks."""

import ctypes
import os
import signal
from multiprocessing import util
from pathlib import Path

import pytest
import torch

from thinwire.lab.testbed.launch import RankContext, RanksFailed, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]


def send_and_return_tensor(context: RankContext) -> torch.Tensor:
    for step in range(3):
        context.send((step, torch.full((2,), context.rank)))
    return torch.full((300_000,), context.rank)


def exit_silently(context: RankContext) -> None:
    os._exit(0)


def test_messages_and_tensors_arrive_by_value():
    seen: list[tuple[int, int, list[int]]] = []
    outcomes = run_ranks(
        send_and_return_tensor,
        world_size=2,
        on_message=lambda rank, message: seen.append((rank, message[0], message[1].tolist())),
    )
    assert sorted(seen) == [(rank, step, [rank, rank]) for rank in range(2) for step in range(3)]
    assert [outcome.value.unique().item() for outcome in outcomes] == [0, 1]


def test_silent_exit_is_a_failure():
    with pytest.raises(RanksFailed, match="exited with code 0 before the function returned"):
        run_ranks(exit_silently, world_size=1)


def abort_when_all_have_returned(context: RankContext) -> int:
    util.Finalize(None, os.abort, exitpriority=0)  # what a fork server forks ends by these
    return context.rank


def test_a_result_is_the_verdict_whatever_becomes_of_the_process() -> None:
    outcomes = run_ranks(abort_when_all_have_returned, world_size=2)
    assert [(outcome.value, outcome.error, outcome.exit_code) for outcome in outcomes] == [
        (rank, None, -signal.SIGABRT) for rank in range(2)
    ]


def _crashes(context: RankContext, path: Path) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    ctypes.string_at(0)


def test_a_rank_that_crashes_shows_the_stacks_of_c_and_of_python(tmp_path: Path) -> None:
    """What a thread of Gloo did when a rank died by SIGSEGV in attach was never known."""
    (outcome,) = run_ranks(_crashes, tmp_path / "said", world_size=1, check=False)
    said = (tmp_path / "said").read_text()
    assert outcome.exit_code == -signal.SIGSEGV
    assert "frame #0" in said
    assert "in _crashes" in said
