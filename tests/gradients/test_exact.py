"""Small tables travel together: stacked and cut apart without a trace, in jobs that every rank forms alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopback import LoopbackExchange, run_ranks
from tests.gradients.fused import LoopbackLane, random_rows, sizes
from thinwire.comm.channel import opening_bytes
from thinwire.gradients.exact import SMALL_TABLE_BYTES, GradientSync
from thinwire.gradients.tables import TableGradient, stack
from thinwire.lab.ledger import sent_bytes
from thinwire.sums.named import AUTO, NAMED
from thinwire.sums.scheme import begins_with_opening


def table(name: str, num_rows: int, width: int = 8, dtype: torch.dtype = torch.float32) -> TableGradient:
    return TableGradient(name, torch.zeros(1, 1, dtype=dtype).expand(num_rows, width))


# --- the plan


@given(sizes=st.lists(sizes, max_size=12))
def test_each_table_is_in_one_group_and_only_what_is_small_and_alike_is_stacked(sizes: list[tuple[Any, ...]]) -> None:
    sync = GradientSync(AUTO)
    sync.unions = {str(place): union for place, (*_, union) in enumerate(sizes) if union is not None}
    groups = sync.groups([table(str(place), *size) for place, (*size, _) in enumerate(sizes)])
    assert sorted(int(one.name) for group in groups for one in group) == list(range(len(sizes)))
    alike = [{(one.layout.width, one.gradient.dtype) for one in group} for group in groups]
    assert all(len(kinds) == 1 for kinds in alike)
    small = [sync.is_small(group[0]) for group in groups]
    assert all(sync.is_small(one) for group in groups if len(group) > 1 for one in group)
    assert sum(small) == len({next(iter(kinds)) for kinds, is_small in zip(alike, small, strict=True) if is_small})


def test_small_is_what_the_sum_took_last_time_and_the_whole_table_before() -> None:
    sync, limit = GradientSync(AUTO), SMALL_TABLE_BYTES // 32
    assert sync.is_small(table("a", limit))
    assert not sync.is_small(table("a", limit + 1))
    sync.unions["a"] = limit
    assert sync.is_small(table("a", 10**9))
    sync.unions["a"] = limit + 1
    assert not sync.is_small(table("a", 10**9))


SIZES = ((60, 8), (1, 8), (200, 8), (90, 5), (70, 5), (20_000, 8))  # the last one is not small


def gradients_of(rank: int, sparse: bool, step: int = 0) -> list[TableGradient]:
    """Rank 1 holds nothing of the first four; in the last one all ranks share some rows."""
    tables = []
    for place, (num_rows, width) in enumerate(SIZES):
        count = 0 if rank == 1 and place < 4 else 1 + num_rows // 9
        rows = random_rows(num_rows, count, width, torch.float32, 1000 * step + 10 * place + rank)
        gradient = torch.sparse_coo_tensor(rows.ids[None], rows.values, (num_rows, width), check_invariants=False)
        touched = None if place % 2 else rows.ids.flip(0)
        tables.append(
            TableGradient(f"t{place}", gradient) if sparse else TableGradient(f"t{place}", gradient.to_dense(), touched)
        )
    return tables


def step_on(exchange: LoopbackExchange, scheme: str, sparse: bool, fused: bool) -> dict[str, Any]:
    lane: Any = LoopbackLane(exchange)
    sync = GradientSync(scheme)
    tables = gradients_of(exchange.rank, sparse)
    batches = [tables] if fused else [[table] for table in tables]
    means = [mean for batch in batches for mean in sync.tables(lane, batch)]
    sync.finish_step()
    rows = [record.row() for record in sync.records.values()]
    return {
        "means": [mean.to_dense() if mean.is_sparse else mean for mean in means],
        "in place": [mean is table.gradient for mean, table in zip(means, tables, strict=True)],
        "rows": rows,
        "choices": sync.choices,
        "unions": sync.unions,
        "rounds": len(lane.subjects),
    }


# --- synchronization


@pytest.mark.few(6)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("scheme", [AUTO, "zen", "agsparse", "sparse_ps", "column_split", "zen_elements", "omnireduce"])
def test_together_is_the_same_as_alone(scheme: str, sparse: bool) -> None:
    """Every bit where ranks are added in order, in fewer rounds; and the account is that of the wire, to the byte."""
    alone = [outcome.get() for outcome in run_ranks(3, lambda exchange: step_on(exchange, scheme, sparse, False))]
    outcomes = run_ranks(3, lambda exchange: step_on(exchange, scheme, sparse, True))
    for outcome, other in zip(outcomes, alone, strict=True):
        mine = outcome.get()
        for place, (ours, theirs) in enumerate(zip(mine["means"], other["means"], strict=True)):
            if "dense" in (mine["rows"][place]["scheme"], other["rows"][place]["scheme"]):
                torch.testing.assert_close(ours, theirs)  # the group's own all-reduce scales before it adds
            else:
                assert torch.equal(ours, theirs)
        assert sum(row["scheme"] == "dense" for row in (*mine["rows"], *other["rows"])) <= (scheme == AUTO)
        assert all(mine["in place"]) != sparse
        assert (mine["rounds"], other["rounds"]) == (3, 6)
        assert [row["fused"] for row in mine["rows"]] == [3, 3, 3, 2, 2, 1]
        assert [row["fused"] for row in other["rows"]] == [1] * 6
        assert sum(row["bytes"] for row in mine["rows"]) == outcome.traffic.sent_bytes
        assert mine["unions"] == outcomes[0].get()["unions"] == other["unions"]
        assert mine["choices"] == outcomes[0].get()["choices"]
        for key in ("density", "density_after"):
            assert [row[key] for row in mine["rows"]] == [row[key] for row in other["rows"]]
        together, alone = ([row["dense_bytes"] for row in rows] for rows in (mine["rows"], other["rows"]))
        assert sum(together) == sum(alone)
        assert sparse or together == alone


@pytest.mark.parametrize("scheme", ["auto", "zen", "agsparse", "column_split", "dense"])
def test_a_group_sends_what_is_predicted(scheme: str) -> None:
    outcomes = run_ranks(3, lambda exchange: step_on(exchange, scheme, True, True))
    predicted = [0, 0, 0]
    schemes = {row["name"]: NAMED[row["scheme"]] for row in outcomes[0].get()["rows"]}
    held = [[table.rows() for table in gradients_of(rank, True)] for rank in range(3)]
    for group in ((0, 1, 2), (3, 4), (5,)):
        stacked = [stack([tables[place] for place in group]) for tables in held]
        point = schemes[f"t{group[0]}"]
        ids = [rows.ids for rows in stacked]
        for rank, sent in enumerate(sent_bytes(point, ids, stacked[0].num_rows, stacked[0].width, torch.float32)):
            predicted[rank] += sent + (opening_bytes(3) if scheme == AUTO and not begins_with_opening(point) else 0)
    assert [outcome.traffic.sent_bytes for outcome in outcomes] == predicted


def test_the_next_choice_is_of_the_group_and_forgotten_when_the_group_changes() -> None:
    def steps(exchange: LoopbackExchange) -> list[dict[str, str]]:
        lane: Any = LoopbackLane(exchange)
        sync = GradientSync(AUTO)
        seen = []
        for step in range(3):
            tables = gradients_of(exchange.rank, True, step)
            if step == 1:
                sync.unions["t0"] = 10**6  # as if it had been large, on all ranks
            sync.tables(lane, tables)
            seen.append(dict(sync.choices))
        return seen

    everyone = [outcome.get() for outcome in run_ranks(3, steps)]
    first, second, third = everyone[0]
    assert set(first) == {"t0 + t1 + t2", "t3 + t4", "t5"}
    assert set(second) == {"t0", "t1 + t2 + t5", "t3 + t4"}, "the sum of the large table is small"
    assert set(third) == {"t0 + t1 + t2 + t5", "t3 + t4"}
    assert everyone[1] == everyone[2] == everyone[0]


def test_a_failure_names_the_table_on_every_rank() -> None:
    def work(exchange: LoopbackExchange) -> None:
        lane: Any = LoopbackLane(exchange)
        tables = gradients_of(exchange.rank, False)
        if exchange.rank == 1:
            wrong = tables[2].gradient.t().contiguous().t()
            tables[2] = TableGradient("t2", wrong)
        GradientSync("zen").tables(lane, tables)

    for outcome in run_ranks(3, work):
        assert "gradient of 't2'" in str(outcome.error)
