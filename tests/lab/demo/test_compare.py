"""The demo's training on real ranks: four variants train one model, and stock DDP is measured without a hook."""

import pytest

from tests.lab.demo.small import CONFIG, corpus
from thinwire.lab.demo.compare import LOSS_TOLERANCE, Comparison, compare
from thinwire.lab.demo.train import (
    VARIANTS,
)

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def seen() -> list[tuple[int, int, float]]:
    """What `compare` reported while it ran."""
    return []


@pytest.fixture(scope="module")
def stages() -> list[str]:
    return []


@pytest.fixture(scope="module")
def comparison(seen: list[tuple[int, int, float]], stages: list[str]) -> Comparison:
    """One real run of ``thinwire demo``'s comparison."""

    def on_stage(description: str | None = None, done: int | None = None, total: int | None = None) -> None:
        stages.extend([description] if description else [])

    return compare(corpus(), CONFIG, 2, None, lambda *report: seen.append(report), on_stage)


@pytest.mark.slow
def test_all_variants_have_the_losses_of_stock_ddp(comparison: Comparison) -> None:
    assert list(comparison.results) == ["ddp", "thinwire", "ddp_sparse", "thinwire_sparse"]
    assert comparison.loss_difference <= LOSS_TOLERANCE == 1e-6
    assert comparison.parameters_bitwise_equal
    assert comparison.is_exact
    assert len(set(comparison.results["ddp"].loss)) == CONFIG.steps


@pytest.mark.slow
def test_progress_has_the_losses_of_the_table(comparison: Comparison, seen: list[tuple[int, int, float]]) -> None:
    expected = [(done, CONFIG.steps, pytest.approx(comparison.results["ddp"].loss[done - 1])) for done in (1, 2, 3)]
    assert seen == expected


@pytest.mark.slow
def test_every_stage_before_the_first_measured_step_is_shown(comparison: Comparison, stages: list[str]) -> None:
    shown = [stage for stage in stages if not stage.startswith("Compiling")]
    assert shown == ["Starting 2 ranks on loopback", *(f"First step of {variant.label}" for variant in VARIANTS)]


@pytest.mark.slow
def test_every_variant_is_accounted_for(comparison: Comparison) -> None:
    figures = comparison.to_json()
    for variant in figures["variants"]:
        assert all(variant[key] > 0 for key in ("step_seconds", "comm_seconds", "bytes_per_step"))
    tables = {variant["name"]: variant["parameters"] for variant in figures["variants"]}
    assert not tables["ddp"]
    assert not tables["ddp_sparse"]
    kinds = {row["name"]: row["kind"] for row in tables["thinwire_sparse"]}
    assert kinds["words_in.weight"] == kinds["words_out.weight"] == "sparse gradient"
