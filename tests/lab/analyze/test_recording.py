"""Recordings of all ranks in one."""

from __future__ import annotations

import pytest

from tests.lab.analyze.recordings import BIAS, NUM_ROWS, TABLE, WIDTH, ranks_of, recorded
from thinwire.lab.analyze.recording import Table, recording_of

pytestmark = pytest.mark.slow


def test_a_recording_has_what_all_ranks_saw() -> None:
    recording = recorded()
    assert recording.tables == (TABLE, BIAS)
    assert recording.densities["bias"].tolist() == [[1.0, 1.0]] * 3
    assert list(recording.traces) == ["words"]
    ids = [[ids.tolist() for ids in step] for step in recording.traces["words"].steps]
    assert ids == [[[step, 10], [step, 11]] for step in range(3)]


def test_steps_that_a_rank_did_not_reach_are_left_out() -> None:
    recording = recorded((3, 2))
    assert recording.num_steps == len(recording.traces["words"].steps) == 2


def test_ranks_with_different_models_are_refused() -> None:
    other = Table("words", NUM_ROWS, WIDTH + 1, "float32", "sparse")
    with pytest.raises(ValueError, match="rank 1 synchronized other parameters"):
        recording_of(ranks_of([1, 1], [TABLE, other]))
