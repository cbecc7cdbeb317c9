"""Small tables travel together: stacked and cut apart without a trace, in jobs that every rank forms alike."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.futures import Future

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject, opening_bytes
from thinwire.gradients.buckets import MAX_WAITING_BYTES, Buckets, Sums
from thinwire.gradients.exact import SMALL_TABLE_BYTES, GradientSync
from thinwire.gradients.tables import LookupRows, TableGradient, share, stack, unstack
from thinwire.lab.ledger import sent_bytes
from thinwire.rows.sparse import SparseRows
from thinwire.sums.named import AUTO, NAMED
from thinwire.sums.scheme import begins_with_opening

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# --- stacking


def random_rows(num_rows: int, count: int, width: int, dtype: torch.dtype, seed: int) -> SparseRows:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randperm(num_rows, generator=source)[: min(count, num_rows)].sort().values
    return SparseRows(ids, torch.randn(len(ids), width, generator=source).to(dtype), num_rows)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    width=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_what_is_stacked_is_cut_apart_again(
    sizes: list[tuple[int, int]], width: int, dtype: torch.dtype, seed: int
) -> None:
    """Also empty tables, and tables without rows."""
    tables = [random_rows(rows, count, width, dtype, seed + place) for place, (rows, count) in enumerate(sizes)]
    stacked = stack(tables)
    checked = SparseRows(stacked.ids, stacked.values, stacked.num_rows)  # sorted, unique, in range
    assert torch.equal(checked.to_dense(), torch.cat([table.to_dense() for table in tables]))
    for ours, table in zip(unstack(stacked, [table.num_rows for table in tables]), tables, strict=True):
        assert torch.equal(ours.ids, table.ids)
        assert torch.equal(ours.values, table.values)
        assert ours.num_rows == table.num_rows


@given(total=st.integers(0, 10**12), weights=st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_shares_lose_nothing(total: int, weights: list[int]) -> None:
    shares = share(total, weights)
    assert sum(shares) == total
    if any(weights):
        assert all(abs(part - total * weight / sum(weights)) <= 1 for part, weight in zip(shares, weights, strict=True))
    else:
        assert max(shares) - min(shares) <= 1


# --- the plan


def table(name: str, num_rows: int, width: int = 8, dtype: torch.dtype = torch.float32) -> TableGradient:
    return TableGradient(name, torch.zeros(1, 1, dtype=dtype).expand(num_rows, width))


sizes = st.tuples(
    st.integers(0, 100_000),
    st.sampled_from([1, 8, 16]),
    st.sampled_from(DTYPES[:2]),
    st.none() | st.integers(0, 100_000),
)


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


# --- synchronization


class LoopbackLane:
    """As much of a lane as a job needs."""

    def __init__(self, exchange: LoopbackExchange) -> None:
        self.exchange, self.world_size, self.rank = exchange, exchange.world_size, exchange.rank
        self.subjects: list[Subject] = []

    def channel(self, subject: Subject) -> Channel:
        self.subjects.append(subject)
        return Channel(self.exchange, subject, len(self.subjects))


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


def test_a_row_that_cancelled_is_zero_in_a_dense_gradient_afterwards() -> None:
    """A sum by blocks does not tell of it, and this rank's share of it must not stay."""
    table = TableGradient("t", torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 1, 2]))
    mean = SparseRows(torch.tensor([0, 2]), torch.full((2, 2), 9.0), 3)
    assert table.store(table.rows(), mean) is table.gradient
    assert table.gradient.tolist() == [[9.0, 9.0], [0.0, 0.0], [9.0, 9.0]]


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


# --- which buckets make a job


class FakeLane:
    """Runs nothing until told to; counts jobs."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def submit(self, job: Any, begin: Any = None) -> Future[Any]:
        future: Future[Any] = Future()

        def run(lane: Any) -> None:
            try:
                future.set_result(job(lane) if begin is None else job(lane, begin(lane)))
            except Exception as error:
                future.set_exception(error)
                raise

        self.jobs.append(run)
        return future


def sparse_bucket(parameter: nn.Parameter, rows: int = 4, is_last: bool = False) -> Any:
    ids = torch.arange(rows)[None]
    shape = tuple(parameter.shape)
    gradient = torch.sparse_coo_tensor(ids, torch.ones(rows, shape[1]), shape, check_invariants=False)
    return SimpleNamespace(
        buffer=lambda: gradient, parameters=lambda: [parameter], is_last=lambda: is_last, index=lambda: 0
    )


def dense_bucket(is_last: bool = False) -> Any:
    parameter = nn.Parameter(torch.zeros(10))
    buffer = torch.ones(10)
    return SimpleNamespace(
        buffer=lambda: buffer,
        parameters=lambda: [parameter],
        gradients=lambda: [buffer],
        is_last=lambda: is_last,
        index=lambda: 0,
    )


class Rig:
    """Buckets of some sparse parameters, all of which were seen before."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size, 16)) for size in sizes]
        names = {id(parameter): f"p{place}" for place, parameter in enumerate(self.parameters)}
        self.lane = FakeLane()
        self.gradients = GradientSync("zen")
        lane: Any = self.lane
        self.buckets = Buckets(Sums(self.gradients), LookupRows(nn.Module()), names, lane)

    def first_step(self) -> None:
        for parameter in self.parameters:
            self.buckets.add(sparse_bucket(parameter))
        self.lane.jobs.clear()

    def add(self, place: int, is_last: bool = False) -> Future[Tensor]:
        return self.buckets.add(sparse_bucket(self.parameters[place], is_last=is_last))


def test_no_bucket_waits_the_first_time() -> None:
    rig = Rig([100, 100])
    rig.add(0)
    rig.add(1)
    assert len(rig.lane.jobs) == 2


def test_small_sparse_buckets_wait_for_the_last_one() -> None:
    rig = Rig([100, 100, 100])
    rig.first_step()
    rig.add(0)
    rig.add(1)
    assert not rig.lane.jobs
    rig.add(2, is_last=True)
    assert len(rig.lane.jobs) == 1
    rig.buckets.flush()
    assert len(rig.lane.jobs) == 1, "nothing was left"


@pytest.mark.parametrize("closing", ["dense", "large", "flush"])
def test_small_sparse_buckets_wait_for_one_that_does_not(closing: str) -> None:
    rig = Rig([100, 100, 100_000])
    rig.first_step()
    rig.add(0)
    rig.add(1)
    assert not rig.lane.jobs
    if closing == "dense":
        rig.buckets.add(dense_bucket())
    elif closing == "large":
        rig.add(2)
    else:
        rig.buckets.flush()
    assert len(rig.lane.jobs) == 1
    rig.add(0)
    assert len(rig.lane.jobs) == 1, "the next ones wait again"


def test_no_more_than_so_many_bytes_wait() -> None:
    each = SMALL_TABLE_BYTES
    rig = Rig([each // 64] * 6)
    rig.first_step()
    jobs = []
    for place in range(6):
        rig.add(place)
        jobs.append(len(rig.lane.jobs))
    assert 4 * each == MAX_WAITING_BYTES
    assert jobs == [0, 0, 0, 0, 1, 1]


def test_every_bucket_of_a_job_gets_its_own_mean_or_the_failure() -> None:
    rig = Rig([100, 50])
    rig.first_step()
    futures = [rig.add(0), rig.buckets.add(dense_bucket(is_last=True))]
    done = run_ranks(1, lambda exchange: rig.lane.jobs[0](LoopbackLane(exchange)) or "done")
    assert [outcome.get() for outcome in done] == ["done"]
    assert futures[0].wait().shape == (100, 16)
    assert torch.equal(futures[1].wait(), torch.ones(10))

    rig.lane.jobs.clear()
    futures = [rig.add(0), rig.add(1, is_last=True)]
    with pytest.raises(AttributeError):
        rig.lane.jobs[0](None)  # a lane without anything: any failure will do
    for future in futures:
        with pytest.raises(AttributeError):
            future.wait()
