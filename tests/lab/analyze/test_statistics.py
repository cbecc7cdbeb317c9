"""`thinwire analyze` without ranks: laws of the statistics, the files of a recording, JSON, page and errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lab.analyze.recordings import NUM_ROWS, WIDTH, ids_of
from thinwire.lab.analyze.prediction import PREDICTED_RANKS, Prediction
from thinwire.lab.analyze.statistics import (
    TableStatistics,
    densification_curve,
    fit_exponent,
    owner_load,
    table_statistics,
)
from thinwire.lab.bench.trace import IndexTrace
from thinwire.lab.ledger import sent_bytes
from thinwire.rows.partition import Contiguous
from thinwire.sums.named import NAMED

pytestmark = pytest.mark.slow

FEW = (2,)
"""World sizes to predict, where predictions are not what is tested."""


def random_trace(seed: int, ranks: int, steps: int, num_rows: int = NUM_ROWS) -> IndexTrace:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        share = float(torch.rand(1, generator=generator)) ** 2
        return (torch.rand(num_rows, generator=generator) < share).nonzero().flatten()

    return IndexTrace(num_rows, WIDTH, tuple(tuple(draw() for _ in range(ranks)) for _ in range(steps)))


traces = st.builds(random_trace, st.integers(0, 1000), st.integers(2, 5), st.integers(1, 3))


@settings(max_examples=10)
@given(traces)
def test_statistics_keep_to_their_ranges(trace: IndexTrace) -> None:
    table = table_statistics("t", trace, ranks=FEW)
    ranks = trace.world_size
    assert 0 <= table.density.min <= table.density.mean <= table.density.max <= 1
    assert len(table.overlaps) == len(trace.steps) * math.comb(ranks, 2)
    assert all(0 <= overlap <= 1 for overlap in table.overlaps)
    assert table.densification[0] == 1
    assert all(1 <= growth <= count + 1e-9 for count, growth in enumerate(table.densification, start=1))
    assert 0 <= table.densification_exponent <= 1
    assert all(value >= 1 - 1e-9 for value in table.skewness.values())
    for load_of in (table.contiguous, table.permutation):
        assert 1 - 1e-9 <= load_of.imbalance_push <= ranks
        assert 1 - 1e-9 <= load_of.imbalance_pull <= ranks
    quantiles = list(table.overlap_quantiles.values())
    assert quantiles == sorted(quantiles)


@settings(max_examples=10)
@given(traces)
def test_no_row_is_lost_between_owners(trace: IndexTrace) -> None:
    table = table_statistics("t", trace, ranks=FEW)
    held = sum(ids.numel() for step in trace.steps for ids in step) / len(trace.steps)
    union = sum(torch.cat(step).unique().numel() for step in trace.steps) / len(trace.steps)
    for load_of in (table.contiguous, table.permutation):
        assert sum(load_of.push_rows) == pytest.approx(held)
        assert sum(load_of.pull_rows) == pytest.approx(union)


@settings(max_examples=10)
@given(traces)
def test_bytes_are_exact_at_the_recorded_ranks(trace: IndexTrace) -> None:
    table = table_statistics("t", trace, torch.float64, ranks=FEW)
    for name, scheme in NAMED.items():
        per_step = [sent_bytes(scheme, step, NUM_ROWS, WIDTH, torch.float64) for step in trace.steps]
        mean = sum(map(sum, per_step)) / (len(per_step) * trace.world_size)
        assert table.sent_bytes[name] == pytest.approx(mean)
        assert table.sent_bytes[name] >= table.lower_bound_bytes


@settings(max_examples=3)
@given(traces)
def test_predictions_cover_all_ranks_and_never_exceed_the_table(trace: IndexTrace) -> None:
    table = table_statistics("t", trace)
    ranks = [prediction.world_size for prediction in table.predictions]
    assert ranks == sorted({*PREDICTED_RANKS, trace.world_size})
    unions = [prediction.union for prediction in table.predictions if prediction.extrapolated]
    assert unions == sorted(unions)
    for prediction in table.predictions:
        assert prediction.extrapolated == (prediction.world_size > trace.world_size)
        assert set(prediction.bytes) == set(prediction.seconds) == set(NAMED)
        assert prediction.union <= NUM_ROWS
        assert prediction.pick in NAMED


def predicted(table: TableStatistics, world_size: int) -> Prediction:
    return next(one for one in table.predictions if one.world_size == world_size)


def test_a_large_table_is_not_hashed_element_by_element() -> None:
    table = table_statistics("t", IndexTrace(1 << 20, 8, ((ids_of(1), ids_of(2)),)))
    assert "zen_elements" not in table.sent_bytes
    assert "zen" in table.sent_bytes
    assert predicted(table, 1024).bytes["zen_elements"] > 0


def test_equal_ids_on_all_ranks() -> None:
    ids = ids_of(1, 5, 9)
    table = table_statistics("t", IndexTrace(NUM_ROWS, WIDTH, ((ids,) * 4, (ids,) * 4)))
    assert table.densification == (1.0,) * 4
    assert table.densification_exponent == 0
    assert set(table.overlaps) == {1.0}
    assert predicted(table, 1024).union == 3


def test_disjoint_ids_on_all_ranks() -> None:
    table = table_statistics("t", IndexTrace(NUM_ROWS, WIDTH, (tuple(ids_of(rank, 100 + rank) for rank in range(4)),)))
    assert table.densification == (1.0, 2.0, 3.0, 4.0)
    assert table.densification_exponent == pytest.approx(1)
    assert set(table.overlaps) == {0.0}
    assert predicted(table, 128).union == pytest.approx(256)
    assert predicted(table, 1024).union == NUM_ROWS


def test_nothing_touched_is_not_an_error() -> None:
    table = table_statistics("t", IndexTrace(NUM_ROWS, WIDTH, ((ids_of(), ids_of()),)))
    assert table.density.max == 0
    assert table.densification == (1.0, 1.0)
    assert table.contiguous.imbalance_push == 1


@given(st.floats(0, 1), st.integers(2, 16))
def test_a_power_law_is_fitted_exactly(exponent: float, ranks: int) -> None:
    curve = [count**exponent for count in range(1, ranks + 1)]
    assert fit_exponent(curve) == pytest.approx(exponent, abs=1e-9)


def test_means_are_over_steps() -> None:
    same, apart = (ids_of(0), ids_of(0)), (ids_of(0), ids_of(1))
    assert densification_curve((same, apart)) == (1.0, 1.5)
    load_of = owner_load((same, apart), Contiguous(2, 2))
    assert load_of.push_rows == (1.5, 0.5)
    assert load_of.pull_rows == (1.0, 0.5)
    assert load_of.imbalance_pull == 1.5


def test_small_tables_have_no_skewness_at_more_parts_than_rows() -> None:
    trace = random_trace(0, ranks=2, steps=1, num_rows=64)
    assert set(table_statistics("t", trace, ranks=FEW).skewness) == {8}


def test_one_rank_has_no_statistics_between_ranks() -> None:
    with pytest.raises(ValueError, match="at least 2 ranks"):
        table_statistics("t", IndexTrace(NUM_ROWS, WIDTH, ((ids_of(1),),)))
