"""Ranges of the profiler: all five in a trace of a step, and no cost while nobody profiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.futures import Future
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.gradients.tables import TableGradient
from thinwire.observe import step
from thinwire.sync.synchronize import agree, synchronize
from threaded import LoopbackLane, Rank, on_ranks

RANGES = {f"thinwire::{name}" for name in ("find", "pack", "exchange", "sum", "scatter")}


def _step(exchange: LoopbackExchange, layout: str, scheme: str) -> torch.Tensor:
    dense = torch.zeros(300, 4)
    dense[exchange.rank :: 7] = 1.0
    gradient = dense.to_sparse(1) if layout == "sparse" else dense
    touched = torch.arange(exchange.rank, 300, 7) if layout == "known" else None
    table = TableGradient("table", gradient, touched)
    channel = Channel(exchange, Subject("table", scheme), 0)
    held, point = agree(table.rows, scheme, channel)
    return table.store(held, synchronize(held, point, channel))


@pytest.mark.parametrize("layout", ["dense", "known", "sparse"])
@pytest.mark.parametrize("scheme", ["zen", "column_split", "dense_ring"])
def test_a_trace_of_a_step_shows_all_ranges(layout: str, scheme: str) -> None:
    config = _ExperimentalConfig(profile_all_threads=True)  # a lane is a thread of its own
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True) as trace:
        for outcome in run_ranks(2, lambda exchange: _step(exchange, layout, scheme)):
            outcome.get()
    found = {event.name for event in trace.events() or () if event.name.startswith("thinwire::")}
    assert found == RANGES


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(600, 8)
        self.out = nn.Linear(8, 2)


def test_a_profile_shows_each_job_by_name_whatever_thread_runs_it() -> None:
    """As `torch.profiler.profile()` is called by everybody, without the ranges of other threads."""

    def step(exchange: LoopbackExchange) -> set[str]:
        rank = Rank(exchange, module=Tables())
        rank.lane.submit = partial(_ended_elsewhere, rank.lane)
        rank.step(0)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            rank.step(1)
        return {event.name for event in trace.events() or () if event.name.startswith("thinwire::synchronize")}

    (shown,) = on_ranks(1, step)
    assert shown == {"thinwire::synchronize words.weight, group 0"}


def _ended_elsewhere(lane: LoopbackLane, job: Callable[[LoopbackLane], object]) -> Future[object]:
    future: Future[object] = Future()
    Thread(target=future.set_result, args=(job(lane),)).start()
    return future


def test_nothing_is_recorded_while_nobody_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is recorded")

    monkeypatch.setattr(profiler, "record_function", refuse)
    assert not step.enabled()
    for outcome in run_ranks(2, lambda exchange: _step(exchange, "dense", "zen")):
        outcome.get()
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    with pytest.raises(AssertionError, match="thinwire::sum is recorded"):
        step.ranged("sum")(lambda: None)()
    with pytest.raises(AssertionError, match="thinwire::pack is recorded"):
        step.named("pack")


def test_a_torch_that_does_not_tell_gets_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert step.enabled()
    with step.named("find"):
        pass
