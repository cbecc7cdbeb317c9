"""Small tables with sparse gradients that "auto" leaves to torch's own sparse all-reduce, straight from the hook."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

import thinwire
from clocks import SlowRange
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine
from thinwire.errors import told
from thinwire.gradients import exact
from thinwire.gradients.exact import LEFT_STEPS, NativeAllReduce
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.sync import choose, experience

ROWS, WIDTH = 3000, 8
LIMIT_SECONDS = 15.0  # for what otherwise takes the timeout of 60 s


class Tables(nn.Module):
    """Gradients are what each lookup is multiplied with, so each rank knows those of all others."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        tables = [nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype) for dtype in dtypes]
        self.tables = nn.ModuleList(tables)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, lookups: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = self.bias.sum().double()
        for table, (ids, factors) in zip(self.tables, lookups, strict=True):
            total = total + (table(ids) * factors.to(table.weight.dtype)).sum().double()
        return total


def lookup(rank: int, step: int, place: int, size: int) -> tuple[Tensor, Tensor]:
    """Ids of which many are there twice."""
    data = torch.Generator().manual_seed(1000 * rank + 10 * step + place)
    ids = torch.randint(0, min(ROWS, max(1, size)), (size,), generator=data)
    return ids, torch.randn(size, WIDTH, generator=data, dtype=torch.float64)


def own_gradient(dtype: torch.dtype, ids: Tensor, factors: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(ids[None], factors.to(dtype), (ROWS, WIDTH)).coalesce()


def expected_mean(world_size: int, dtype: torch.dtype, step: int, place: int, sizes: list[int]) -> Tensor:
    """Summed in the order of ranks, and then scaled."""
    total = torch.sparse_coo_tensor(size=(ROWS, WIDTH), dtype=dtype).to_dense()
    for rank in range(world_size):
        total += own_gradient(dtype, *lookup(rank, step, place, sizes[rank])).to_dense()
    return total * (1.0 / world_size)


def leave_small(most_bytes: float = 512 * 1024) -> None:
    """Whatever this machine takes for a byte."""
    exact.LEFT_SECONDS, exact.LEFT_BYTES = math.inf, most_bytes


def schemes(sync: thinwire.Synchronizer) -> list[str]:
    return [str(row["scheme"]) for row in sync.table() if str(row["name"]).startswith("tables")]


def sizes_of(step: int, world_size: int) -> list[int]:
    """In the first step alike; then some, or all, or none of the ranks have rows."""
    kinds = [[20] * world_size, [0, *[30] * (world_size - 1)], [7 * rank for rank in range(world_size)],
             [0] * world_size, [40] * world_size]  # fmt: skip
    return kinds[step % len(kinds)]


def _sums(context: RankContext, static_graph: bool) -> None:
    leave_small()
    dtypes = (torch.float32, torch.float64)
    model = Tables(*dtypes)
    ddp = DistributedDataParallel(model, static_graph=static_graph)
    sync = thinwire.attach(ddp)
    for step in range(6):
        sizes = sizes_of(step, context.world_size)
        model.zero_grad()
        ddp([lookup(context.rank, step, place, sizes[context.rank]) for place in range(2)]).backward()
        for place, (table, dtype) in enumerate(zip(model.tables, dtypes, strict=True)):
            found = table.weight.grad
            assert found.is_coalesced()
            expected = expected_mean(context.world_size, dtype, step, place, sizes)
            if step:
                assert torch.equal(found.to_dense(), expected)
                exact = expected_mean(context.world_size, torch.float64, step, place, sizes)
                torch.testing.assert_close(found.to_dense().double(), exact, atol=1e-6, rtol=1e-6)
    assert schemes(sync) == ["native", "native"]
    sync.detach()


@pytest.mark.parametrize(("world_size", "static_graph"), [(2, False), (3, False), (3, True)])
def test_sums_in_rank_order_of_ranks_that_hold_many_few_or_no_rows(world_size: int, static_graph: bool) -> None:
    run_ranks(_sums, static_graph, world_size=world_size, timeout_seconds=60)


def _sixteen_bits(context: RankContext) -> None:
    leave_small()
    model = Tables(torch.bfloat16)
    sync = thinwire.attach(DistributedDataParallel(model))
    for step in range(3):
        sync._model([lookup(context.rank, step, 0, 20)]).backward()
    assert "native" not in schemes(sync)
    sync.detach()


def test_what_torch_cannot_sum_stays() -> None:
    run_ranks(_sixteen_bits, world_size=2, timeout_seconds=60)


def _grows(context: RankContext) -> list[str]:
    """Small batches, one that is large on one rank alone, and small ones again."""
    leave_small(20_000)
    model = Tables(torch.float32)
    sync = thinwire.attach(DistributedDataParallel(model))
    seen = []
    for step in range(8):
        sizes = [2500 if step == 4 and rank == 1 else 20 for rank in range(context.world_size)]
        model.zero_grad()
        sync._model([lookup(context.rank, step, 0, sizes[context.rank])]).backward()
        expected = expected_mean(context.world_size, torch.float32, step, 0, sizes)
        torch.testing.assert_close(model.tables[0].weight.grad.to_dense(), expected)
        seen += schemes(sync)
    restored = thinwire.attach(DistributedDataParallel(Tables(torch.float32)))
    restored.load_state_dict(sync.state_dict())
    assert restored._gradients.learned() == sync._gradients.learned()
    sync.detach()
    restored.detach()
    return seen


def test_a_table_that_grows_comes_back_on_all_ranks_together() -> None:
    first, *others = [outcome.value for outcome in run_ranks(_grows, world_size=3, timeout_seconds=60)]
    assert first[:5] == ["native"] * 5
    assert all(scheme != "native" for scheme in first[5:])
    assert all(other == first for other in others)


def _many(context: RankContext) -> tuple[list[str], list[int]]:
    leave_small()
    model = Tables(*[torch.float32] * 4)
    sync = thinwire.attach(DistributedDataParallel(model))
    for step in range(3):
        model.zero_grad()
        sync._model([lookup(context.rank, step, place, 20) for place in range(4)]).backward()
        for place, table in enumerate(model.tables):
            expected = expected_mean(context.world_size, torch.float32, step, place, [20] * context.world_size)
            torch.testing.assert_close(table.weight.grad.to_dense(), expected)
    fused = [int(row["fused"]) for row in sync.table() if str(row["name"]).startswith("tables")]
    seen = schemes(sync)
    sync.detach()
    return seen, fused


def test_many_small_tables_travel_together_and_are_not_left_one_by_one() -> None:
    for outcome in run_ranks(_many, world_size=3, timeout_seconds=60):
        seen, fused = outcome.value
        assert "native" not in seen
        assert fused == [4] * 4


def _declines(context: RankContext) -> list[int]:
    """Steps show that torch's own all-reduce is the fastest; then one rank's batch is eight times as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "machine", lambda lane: Machine(2e-3, 3e-4, 2e-9, 2e-9, 1e-5, *[1e-8, 1e-10] * 3))
        patch.setattr(exact, "LEFT_BYTES", -1)
        patch.setattr(choose, "MIN_BYTES", 1.0)
        patch.setattr(experience, "is_clearly_torchs", lambda *_: True)
        model = Tables(torch.float32)
        sync = thinwire.attach(DistributedDataParallel(model))
        seen = []
        for step in range(7):
            sizes = [2400 if step == 4 and rank == 1 else 300 for rank in range(context.world_size)]
            model.zero_grad()
            sync._model([lookup(context.rank, step, 0, sizes[context.rank])]).backward()
            expected = expected_mean(context.world_size, torch.float32, step, 0, sizes)
            torch.testing.assert_close(model.tables[0].weight.grad.to_dense(), expected)
            seen.append(sync._gradients.left.get("tables.0.weight", 0))
        booked = sum(int(row["total_bytes"]) for row in sync.table())
        assert booked == sync.stats()["comm/bytes_sent"]
        sync.detach()
    return seen


def test_a_large_table_is_left_after_two_steps_and_comes_back_when_it_grows() -> None:
    first, *others = [outcome.value for outcome in run_ranks(_declines, world_size=3, timeout_seconds=60)]
    assert first[:4] == [0, LEFT_STEPS, LEFT_STEPS - 1, LEFT_STEPS - 2], "the second step tried it, on the lane"
    assert first[4:] == [0, LEFT_STEPS, LEFT_STEPS - 1], "one step on the lane showed again that torch is faster"
    assert all(other == first for other in others)


def _accounts(context: RankContext) -> tuple[float, float, float]:
    """Two backward passes a step, of which the second one synchronizes the sum of both."""
    leave_small()
    model = Tables(torch.float32)
    sync = thinwire.attach(DistributedDataParallel(model))
    sync._model([lookup(context.rank, 0, 0, 20)]).backward()
    before, held = sync.stats(), 0
    for step in range(1, 4):
        model.zero_grad()
        batches = [lookup(context.rank, 10 * step + number, 0, 10 * (1 + context.rank)) for number in range(2)]
        with sync.no_sync():
            sync._model([batches[0]]).backward()
        sync._model([batches[1]]).backward()
        held += torch.cat([ids for ids, _ in batches]).unique().numel()
    after = sync.stats()
    assert after["comm/steps"] - before["comm/steps"] == 3
    assert after["comm/seconds"] > before["comm/seconds"]
    assert schemes(sync) == ["native"]
    (row,) = [row for row in sync.table() if row["scheme"] == "native"]
    assert row["bytes"] == row["dense_bytes"]
    sync.detach()
    sent, stock = (after[name] - before[name] for name in ("comm/bytes_sent", "comm/bytes_dense"))
    return sent, stock, held


def test_bytes_of_all_ranks_together_are_those_that_gloo_sends() -> None:
    """A ring in which each row travels to all ranks but its own; the bias takes a ring of 20 bytes beside it."""
    outcomes = [outcome.value for outcome in run_ranks(_accounts, world_size=3, timeout_seconds=60)]
    rows = sum(held for _, _, held in outcomes)
    tables = 2 * rows * (8 + 4 * WIDTH) + 3 * 3 * 2 * exact.sparse_all_reduce_bytes([0, 0], 0, 0)
    assert sum(sent for sent, _, _ in outcomes) == tables + 3 * 3 * exact.ring_all_reduce_bytes(20, 3)
    assert all(sent == stock for sent, stock, _ in outcomes)


def _raises(context: RankContext, place: int) -> tuple[float, str]:
    """The last rank fails in its hook, before or after one of two tables went off, and lives on."""
    leave_small()
    model = Tables(torch.float32, torch.float32)
    sync = thinwire.attach(DistributedDataParallel(model), timeout=timedelta(seconds=60))
    lookups = [lookup(context.rank, 0, place, 20) for place in range(2)]
    for _ in range(3):
        sync._model(lookups).backward()
    assert schemes(sync) == ["native", "native"]
    started_tables = []

    def fail(native: NativeAllReduce, name: str, *others: object) -> object:
        started_tables.append(name)
        if len(started_tables) > place:
            raise ValueError("of the user")
        return start(native, name, *others)

    start = NativeAllReduce.start_sparse
    if context.rank == context.world_size - 1:
        NativeAllReduce.start_sparse = fail  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises((ValueError, thinwire.PeerError)) as caught:
        sync._model(lookups).backward()
    seconds = time.monotonic() - started
    torch.distributed.barrier()
    return seconds, type(caught.value).__name__


@pytest.mark.parametrize("place", [0, 1])
def test_peers_hear_of_a_rank_that_fails_and_lives(place: int) -> None:
    outcomes = run_ranks(partial(_raises, place=place), world_size=4, timeout_seconds=60)
    assert [outcome.value[1] for outcome in outcomes] == [*["LostPeerError"] * 3, "ValueError"]
    assert max(outcome.value[0] for outcome in outcomes) < LIMIT_SECONDS


def _steps(context: RankContext, how: str) -> Iterator[thinwire.Synchronizer]:
    """A table that goes as rows in the first step, and is left to torch later if this is DDP."""
    leave_small()
    model = Tables(torch.float32)
    sync = thinwire.attach(DistributedDataParallel(model) if how == "DDP" else model)
    for step in count():
        model.zero_grad()
        sync._model([lookup(context.rank, step, 0, 20 + step)]).backward()
        yield sync


TABLE = "tables.0.weight"
RANGES = {
    "DDP": {f"synchronize {TABLE}", f"all_reduce {TABLE}", "all_reduce bucket 1"},
    "plain": {f"synchronize {TABLE}", f"synchronize {TABLE}, group 1", "synchronize group 1"},
}


def _profiles(context: RankContext, how: str) -> set[str]:
    found = set()
    steps = _steps(context, how)
    for _ in range(3):
        with profiler.profile() as trace:
            next(steps)
        found |= {event.name.removeprefix("thinwire::") for event in trace.function_events or ()}
    return {name for name in found if name.startswith(("all_reduce ", "synchronize "))}


@pytest.mark.parametrize("how", RANGES)
def test_a_profile_shows_each_job_by_name_whatever_thread_runs_it(how: str) -> None:
    """As `torch.profiler.profile()` is called by everybody, without the ranges of other threads."""
    for outcome in run_ranks(partial(_profiles, how=how), world_size=2, timeout_seconds=60):
        assert outcome.value == RANGES[how]


def _late_ranges(context: RankContext, how: str) -> tuple[set[str], list[str], list[str]]:
    """The ranges of three steps, those that had not ended with their backward, and those of one that failed."""
    late = []
    steps = _steps(context, how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "_is_profiler_enabled", True)
        patch.setattr(profiler, "record_function", SlowRange)
        for _ in range(3):
            sync = next(steps)
            late += SlowRange.not_ended
        seen = set(SlowRange.seen)
        patch.setattr(sync._gradients, "left", {})
        patch.setattr(exact.GradientSync, "tables", _fail)
        with pytest.raises(ValueError, match="on all ranks"):
            next(steps)
        return seen, late, list(SlowRange.not_ended)


def _fail(*arguments: object) -> None:
    raise told(ValueError("on all ranks"), 2)


@pytest.mark.parametrize("how", RANGES)
def test_a_range_of_the_profiler_ends_before_its_backward(how: str) -> None:
    """A profile may end with backward, and frees the memory into which torch writes the end of a range."""
    for outcome in run_ranks(partial(_late_ranges, how=how), world_size=2, timeout_seconds=60):
        seen, late, of_failure = outcome.value
        assert seen == {f"thinwire::{name}" for name in RANGES[how]}
        assert late == []
        assert not [name for name in of_failure if TABLE in name], "others need not be over when backward raises"
