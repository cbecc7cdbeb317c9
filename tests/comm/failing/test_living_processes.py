"""Any failure of a rank makes all others raise at once, while the process that failed lives on."""

from __future__ import annotations

from statistics import median

import pytest
from cells import (
    AUTO_SCHEMES,
    FAILING,
    KINDS,
    MEDIAN_SECONDS,
    OTHER_SCHEMES,
    WORLD_SIZE,
    WORST_SECONDS,
    campaign,
    killed,
    notices,
)

from thinwire.lab.testbed.launch import run_ranks

pytestmark = pytest.mark.ranks

FEW = {
    "auto": (0, 1, 2, 4),
    "zen": (0, -1),
    "column_split": (0, 3, -1),
    "sparcml_coded": (2, -1),
    "two_level:zen": (0, 3, -1),
    "dense": (-1,),
}
NUM_KILLS = {"dense": 2, "agsparse_coded": 4}
"""Points of two synchronizations, where there are less than six."""
KILLS = [(scheme, at) for scheme in (*AUTO_SCHEMES, *OTHER_SCHEMES) for at in range(NUM_KILLS.get(scheme, 6))]


def _run(scheme: str, points: tuple[int, ...] | None, timeout_seconds: float) -> None:
    outcomes = run_ranks(campaign, scheme, KINDS, points, world_size=WORLD_SIZE, timeout_seconds=timeout_seconds)
    seconds = notices([outcome.value for outcome in outcomes])
    print(f"{scheme}: {len(seconds)} cells, median notice {median(seconds):.3f} s, slowest {max(seconds):.3f} s")
    assert median(seconds) < MEDIAN_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [name if name == "column_split" else pytest.param(name, marks=pytest.mark.slow) for name in FEW]
)
def test_some_points_of_a_scheme(scheme: str) -> None:
    _run(scheme, FEW[scheme], timeout_seconds=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheme", [*AUTO_SCHEMES, *OTHER_SCHEMES])
def test_all_points_of_a_scheme(scheme: str) -> None:
    _run(scheme, None, timeout_seconds=1500)


def _check_kill(scheme: str, at: int) -> None:
    outcomes = run_ranks(killed, scheme, at, world_size=WORLD_SIZE, check=False, timeout_seconds=60)
    assert outcomes[FAILING].exit_code == -9
    seconds = [outcome.value[0] for outcome in outcomes if outcome.rank != FAILING]
    assert all(0.0 <= notice < WORST_SECONDS for notice in seconds), [outcome.value for outcome in outcomes]
    print(f"{scheme} killed at {at}: slowest notice {max(seconds):.3f} s")


@pytest.mark.few(1)
@pytest.mark.parametrize(("scheme", "at"), [("zen", 1), ("column_split", 4), ("two_level:zen", 3)])
def test_a_rank_is_killed_at_some_points(scheme: str, at: int) -> None:
    _check_kill(scheme, at)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("scheme", "at"), KILLS)
def test_a_rank_is_killed_at_each_point(scheme: str, at: int) -> None:
    _check_kill(scheme, at)
