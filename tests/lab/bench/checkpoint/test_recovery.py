"""When all ranks are killed, and what they had done."""

from __future__ import annotations

import subprocess

import pytest

from checkpoint_kills import Killer, RankMessage
from thinwire.lab.bench.checkpoint.recovery import RankRestored, RankStarted, Stepped, Watcher


def told(ranks: int, steps: int) -> list[tuple[int, object]]:
    """What ranks tell that make a step every second; rank r is r tenths late."""
    messages: list[tuple[int, object]] = [(rank, RankRestored(4, 0.5 + rank)) for rank in range(ranks)]
    for step in range(5, 5 + steps):
        messages += [(rank, Stepped(step, 1.0 / step, step + 0.1 * rank)) for rank in range(ranks)]
    return messages


def test_progress_is_what_all_ranks_have_and_a_part_of_the_running_iteration() -> None:
    watcher = Watcher(world_size=2)
    for rank, message in told(2, 3):
        watcher(rank, message)
    watcher(0, Stepped(8, 0.1, 8.0))  # rank 1 did not come so far
    watcher.killed_at = 7.6
    assert watcher.reached() == 7
    assert watcher.progress(1.0) == pytest.approx(7.5)
    assert watcher.progress(0.1) == 8.0, "a late death is not more than one iteration"
    assert watcher.losses()[(1, 6)] == (1 / 6).hex()


def test_all_ranks_are_killed_once_all_have_come_so_far() -> None:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    lost: list[str] = []
    watcher = Watcher(world_size=2, kill_at=6, also=lambda: lost.append("host"))
    for rank, process in enumerate(processes):
        watcher(rank, RankStarted(process.pid))
    messages = told(2, 2)
    for rank, message in messages[:-1]:
        watcher(rank, message)
    assert [process.poll() for process in processes] == [None, None], "rank 1 has not made step 6"
    watcher(*messages[-1])
    assert [process.wait(60) for process in processes] == [-9, -9]
    assert lost == ["host"]


class TestKiller:
    """The campaign of kills sees a wrong state, and loses a host only when its copies are elsewhere."""

    def killer(self, kind: str, killed: list[str]) -> Killer:
        made = Killer(
            [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]], kind, 0, 1, 0.0, lambda: killed.append("lost")
        )
        made.kill = lambda *ranks: killed.append(f"killed {sorted(ranks)}")  # type: ignore[method-assign]
        return made

    def test_a_state_of_another_step_is_wrong(self) -> None:
        killer = self.killer("", [])
        killer(0, RankMessage("restored", 2, "a2"))
        assert killer.wrong == []
        killer(1, RankMessage("restored", 2, "b1"))
        killer(0, RankMessage("state", 3, "a2"))
        assert [text[:5] for text in killer.wrong] == ["wrong", "wrong"]
        assert "rank 1 is in another state after step 2" in killer.wrong[0]

    def test_a_host_is_lost_when_a_newer_version_is_everywhere(self) -> None:
        done: list[str] = []
        killer = self.killer("host", done)
        for rank, name in enumerate("ab"):
            killer(rank, RankMessage("pid", 100 + rank))
            killer(rank, RankMessage("restored", 1, f"{name}1"))
        for rank, name in enumerate("ab"):
            killer(rank, RankMessage("state", 2, f"{name}2"))
            killer(rank, RankMessage("kept", 1))
        assert done == [], "only the version that was restored is everywhere"
        killer(0, RankMessage("kept", 2))
        assert done == ["killed [0, 1]", "lost", "killed [0, 1]"]

    def test_trainers_are_killed_while_they_restore(self) -> None:
        done: list[str] = []
        killer = self.killer("restore", done)
        killer(0, RankMessage("pid", 100))
        assert done == []
        killer(1, RankMessage("pid", 101))
        assert done == ["killed [0, 1]"]
