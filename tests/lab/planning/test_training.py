"""A training that is measured: its step is split into groups and tables, and no speed is measured that rank 0 knows."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loopback import LoopbackExchange
from loopback import run_ranks as run_threads
from measured import codec, link, measurement
from thinwire.compress.base import Parameter
from thinwire.lab.planning import training
from thinwire.lab.planning.cache import Speeds
from thinwire.lab.planning.codecs import exchanges_of
from thinwire.lab.planning.planner import defaults
from thinwire.lab.planning.ready import WARM_STEPS, Ready, TouchedRows, Training
from thinwire.lab.planning.speeds import COPIES
from thinwire.lab.planning.training import How, check, measure_training, trained_parameters
from thinwire.lab.testbed.launch import RankContext, run_ranks
from threaded import LoopbackLane


class Words(nn.Module):
    """A table, a layer, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=True)
        self.layer = nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.frozen(self.layer(self.table(ids)))


def words_of(model: nn.Module, optimizer: bool = True) -> Training:
    return Training(
        model,
        lambda: torch.arange(6),
        lambda model, ids: model(ids).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None,
    )


def test_what_trains_is_known_by_name_and_tables_among_it() -> None:
    model = Words()
    trained, tables = trained_parameters(model)
    assert list(trained) == ["table.weight", "layer.weight", "layer.bias"]
    assert tables == {"table.weight"}
    model.table.weight.requires_grad_(False)
    assert trained_parameters(model) == ({"layer.weight": model.layer.weight, "layer.bias": model.layer.bias}, set())


def test_compressors_that_nobody_knows_are_refused_before_anything_runs() -> None:
    check([])
    check(["bf16", "top_k:density=0.01"])
    with pytest.raises(ValueError, match="zip9"):
        check(["bf16", "zip9"])


SECONDS = st.floats(0, 10, allow_subnormal=False)


@given(st.lists(st.tuples(SECONDS, st.booleans()), min_size=1, max_size=8), st.booleans())
def test_no_time_is_lost_where_tables_leave_the_groups(steps: list[tuple[float, bool]], is_sparse: bool) -> None:
    """What is left is ready when it was, and each table too."""
    parameters = tuple(Parameter(f"{number}", (10, 3)) for number in range(len(steps)))
    ready = Ready(parameters, tuple(seconds for seconds, _ in steps), 0.5, 0.25)
    touched = {f"{number}": TouchedRows((2.0, 3.0), 4.0) for number, (_, is_table) in enumerate(steps) if is_table}
    moments = dict(zip("01234567", accumulate(ready.backward_seconds)))  # noqa: B905  # as many as there are
    others, tables = training._apart(ready, touched, {"0"} if is_sparse else set())
    assert [entry.name for entry in others.parameters] == [name for name in moments if name not in touched]
    assert list(accumulate(others.backward_seconds)) == pytest.approx([moments[e.name] for e in others.parameters])
    assert {table.name: table.ready_seconds for table in tables} == {name: moments[name] for name in touched}
    assert all((table.num_rows, table.width, table.held, table.union) == (10, 3, (2.0, 3.0), 4.0) for table in tables)
    assert [table.name for table in tables if table.is_sparse] == ["0"] * (is_sparse and "0" in touched)
    assert (others.forward_seconds, others.rest_seconds) == (0.5, 0.25)


# --- speeds


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured, by each rank; the link in any case has 7 Mbit/s then, and a codec 5 seconds."""
    calls: list[str] = []
    monkeypatch.setattr(training, "measure_link", lambda lane, probe: calls.append("link") or link(7.0))

    def measure_codec(lane: Any, text: str, exchange: str, device: torch.device) -> Any:
        calls.append(text)
        return codec(text, exchange, 5.0)

    monkeypatch.setattr(training, "measure_codec", measure_codec)
    return calls


def speeds(
    monkeypatch: pytest.MonkeyPatch, known: list[Speeds], how: How
) -> tuple[list[Speeds], list[list[str]], list[Speeds]]:
    """The speeds by each rank, what each says that it measures, and what is written to the caches."""
    stages: list[list[str]] = [[] for _ in known]
    saved: list[Speeds] = []
    monkeypatch.setattr(training.cache, "save", lambda setting, speeds: saved.append(speeds))

    def run(exchange: LoopbackExchange) -> Speeds:
        lane: Any = LoopbackLane(exchange)
        monkeypatch.setattr(training.cache, "load", lambda setting: known[0])
        return training._speeds(lane, how, torch.device("cpu"), stages[exchange.rank].append)

    return [outcome.get() for outcome in run_threads(len(known), run)], stages, saved


KNOWN = Speeds(link(100.0), (codec(COPIES, "all_reduce"), codec("bf16", "all_gather"), codec("int8", "all_gather")))


def test_nothing_is_measured_that_the_cache_of_rank_0_has(monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    found, stages, saved = speeds(monkeypatch, [KNOWN, KNOWN], How(()))
    assert measured == []
    assert stages == [[], []]
    assert found == [Speeds(KNOWN.link, KNOWN.codecs[:1])] * 2, "what was not asked for is not in it"
    ((link_kept, codecs_kept),) = ((one.link, set(one.codecs)) for one in saved)
    assert (link_kept, codecs_kept) == (KNOWN.link, set(KNOWN.codecs)), "and stays in the cache, which rank 0 writes"


def test_what_it_has_not_is_measured_on_all_ranks_and_said(
    monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    half = Speeds(None, KNOWN.codecs[2:])
    found, stages, saved = speeds(monkeypatch, [half, half], How(("bf16",)))
    exchanges = exchanges_of("bf16")
    assert sorted(measured) == sorted(2 * ["link", COPIES, *["bf16"] * len(exchanges)]), "on both ranks"
    assert found[0] == found[1]
    assert found[0].link == link(7.0)
    assert [one.compressor for one in found[0].codecs] == [COPIES, *["bf16"] * len(exchanges)]
    assert stages == [["the link", "copies", *[f"bf16 by {exchange}" for exchange in exchanges]]] * 2
    assert saved[0].codec("int8", "all_gather") == KNOWN.codecs[2]
    assert saved[0].link == link(7.0)


def test_all_is_measured_again_if_asked_for_and_replaces_what_was_known(
    monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    found, _, _ = speeds(monkeypatch, [KNOWN], How((), fresh=True))
    assert sorted(measured) == sorted(["link", COPIES])
    assert found == [Speeds(link(7.0), (codec(COPIES, "all_reduce", 5.0),))]


# --- the whole


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `measure_training` does, without ranks: the optimizer that it finds is SGD."""
    calls: list[Any] = []

    class NoLane:
        def __init__(self, group: Any) -> None:
            calls.append("open")

        def close(self) -> None:
            calls.append("close")

    def finish(lane: Any, watch: Any, trained: Any, tables: Any, how: How, on_stage: Any) -> Any:
        calls.append(how.compressors)
        return replace(measurement(), optimizer="SGD")

    monkeypatch.setattr(training, "Lane", NoLane)
    monkeypatch.setattr(training, "finish", finish)
    monkeypatch.setattr(training, "begin_together", lambda lane: None)

    def calibrate(one: Training, measured: Any, compressors: Any, on_stage: Any) -> Any:
        calls.append("calibrate")
        return measured

    monkeypatch.setattr(training, "calibrate", calibrate)
    return calls


@pytest.mark.parametrize(
    ("has_optimizer", "asked", "measures"),
    [(True, None, None), (False, None, defaults("")), (True, ("bf16",), ("bf16",)), (False, (), ())],
)
def test_the_optimizer_is_the_users_or_none_and_decides_what_is_measured(
    calls: list[Any], has_optimizer: bool, asked: Any, measures: Any
) -> None:
    found = measure_training(words_of(Words(), has_optimizer), How(asked, steps=1))
    assert found.optimizer == ("SGD" if has_optimizer else "")
    assert calls == ["open", measures, "close", "calibrate"]


def test_ways_are_tried_in_the_default_group_if_asked_for(calls: list[Any]) -> None:
    measure_training(words_of(Words()), How(steps=1, calibrate=False))
    measure_training(words_of(Words()), How(steps=1), object())  # type: ignore[arg-type]
    assert "calibrate" not in calls


def test_a_model_without_anything_to_train_is_refused_and_its_lane_closed(calls: list[Any]) -> None:
    with pytest.raises(ValueError, match="no parameters to plan for: are all of them frozen"):
        measure_training(words_of(Words().requires_grad_(False), optimizer=False))
    assert calls == ["open", "close"]
    calls.clear()
    with pytest.raises(ValueError, match="zip9"):
        measure_training(words_of(Words()), How(("zip9",)))
    assert calls == []


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_that_warm_up_are_trained_too_and_do_not_count(calls: list[Any], steps: int) -> None:
    taken: list[int] = []
    one = words_of(Words())
    trained, tables = trained_parameters(one.model)
    counting = replace(one, batch=lambda: taken.append(1) or torch.arange(6))
    watch = training._train(counting, trained, tables, None, steps)  # type: ignore[arg-type]
    assert len(watch.close()) == steps
    assert len(taken) == WARM_STEPS + steps


def _measure(context: RankContext, home: str) -> Any:
    os.environ["XDG_CACHE_HOME"] = home
    torch.manual_seed(0)
    return measure_training(words_of(Words()), How((), steps=2, calibrate=False)).to_json()


@pytest.mark.slow
@pytest.mark.ranks
def test_all_ranks_have_one_measurement(tmp_path: Path) -> None:
    first, second = (outcome.value for outcome in run_ranks(_measure, str(tmp_path), world_size=2))
    assert {**first, "created": ""} == {**second, "created": ""}
    assert (first["world_size"], first["optimizer"], first["device"]) == (2, "SGD", "cpu")
    assert [entry["name"] for entry in first["parameters"]] == ["layer.bias", "layer.weight"]
    assert [(table["name"], table["union"]) for table in first["tables"]] == [("table.weight", 6.0)]
