"""One rank of `bench sync`: exact methods have the sum, others miss it by what is said, and inputs stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopback import LoopbackExchange
from loopback import run_ranks as run_threads
from thinwire.lab.bench import sync_rank
from thinwire.lab.bench.methods import AGSPARSE_TORCH
from thinwire.lab.bench.sync_rank import _as_rows, _deviation, _errors, _few, _runner, measure
from thinwire.lab.bench.turns import Turns
from thinwire.lab.bench.workload import Workload
from thinwire.lab.ledger import sent_bytes
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.rows.sparse import SparseRows
from thinwire.sums.named import DENSE, ZEN
from threaded import LoopbackLane

WORKLOAD = Workload("lstm", is_trace=False, scale=0.002, seed=1, world_size=2)


def rows_of(ids: list[int], values: list[float]) -> SparseRows:
    return SparseRows(torch.tensor(ids, dtype=torch.int64), torch.tensor(values).view(-1, 1), 100)


ROWS = st.dictionaries(st.integers(0, 99), st.floats(-100, 100, width=32), min_size=1, max_size=12)


@given(ROWS, ROWS, st.data())
def test_a_deviation_is_the_largest_of_a_value_or_all_that_is_too_much(
    right: dict[int, float], extra: dict[int, float], data: st.DataObject
) -> None:
    ids = sorted(right)
    union, exact = torch.tensor(ids), torch.tensor([[right[id]] for id in ids], dtype=torch.float64)

    def deviation(found: dict[int, float]) -> float:
        return _deviation(rows_of(sorted(found), [found[id] for id in sorted(found)]), union, exact)

    assert deviation(right) == 0.0
    missing = data.draw(st.sampled_from(ids))
    assert deviation({id: value for id, value in right.items() if id != missing}) == abs(right[missing])
    superfluous = {id: value for id, value in extra.items() if id not in right}
    assert deviation({**superfluous, **right}) == pytest.approx(sum(map(abs, superfluous.values())))
    other = data.draw(st.floats(-100, 100, width=32))
    assert deviation({**right, missing: other}) == abs(other - right[missing])


def test_where_no_rank_has_rows_all_that_is_found_is_too_much() -> None:
    nothing, none = torch.tensor([], dtype=torch.int64), torch.zeros(0, 1, dtype=torch.float64)
    assert _deviation(rows_of([], []), nothing, none) == 0.0
    assert _deviation(rows_of([3, 4], [2.0, -3.0]), nothing, none) == 5.0


def test_errors_are_those_of_sums_over_all_ranks() -> None:
    ranks = [WORKLOAD.rows(rank) for rank in range(2)]
    total = _as_rows(torch.stack([rows.to_dense().double() for rows in ranks]).sum(0).to_sparse(1))
    errors = _errors(WORKLOAD, {"sum": total, "mine": ranks[0]})
    assert errors["sum"] == 0.0
    assert errors["mine"] == pytest.approx(float(ranks[1].values.double().abs().max()))


def test_the_first_run_is_on_few_rows_of_the_same_width() -> None:
    rows = WORKLOAD.rows(0)
    few = _few(rows)
    assert 0 < few.ids.numel() < rows.ids.numel()
    assert few.num_rows == 64 < rows.num_rows
    assert torch.equal(few.to_dense(), rows.to_dense()[:64])
    assert _few(rows_of([3, 70], [1.0, 2.0])).ids.tolist() == [3]
    small = SparseRows(torch.tensor([1]), torch.ones(1, 2), 5)
    assert torch.equal(_few(small).to_dense(), small.to_dense())


@pytest.mark.parametrize("point", [ZEN, DENSE, AGSPARSE_TORCH], ids=["zen", "dense", "torch"])
def test_each_run_has_the_sum_and_leaves_its_input_as_it_was(point: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of thinwire on two ranks; torch's sum works in place, and here it is that of two ranks with the same."""
    monkeypatch.setattr(sync_rank.dist, "all_reduce", lambda tensor: tensor._values().mul_(2))
    same = point == AGSPARSE_TORCH
    exact = torch.stack([WORKLOAD.rows(0 if same else rank).to_dense() for rank in range(2)]).sum(0)

    def run(exchange: LoopbackExchange) -> list[bool]:
        rows, lane = WORKLOAD.rows(exchange.rank), LoopbackLane(exchange)
        before = rows.values.clone()
        found = [_as_rows(_runner(point, lane, rows)()).to_dense() for _ in range(2)]  # type: ignore[arg-type]
        return [*(torch.equal(one, exact) for one in found), torch.equal(rows.values, before)]

    for outcome in run_threads(1 if same else 2, run):
        assert outcome.get() == [True, True, True]


def _measured(context: RankContext, methods: tuple[str, ...]) -> dict[str, Any]:
    told: list[Any] = []
    found = measure(replace(context, send=told.append), WORKLOAD, methods, Turns(2, warm_up=1))
    assert told == list(methods) * 3
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_agree_on_results_and_bytes_are_those_that_are_predicted() -> None:
    methods = ("zen", "dense", AGSPARSE_TORCH)
    ranks = [outcome.value for outcome in run_ranks(_measured, methods, world_size=2, timeout_seconds=60)]
    predicted = sent_bytes(ZEN, [WORKLOAD.ids(rank) for rank in range(2)], *WORKLOAD.shape(), torch.float32)
    assert [found["zen"].sent_bytes for found in ranks] == list(predicted)
    assert [found[AGSPARSE_TORCH].sent_bytes for found in ranks] == [None, None]
    for method in methods:
        first, second = (found[method] for found in ranks)
        assert first.digest == second.digest
        assert first.chosen == second.chosen == method
        assert first.max_abs_error < 1e-6
        assert second.max_abs_error is None
        assert len(first.times) == len(second.times) == 2
        assert first.machine == second.machine
