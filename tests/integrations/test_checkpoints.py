"""The plug of each trainer for checkpoints in memory: a training that was stopped in an epoch ends as if it was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ranks(torchrun: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    return torchrun("tests/integrations/scripts/kept_in_memory.py")["ranks"]


@pytest.mark.parametrize("trainer", ["hf", "fit", "loop", "titan"])
def test_a_training_that_starts_again_goes_on_in_the_middle_of_an_epoch(
    ranks: list[dict[str, Any]], trainer: str
) -> None:
    assert len(ranks) == 2
    for of in (rank[trainer] for rank in ranks):
        assert of["whole"][0] == of["stopped"][0] == 0
        assert 6 < of["resumed"][0] <= 9, "in the second epoch; a busy machine may have skipped a version"
        assert of["resumed"][1] == of["whole"][1] != of["stopped"][1]
    assert ranks[0][trainer] == ranks[1][trainer]


@pytest.mark.parametrize("trainer", ["hf", "fit"])
def test_a_training_that_failed_is_begun_again_in_the_same_process(ranks: list[dict[str, Any]], trainer: str) -> None:
    for of in (rank[trainer] for rank in ranks):
        assert 6 < of["failed"][0] <= 9
        assert of["failed"][1] == of["whole"][1]


@pytest.mark.parametrize("of", ["compressed", "outer"])
@pytest.mark.parametrize("trainer", ["hf", "fit"])
def test_what_a_thinwire_callback_keeps_is_kept_too(ranks: list[dict[str, Any]], trainer: str, of: str) -> None:
    """Memories of compressors; and ranks that stop in the middle of a round train on in it."""
    for rank in ranks:
        found = rank[f"{trainer}, {of}"]
        assert 6 < found["resumed"][0] <= 9
        assert found["resumed"][1] == found["whole"][1] != rank[trainer]["whole"][1]
