"""Measurements of a training by name: what is refused, what the link is called, and whose process group ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from measured import measurement
from tests.lab.doctor.diagnosed import with_tables
from thinwire.lab.analyze import trials
from thinwire.lab.analyze.failure import ScriptError
from thinwire.lab.bench import measured as jobs
from thinwire.lab.bench.jobs.named import parse_job
from thinwire.lab.bench.jobs.own import JobError
from thinwire.lab.bench.measured import measure_in_job, measure_on_hosts, measure_rank
from thinwire.lab.doctor.advice import Advice
from thinwire.lab.doctor.diagnosis import NOT_TRIED, confirm, finalists
from thinwire.lab.planning.planner import ROWS, step_seconds
from thinwire.lab.planning.training import How
from thinwire.lab.testbed.launch import RanksFailed
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

JOB = """
import torch
def make():
    return torch.nn.Linear(3, 2), lambda: torch.ones(4, 3), lambda model, batch: model(batch).sum()
def other():
    return 5
def broken():
    raise ArithmeticError("no batch")
"""


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("job_job", None)


# --- targets


@pytest.mark.parametrize("text", ["digits", "job.py:make"])
def test_a_target_is_a_job_by_name_or_a_function_and_is_alike_by_its_text(text: str) -> None:
    target = parse_job(text)
    assert target == parse_job(text)
    assert target.name == text


@pytest.mark.parametrize(
    ("text", "says"),
    [("chess", "unknown job 'chess'"), ("job.py:none", "no function 'none'"), ("no.py:make", "no file")],
)
def test_what_is_no_target_is_refused_before_anything_is_imported(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_job(text)


# --- hosts


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How each measurement is made, in place of ranks."""
    asked: list[Any] = []

    def values(function: Any, target: Any, data: Any, how: How, path: tuple[str, ...], **settings: Any) -> list[Any]:
        asked.append((how, path, settings))
        settings["on_message"](0, "the link")
        return [measurement().to_json()] * 8

    monkeypatch.setattr(jobs, "values_of_ranks", values)
    monkeypatch.setattr(jobs, "preload", lambda module: None)
    monkeypatch.setattr(EmulatedNetwork, "__enter__", lambda network: network)
    monkeypatch.setattr(EmulatedNetwork, "__exit__", lambda network, *error: None)
    return asked


@pytest.mark.parametrize(
    ("mbit", "name", "expected"),
    [
        (None, "", "loopback"),
        (250.0, "", "emulated, 250 Mbit/s, 4 hosts"),
        (None, "my switch", "my switch"),
        (250.0, "my switch", "my switch"),
    ],
)
def test_a_measurement_has_the_name_of_its_link_and_its_hosts(
    asked: list[Any], mbit: float | None, name: str, expected: str
) -> None:
    stages: list[str] = []
    found = measure_on_hosts(parse_job("job.py:make"), How((), link=name), 4, 2, Link(mbit), stages.append)
    ((how, path, settings),) = asked
    assert how.link == expected
    assert path == tuple(sys.path), "a factory is imported from where the command runs"
    assert settings["world_size"] == 8
    assert settings["ranks_per_host"] == (None if mbit is None else 2)
    assert (settings["network"] is None) == (mbit is None)
    assert found.hosts == (1 if mbit is None else 4)
    assert (found.environment["link_nominal_mbit"], found.environment["target"]) == (mbit, "job.py:make")
    assert stages == ["the link"]


@pytest.mark.parametrize(
    ("hosts", "per_host", "compressors", "says"),
    [(1, 1, (), "1 hosts of 1 ranks: two ranks are needed"), (0, 4, (), "two ranks"), (2, 1, ("zip9",), "zip9")],
)
def test_nothing_runs_of_what_cannot_be_measured(
    asked: list[Any], hosts: int, per_host: int, compressors: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        measure_on_hosts(parse_job("digits"), How(compressors), hosts, per_host, Link(None), print)
    assert asked == []


# --- ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_says_what_is_measured(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    told: list[str] = []

    def measure(training: Any, how: How, on_stage: Any) -> Any:
        on_stage("the link")
        return measurement()

    monkeypatch.setattr(jobs, "measure_training", measure)
    context = RankContext(rank, 2, rank, 0, told.append)
    assert measure_rank(context, parse_job("job.py:make"), None, How(), ("here", *sys.path)) == (
        measurement().to_json()
    )
    assert told == ["the link"] * (rank == 0)
    assert "here" in sys.path


@pytest.mark.parametrize(
    ("text", "kind", "says"), [("job.py:other", JobError, "returns int"), ("job.py:broken", ScriptError, "no batch")]
)
def test_an_error_of_a_job_is_told_as_what_it_is(text: str, kind: type[Exception], says: str) -> None:
    context = RankContext(0, 2, 0, 0, lambda message: None)
    with pytest.raises(kind, match=says) as caught:
        measure_rank(context, parse_job(text), None, How(), tuple(sys.path))
    assert "thinwire/lab" not in str(caught.value)


@pytest.mark.parametrize("is_theirs", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_group_of_a_job_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_theirs: bool, fails: bool
) -> None:
    begun: list[str] = []
    init = dist.init_process_group

    def begin(back_end: str, **settings: Any) -> None:
        begun.append(back_end)
        init(back_end, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)

    def measure(training: Any, how: How, on_stage: Any) -> Any:
        assert dist.is_initialized()
        if fails:
            raise ArithmeticError("no link")
        return measurement()

    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(jobs, "measure_training", measure)
    if is_theirs:
        begin("gloo")
    try:
        if fails:
            with pytest.raises(ArithmeticError):
                measure_in_job(parse_job("job.py:make"), How(), print)
        else:
            assert measure_in_job(parse_job("job.py:make"), How(), print) == measurement()
        assert begun == ["gloo"]
        assert dist.is_initialized() == is_theirs
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# --- trials


def test_a_way_of_a_job_that_fails_ends_no_other_and_none_is_begun_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosed = with_tables(100)
    advised = [(way, Advice(way.name)) for way in finalists(diagnosed)]
    names = [way.name for way, _ in advised]
    tried, now = [], [0.0]

    def run(function: object, target: object, data: object, advice: Advice, *more: object, **settings: Any) -> Any:
        tried.append(advice.name)
        now[0] += 60.0
        if advice.name == ROWS:
            raise RanksFailed("ValueError: not so", [])
        return [[step_seconds(diagnosed.measurement, diagnosed.options[0])]] * 4

    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(jobs, "values_of_ranks", run)
    job = parse_job("job.py:make")
    rows = jobs.try_on_hosts(job, advised, diagnosed.measurement, 1, Link(None), lambda stage: None, 170.0)
    assert list(dict.fromkeys(tried)) == names[:3]
    assert [row.failure.partition(":")[0] for row in rows] == ["", "failed", "", NOT_TRIED]
    assert rows[1].failure == "failed: ValueError: not so"
    assert confirm(diagnosed, rows).plan.does_nothing
