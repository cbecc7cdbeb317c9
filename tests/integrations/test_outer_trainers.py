"""Outer loops in each trainer: ranks train apart, and a resumed training has the bits of the uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def trained(torchrun: Run, request: pytest.FixtureRequest) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/outer_loops.py", request.param)


@pytest.fixture(scope="module", params=[2, 4])
def sharded(torchrun: Run, request: pytest.FixtureRequest) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/outer_sharded.py", request.param)


def check(whole: dict[str, Any], resumed: dict[str, Any], hosts: int) -> None:
    """Each rank has its own parameters in the middle of a round, and after the end all have the same."""
    assert len(set(whole["own"])) == len(whole["own"]), "ranks train apart, or have shards"
    assert len(set(whole["end"])) * hosts == len(whole["end"]), "in the end replicas are alike"
    for what in ("own", "end"):
        assert resumed[what] == whole[what], what
    assert resumed["losses"][-4:] == whole["losses"][-4:]


@pytest.mark.parametrize("trainer", ["hf", "lightning", "accelerate"])
def test_over_ddp(trained: dict[str, Any], trainer: str) -> None:
    check(trained[trainer], trained[f"{trainer}_resumed"], len(trained[trainer]["own"]))


@pytest.mark.parametrize("trainer", ["lightning", "accelerate"])
def test_over_fsdp2_with_replicas(sharded: dict[str, Any], trainer: str) -> None:
    """Accelerate shards nothing on one rank a host."""
    if trainer in sharded:
        check(sharded[trainer], sharded[f"{trainer}_resumed"], 2)


def test_what_is_evaluated_and_saved_is_shared(trained: dict[str, Any]) -> None:
    for what in ("evaluations", "losses"):
        assert trained["hf_resumed"][what] == trained["hf"][what] == trained["hf_best"][what], what
    assert trained["lightning_resumed"]["valid"] == trained["lightning"]["valid"]


def test_the_best_model_is_not_taken_for_training(trained: dict[str, Any]) -> None:
    assert trained["hf_best"]["reloaded"] == trained["hf_best"]["end"]


def test_statistics_are_those_of_inner_steps(trained: dict[str, Any]) -> None:
    assert trained["accelerate"]["stats"]["outer/inner_steps"] == 8
    assert len(trained["hf"]["bytes"]) == 8
    assert max(trained["hf"]["bytes"]) > 0
