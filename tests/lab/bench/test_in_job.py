"""What a launcher has set: whether this is a rank of a job, and how many hosts of how many ranks there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from thinwire.lab.bench.in_job import is_first_rank, is_in_job, job_group, on_all_ranks, size_of_job
from thinwire.lab.testbed.rank import RankContext

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_rank_of_a_job_has_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_in_job()
    assert is_first_rank(), "who is alone is the first"
    monkeypatch.setenv("RANK", "0")
    assert not is_in_job(), "some shells have a RANK"
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_in_job()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_in_job()
    assert is_first_rank()
    monkeypatch.setenv("RANK", "1")
    assert not is_first_rank()


@pytest.mark.parametrize(("world_size", "local", "expected"), [(8, 4, (2, 4)), (3, 1, (3, 1)), (4, None, (1, 4))])
def test_hosts_have_as_many_ranks_as_this_one(
    monkeypatch: pytest.MonkeyPatch, world_size: int, local: int | None, expected: tuple[int, int]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert size_of_job() == expected


def test_hosts_with_different_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="8 ranks, 3 of them on this host: every host needs the same number"):
        size_of_job()


def test_a_group_of_the_job_is_used_and_left_as_it_was(alone: None) -> None:
    with job_group():
        assert dist.get_world_size() == 1
    assert dist.is_initialized(), "whoever made it ends it"


def test_the_function_has_the_rank_of_the_job_and_its_values_are_those_of_all(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    told: list[str] = []

    def function(context: RankContext, more: int) -> tuple[int, ...]:
        context.send("begun")
        return context.rank, context.world_size, context.local_rank, context.host, more

    assert on_all_ranks(function, 7, on_message=told.append) == [(0, 1, 0, 0, 7)]
    assert told == ["begun"]
