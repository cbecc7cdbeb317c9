"""Ranges of the profiler: all five in a trace of a step, and no cost while nobody profiles."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.gradients.tables import TableGradient
from thinwire.observe import step
from thinwire.sums.synchronize import agree, synchronize
from thinwire.tune.prices import chosen

RANGES = {f"thinwire::{name}" for name in ("find", "pack", "exchange", "sum", "scatter")}


def _step(exchange: LoopbackExchange, layout: str, scheme: str) -> torch.Tensor:
    dense = torch.zeros(300, 4)
    dense[exchange.rank :: 7] = 1.0
    gradient = dense.to_sparse(1) if layout == "sparse" else dense
    touched = torch.arange(exchange.rank, 300, 7) if layout == "known" else None
    table = TableGradient("table", gradient, touched)
    channel = Channel(exchange, Subject("table", scheme), 0)
    held, point = agree(table.rows, scheme, channel, chosen)
    return table.store(held, synchronize(held, point, channel))


@pytest.mark.few(4)
@pytest.mark.parametrize("layout", ["dense", "known", "sparse"])
@pytest.mark.parametrize("scheme", ["zen", "column_split", "dense_ring"])
def test_a_trace_of_a_step_shows_all_ranges(layout: str, scheme: str) -> None:
    config = _ExperimentalConfig(profile_all_threads=True)  # a lane is a thread of its own
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True) as trace:
        for outcome in run_ranks(2, lambda exchange: _step(exchange, layout, scheme)):
            outcome.get()
    found = {event.name for event in trace.events() or () if event.name.startswith("thinwire::")}
    assert found == RANGES


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
