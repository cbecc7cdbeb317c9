"""Trials: what is tried in the time there is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab.doctor.diagnosed import with_tables
from thinwire.lab.analyze import trials
from thinwire.lab.doctor.advice import Advice
from thinwire.lab.doctor.diagnosis import NOT_TRIED, finalists
from thinwire.lab.planning.planner import ROWS, step_seconds
from thinwire.plan.plan import STOCK


def test_trials_end_in_time_by_trying_less_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed = with_tables(100)
    advised = [(way, Advice(way.name)) for way in finalists(diagnosed)]
    tried, now = [], [0.0]

    def run(function: object, script: str, data: object, advice: Advice, *more: object, **settings: Any) -> Any:
        tried.append(advice.name)
        now[0] += 5.0 + trials.seconds_of_trial(step[advice.name])
        return [[step[advice.name]]] * 4

    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(trials, "run_on_ranks", run)
    step = {way.name: step_seconds(diagnosed.measurement, way) for way, _ in advised}

    def names(deadline: float) -> list[str]:
        tried.clear()
        now[0] = 0.0
        rows = trials.try_script(Path("train.py"), [], advised, diagnosed.measurement, None, deadline=deadline)
        assert [row.name for row in rows] == [way.name for way, _ in advised]
        assert all(row.failure.startswith(NOT_TRIED) for row in rows if row.name not in tried)
        return list(dict.fromkeys(tried))

    in_order = [way.name for way, _ in advised]
    assert names(1000.0) == in_order
    assert names(0.0) == in_order[:2] == [STOCK, ROWS], "the best exact way in any case"
    begun = [5.0 + trials.seconds_of_trial(seconds) for seconds in step.values()]
    assert names(sum(begun[:3]) + 0.1) == in_order[:3], "then what loses least, though the next one is shorter"
    step[ROWS] *= 3.5
    names(1000.0)
    assert tried.count(ROWS) == 2, "what cannot be is measured again"
