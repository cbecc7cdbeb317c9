"""A script that is run until its steps are timed: what is refused, what ended too early, and the name of its link."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from measured import measurement
from thinwire.lab.analyze import steps
from thinwire.lab.analyze.failure import ScriptError, ScriptFailed
from thinwire.lab.analyze.step_recorder import StepRecorder
from thinwire.lab.analyze.steps import measure_script, run_watched
from thinwire.lab.planning.ready import WARM_STEPS
from thinwire.lab.planning.training import How
from thinwire.lab.testbed.launch import RanksFailed
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", [])  # what a script is given
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train.py"
    path.write_text("print('one step')\n")
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How ranks are asked to measure, in place of them."""
    asked: list[Any] = []

    def run(function: Any, script: str, arguments: list[str], how: How, **settings: Any) -> list[Any]:
        asked.append((script, arguments, how, settings))
        settings["on_message"](0, "the link")
        return [measurement().to_json(), None]

    monkeypatch.setattr(steps, "run_on_ranks", run)
    return asked


@pytest.mark.parametrize("workers", [None, 3])
@pytest.mark.parametrize(
    ("link", "expected"), [(None, "named"), (Link(None), "named"), (Link(250.0), "emulated, 250 Mbit/s, 3 hosts")]
)
def test_ranks_measure_as_asked_and_an_emulated_link_has_its_name(
    script: Path, asked: list[Any], workers: int | None, link: Link | None, expected: str
) -> None:
    network = None if link is None else EmulatedNetwork(3, link)
    stages: list[str] = []
    found = measure_script(script, ("--lr", "1"), workers, How((), link="named"), network, stages.append)
    assert found == measurement()
    assert stages == ["the link"]
    ((path, arguments, how, settings),) = asked
    assert (path, arguments, how) == (str(script), ["--lr", "1"], How((), link=expected))
    assert settings["world_size"] == workers
    assert settings["network"] is network


def test_no_compressor_is_refused_before_ranks_start(script: Path, asked: list[Any]) -> None:
    with pytest.raises(ValueError, match="zip9"):
        measure_script(script, [], 2, How(("zip9",)))
    assert asked == []


def test_a_script_without_a_model_or_with_an_error_is_named(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "run_on_ranks", lambda *arguments, **settings: [None, None])
    with pytest.raises(ValueError, match=r"^train.py ended without wrapping a model in .*DistributedDataParallel"):
        measure_script(script, [], 2, How())

    def fail(*arguments: Any, **settings: Any) -> Any:
        raise RanksFailed("rank 1 was killed", [])

    monkeypatch.setattr(steps, "run_on_ranks", fail)
    with pytest.raises(ScriptFailed, match=r"train.py"):
        measure_script(script, [], 2, How())


# --- on a rank


def test_a_script_of_few_steps_says_how_many_are_needed(script: Path) -> None:
    recorder = StepRecorder(How(steps=4))
    recorder.num_models = 1
    with pytest.raises(ScriptFailed, match=r"train.py ended before 7 training steps were timed: let it train longer"):
        run_watched(recorder, script, [])


class Watched(StepRecorder):
    """A recorder that has seen some steps, and counts what it is told."""

    def __init__(self, num_steps: int, num_models: int = 1) -> None:
        super().__init__(How(steps=4))
        self.num_models, self.seen, self.calls = num_models, num_steps, list[str]()

    @property
    def num_steps(self) -> int:
        return self.seen

    def finish(self) -> None:
        self.calls.append("finish")
        self.finished, self.measurement = True, measurement()

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("num_steps", [WARM_STEPS - 1, WARM_STEPS, WARM_STEPS + 3])
def test_a_script_that_ends_early_is_measured_by_the_steps_that_it_had(script: Path, num_steps: int) -> None:
    """But for those that warm up; its last step has not ended."""
    recorder = Watched(num_steps)
    if num_steps < WARM_STEPS:
        with pytest.raises(ScriptFailed, match=f"before {WARM_STEPS + 4} training steps"):
            run_watched(recorder, script, [])
        assert recorder.calls == ["close"]
    else:
        assert run_watched(recorder, script, []) == measurement()
        assert recorder.calls == ["finish", "close"]


def test_a_lane_is_closed_behind_a_script_without_a_model_or_group_or_with_an_error(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = Watched(0, num_models=0)
    assert run_watched(without, script, []) is None
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    left = Watched(9)
    with pytest.raises(ScriptFailed, match=r"train.py ended before"):
        run_watched(left, script, [])
    script.write_text("raise KeyError('no data')")
    failing = Watched(9)
    with pytest.raises(KeyError):
        run_watched(failing, script, [])
    assert without.calls == left.calls == failing.calls == ["close"]


def test_a_rank_leaves_with_the_result_or_with_the_error_of_its_script(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as there are enough steps; the script sees nothing of it."""
    told: list[str] = []
    monkeypatch.setattr(steps, "as_torchrun", lambda context: None)
    monkeypatch.setattr(steps, "StepRecorder", lambda how, on_stage: on_stage("steps") or recorder)

    class Left(BaseException):
        pass

    def leave(result: Any) -> Any:
        told.append("measured" if result() == measurement().to_json() else "something else")
        raise Left

    def run_and_leave(watched: Any, path: Path, arguments: list[str]) -> Any:
        watched.on_enough()

    for rank in range(2):
        recorder = Watched(9)
        told.clear()
        monkeypatch.setattr(steps, "run_watched", run_and_leave)
        with pytest.raises(Left):
            steps._measure_rank(RankContext(rank, 2, rank, 0, told.append, leave), str(script), [], How())
        assert told == ["steps"] * (rank == 0) + ["measured"]
        assert recorder.calls[:2] == ["finish", "close"]

    def run_and_fail(watched: Any, path: Path, arguments: list[str]) -> Any:
        raise ArithmeticError("no data")

    monkeypatch.setattr(steps, "run_watched", run_and_fail)
    with pytest.raises(ScriptError, match="no data"):
        steps._measure_rank(RankContext(1, 2, 1, 0, told.append, leave), str(script), [], How())
