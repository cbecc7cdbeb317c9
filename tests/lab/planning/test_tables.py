"""Costs of tables: small ones of a kind are one job, jobs go as gradients come, and a table survives its file."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from measured import link, table
from thinwire.comm.process_group import sparse_all_reduce_bytes
from thinwire.lab.planning.tables import EmbeddingTable, gathered, row_jobs

HOSTS = tuple((rank,) for rank in range(8))
SMALL = {"num_rows": 1000, "held": (10.0,) * 8, "union": 60.0}
rows = st.floats(0, 1e6)


@given(st.lists(rows, min_size=1, max_size=5), rows, rows, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_table_survives_its_file(held: list[float], union: float, ready: float, dtype: torch.dtype) -> None:
    before = table(held=held, union=union, ready_seconds=ready, dtype=dtype, is_sparse=True)
    after = EmbeddingTable.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    assert after.held == tuple(held)


@pytest.mark.parametrize("change", [{"held": ()}, {"held": (1.0, -1.0)}, {"union": math.nan}, {"ready_seconds": -1.0}])
def test_numbers_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"the table 'words.weight' has rows or seconds that cannot be: \("):
        table(**change)


def test_sizes_are_of_all_rows_and_density_is_of_those_held() -> None:
    one = table(num_rows=100, width=6, dtype=torch.float16, held=(10.0, 30.0), union=35.0)
    assert (one.row_bytes, one.size_bytes, one.density) == (12, 1200, 0.2)
    assert replace(one, num_rows=0, held=(0.0,)).density == 0.0


def test_small_tables_of_a_width_and_type_are_one_job_and_others_go_alone() -> None:
    tables = [
        table("a", ready_seconds=0.04, **SMALL),
        table("large", ready_seconds=0.05),
        table("wide", ready_seconds=0.03, width=128, **SMALL),
        table("b", ready_seconds=0.06, **SMALL),
        table("half", ready_seconds=0.01, dtype=torch.float16, **SMALL),
    ]
    jobs = row_jobs(tables, link(100), HOSTS)
    assert [job.tables for job in jobs] == [("half",), ("wide",), ("large",), ("a", "b")]
    assert [job.ready_seconds for job in jobs] == [0.01, 0.03, 0.05, 0.06], "of the last of its tables"
    together, (alone,) = jobs[-1], row_jobs(tables[:1], link(100), HOSTS)
    assert alone.sent_bytes < together.sent_bytes < 2 * alone.sent_bytes, "headers are sent once"
    assert together.seconds < 2 * alone.seconds


def test_bytes_follow_the_rows_and_not_the_table() -> None:
    (few,) = row_jobs([table()], link(100), HOSTS)
    (more,) = row_jobs([table(held=(2000.0,) * 8, union=12_000.0)], link(100), HOSTS)
    (longer,) = row_jobs([table(num_rows=500_000)], link(100), HOSTS)
    assert 5 * few.sent_bytes < more.sent_bytes < 2 * 12_800_000
    assert longer.sent_bytes < 1.2 * few.sent_bytes
    (slow,) = row_jobs([table()], link(10), HOSTS)
    assert slow.wire_seconds > 3 * few.wire_seconds
    assert few.wire_seconds <= few.seconds


def test_a_sparse_gradient_of_stock_ddp_is_gathered_by_the_busiest_rank() -> None:
    """The rows of all but the next rank, whole ones, and two rounds more for sizes and ids."""
    held = (10.2, 500.0, 3.0)
    one, measured = table(held=held, union=500.0), link(100, alpha=0.002)
    sent = max(sparse_all_reduce_bytes([11, 500, 3], rank, one.row_bytes) for rank in range(3))
    seconds, wire = gathered(one, measured)
    assert wire == pytest.approx(sent * 8e-8)
    assert seconds == pytest.approx(3 * 0.002 + wire)
