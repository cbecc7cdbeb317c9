"""Signs of life: who is silent, and for how long."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from thinwire.outer import heart
from thinwire.outer.heart import Heart


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(heart, "FROZEN_SECONDS", 0.1)


def test_who_stops_is_silent_and_who_beats_is_not(quick: None) -> None:
    store, frozen = dist.HashStore(), list[int]()
    members = {0: "a", 1: "b", 2: "c"}
    mine = Heart(store, lambda: ("a", members), frozen.append)
    other = Heart(store, lambda: ("b", members), lambda rank: None)
    deadline = time.monotonic() + 10.0
    while 2 not in frozen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mine.silence("c") > 0.1, "it has never beaten"
    assert mine.silence("unknown") == 0.0
    other.stop()
    while 1 not in frozen and time.monotonic() < deadline:
        time.sleep(0.01)
    mine.stop()
    assert mine.silence("b") > 0.1


def test_a_process_that_stood_still_takes_nobody_for_dead(quick: None) -> None:
    """Others seem silent for as long as this one was stopped."""
    store = dist.HashStore()
    mine = Heart(store, lambda: ("a", {0: "a", 1: "b"}), lambda rank: None)
    mine.stop()
    time.sleep(0.05)
    mine._beat(0.0)
    mine._beat(min(60.0, 2 * heart.BEAT_SECONDS))
    assert mine.silence("b") < 0.1
