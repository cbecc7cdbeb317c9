"""Ranks agree on the next checkpoint as soon as the last one is everywhere, or when training cannot wait any more."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from holders import SECRET, running_holders
from thinwire.checkpoint import Checkpointer, Storage
from thinwire.checkpoint.agreement import Agreement, Turn
from thinwire.checkpoint.cycle import Cycle
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.pacing.governor import Governor
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.registration import Registration
from thinwire.errors import LostPeerError
from thinwire.lab.testbed.launch import RankContext, run_ranks


class FakeClient:
    """A holder that has sent version 5 after some questions; None: it is gone."""

    def __init__(self, questions: int | None) -> None:
        self.questions, self.asked = questions, 0

    def status(self) -> dict[str, Any]:
        if self.questions is None:
            raise LostPeerError("gone")
        self.asked += 1
        sent = self.asked > self.questions
        return {"writing": False, "newest_local": 5, "newest_replicated": 5 if sent else 4}


class FakeRegistration:
    def __init__(self, client: FakeClient | None, registered: bool = True) -> None:
        self.client, self.registered = client, registered


class FakePacer:
    seconds_left = iteration_seconds = 0.0


def waits_until_needed(registration: FakeRegistration, needed_after: float) -> bool:
    """Whether the turn came because training needed it, and not before."""
    agreement = Agreement(
        cast(Registration, registration), cast(Any, None), None, cast(Pacer, FakePacer()), Notices(rank=0), Governor()
    )
    needed = threading.Event()
    timer = threading.Timer(needed_after, needed.set)
    timer.start()
    agreement.wait_until_sent(needed)
    was_needed = needed.is_set()
    timer.cancel()
    return was_needed


def test_it_is_time_when_the_peers_have_the_version() -> None:
    client = FakeClient(questions=3)
    assert not waits_until_needed(FakeRegistration(client), needed_after=20.0)
    assert client.asked == 4


def test_it_is_time_when_training_needs_it() -> None:
    client = FakeClient(questions=1_000_000)
    assert waits_until_needed(FakeRegistration(client), needed_after=0.05)
    assert client.asked > 0, "until then the holder is asked"


@pytest.mark.parametrize(
    "registration",
    [FakeRegistration(None), FakeRegistration(FakeClient(None)), FakeRegistration(FakeClient(9), registered=False)],
)
def test_nobody_waits_for_a_holder_that_is_not_there(registration: FakeRegistration) -> None:
    assert not waits_until_needed(registration, needed_after=20.0)


@pytest.mark.parametrize("has_slot", [False, True])
def test_a_save_that_is_given_up_has_begun_when_the_step_is_over(has_slot: bool) -> None:
    """`persist_now` after the step used the group of the disk at the same time: one rank failed, the others waited."""
    told: list[int] = []
    agreement = Agreement(
        cast(Registration, FakeRegistration(None)), cast(Any, None), None, cast(Pacer, FakePacer()), Notices(rank=0)
    )
    slow = SimpleNamespace(save=lambda step, attempt, take: (time.sleep(0.1), told.append(step)))
    agreement._tier, agreement._persisting = cast(Any, slow), 1
    optimizer_free = SimpleNamespace(optimizers=list, is_replicated=None, is_stepped=None)
    cycle = Cycle(cast(Any, optimizer_free), agreement, Notices(rank=0), Governor(), overlap=True)
    cycle.step = 1
    writer = SimpleNamespace(step=1, payload=b"", abandon=lambda: None) if has_slot else None
    record = cycle._begin(Turn(writer=cast(Any, writer)), None)
    assert (told, record.step) == ([1], 1)
    cycle.close()


def fails_to_begin_a_copy(context: RankContext, socket: str) -> tuple[list[str], str]:
    """Rank 1 has no memory for the second of three copies."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(1)
    storage = Storage("run", 1, holder_socket=socket, timeout=timedelta(seconds=20))
    with Checkpointer(nn.Linear(9, 9), storage=storage) as checkpointer:
        checkpointer.restore()
        cycle = checkpointer._cycle
        begin, fails = cycle._copier.begin, iter([False, context.rank == 1])

        def failing(*args: Any) -> Any:
            if next(fails, False):
                raise torch.OutOfMemoryError("none left")
            return begin(*args)

        cycle._copier.begin = failing  # type: ignore[method-assign]
        for _ in range(3):
            checkpointer.step()
            checkpointer.flush(20)
        return [record.skipped for record in checkpointer.records()], cycle.broken


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_copy_that_cannot_begin_on_one_rank_costs_a_version_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank took no part any more, and the others waited for it for half an hour."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    with running_holders(tmp_path, "20MB", "a") as (socket,):
        one, other = run_ranks(fails_to_begin_a_copy, socket, world_size=2, timeout_seconds=60)
    assert other.value == (["", "it was not copied: OutOfMemoryError: none left", ""], "")
    assert one.value[0][::2] == ["", ""], "the second one never becomes whole"
