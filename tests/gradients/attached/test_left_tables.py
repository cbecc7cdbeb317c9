"""Tables that "auto" leaves to stock DDP, until a trial shows that rows are faster: then, and for how long."""

from __future__ import annotations

import cProfile
import os
from collections.abc import Iterator
from functools import partial
from itertools import count, cycle, islice
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from clocks import SlowRange
from thinwire.comm.c10d import back_end_of
from thinwire.errors import told
from thinwire.gradients import exact
from thinwire.gradients.ddp import _dispatchers, _stock
from thinwire.gradients.exact import NativeAllReduce
from thinwire.gradients.steps import trials
from thinwire.gradients.steps.dense import DenseChoice
from thinwire.kernels import dispatch
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.observe.step import Clock, Load
from thinwire.tune.lossless import Verdict
from thinwire.tune.trial import Trial

pytestmark = pytest.mark.ranks

ROWS, WIDTH = 3000, 8
MOST_ADDED_CALLS = 47
"""Largest number of calls of Python that a step left to DDP makes beside stock's, whether a trial has decided or
watches: 44 by torch 2.13, of which 9 are torch's own around hooks."""
MOST_CALLS_OF_A_PARAMETER = 21
"""Largest number of calls of Python in a step for a parameter of a plain module."""
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


def schemes(sync: thinwire.Synchronizer) -> list[str]:
    return [str(row["scheme"]) for row in sync.table() if str(row["name"]).startswith("tables")]


def sizes_of(step: int, world_size: int) -> list[int]:
    """In the first step alike; then some, or all, or none of the ranks have rows."""
    kinds = [[20] * world_size, [0, *[30] * (world_size - 1)], [7 * rank for rank in range(world_size)],
             [0] * world_size, [40] * world_size]  # fmt: skip
    return kinds[step % len(kinds)]


def _sums(context: RankContext, static_graph: bool, is_observed: bool) -> None:
    """As stock DDP sums them; a trace looks at each bucket, and changes nothing."""
    exact.ROUTE_VARIABLE = "UNSET"
    dtypes = (torch.float32, torch.float64)
    model = Tables(*dtypes)
    ddp = DistributedDataParallel(model, static_graph=static_graph)
    sync = thinwire.attach(ddp)
    assert not ddp._comm_hooks
    for step in range(6):
        if step == 2 and is_observed:
            sync.trace()
        sizes = sizes_of(step, context.world_size)
        model.zero_grad()
        ddp([lookup(context.rank, step, place, sizes[context.rank]) for place in range(2)]).backward()
        for place, (table, dtype) in enumerate(zip(model.tables, dtypes, strict=True)):
            found = table.weight.grad
            expected = expected_mean(context.world_size, dtype, step, place, sizes)
            torch.testing.assert_close(found.coalesce().to_dense(), expected)
    assert schemes(sync) == ["native", "native"]
    assert bool(ddp._comm_hooks) == is_observed
    assert not model._forward_hooks or len(model._forward_hooks) == 1, "but the one that sees the end of the forward"
    booked = sum(int(row["total_bytes"]) for row in sync.table())
    assert booked == sync.stats()["comm/bytes_sent"] > 0
    sync.detach()


@pytest.mark.slow
@pytest.mark.parametrize("is_observed", [False, True])
@pytest.mark.parametrize(("world_size", "static_graph"), [(2, False), (3, False), (3, True)])
def test_stock_sums_those_of_ranks_that_hold_many_few_or_no_rows(
    world_size: int, static_graph: bool, is_observed: bool
) -> None:
    run_ranks(_sums, static_graph, is_observed, world_size=world_size, timeout_seconds=60)


def _sixteen_bits(context: RankContext) -> None:
    exact.ROUTE_VARIABLE = "UNSET"
    model = Tables(torch.bfloat16)
    sync = thinwire.attach(DistributedDataParallel(model))
    for step in range(3):
        sync._model([lookup(context.rank, step, 0, 20)]).backward()
    assert "native" not in schemes(sync)
    sync.detach()


def test_what_torch_cannot_sum_stays() -> None:
    run_ranks(_sixteen_bits, world_size=2, timeout_seconds=60)


class Owned(nn.Module):
    """A table that is a parameter of the user's own module."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=dtype))

    def forward(self, ids: Tensor, factors: Tensor) -> Tensor:
        return (nn.functional.embedding(ids, self.weight, sparse=True) * factors.to(self.weight.dtype)).sum().double()


def _looked_up_by_a_function(context: RankContext, dtype: torch.dtype) -> str:
    exact.ROUTE_VARIABLE = "UNSET"
    module = Owned(dtype)
    sync = thinwire.attach(module)
    for step in range(3):
        module.zero_grad()
        module(*lookup(context.rank, step, 0, 20)).backward()
        assert module.weight.grad.is_sparse
        expected = expected_mean(context.world_size, dtype, step, 0, [20] * context.world_size)
        torch.testing.assert_close(module.weight.grad.to_dense(), expected, rtol=0.01, atol=0.001)
    (scheme,) = {str(row["scheme"]) for row in sync.table() if row["name"] == "weight"}
    sync.detach()
    return scheme


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients_that_no_module_announces_are_not_left_to_torch(dtype: torch.dtype) -> None:
    """It sums none of sixteen bits, and the group is of those whose sums go at the same time."""
    for outcome in run_ranks(_looked_up_by_a_function, dtype, world_size=2, timeout_seconds=60):
        assert outcome.value != "native"


class Mixed(nn.Module):
    """A sparse table and a dense one, which is looked up by a module or by a function, and a layer on top."""

    def __init__(self, by_module: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.dense = nn.Embedding(ROWS, WIDTH) if by_module else Owned()
        self.over = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(torch.cat([self.sparse(ids), nn.functional.embedding(ids, self.dense.weight)], 1)).sum()


def _trained(ddp: DistributedDataParallel, rank: int, step: int) -> list[Tensor]:
    ddp.zero_grad()
    ddp(torch.randint(ROWS, (50,), generator=torch.Generator().manual_seed(1000 * rank + step))).backward()
    return [parameter.grad.to_dense().clone() for parameter in ddp.parameters()]


def _plays(context: RankContext, by_module: bool, rows: float) -> tuple[list[bool], dict[str, object], str]:
    """Whether each step had a hook; a step of rows takes so many times as long as one of stock."""
    exact.ROUTE_VARIABLE = "UNSET"
    note = Trial.note
    seconds = {trials.STOCK: 1.0, trials.ROWS: rows}
    hooked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "note", lambda trial, *_: note(trial, seconds.get(trial.arm, 9.0), 1.0))
        # Sparse sums of two models on one group of Gloo corrupt memory now and then (torch 2.13).
        stock, ddp = (DistributedDataParallel(Mixed(by_module), process_group=dist.new_group()) for _ in range(2))
        sync = thinwire.attach(ddp)
        for step in range(60):
            hooked.append(ddp in _dispatchers and _dispatchers[ddp].target is not None)
            for mine, theirs in zip(
                _trained(ddp, context.rank, step), _trained(stock, context.rank, step), strict=True
            ):
                torch.testing.assert_close(mine, theirs)
        (reason,) = {str(row["reason"]) for row in sync.table() if row["scheme"] == "native"} or {""}
        state = sync.state_dict()
        again = thinwire.attach(DistributedDataParallel(Mixed(by_module)))
        if by_module:
            again.load_state_dict(state)
            assert again.state_dict()["rows"]["standing"] == state["rows"]["standing"]
            assert bool(again._model._comm_hooks) == hooked[-1]
        again.detach()
        if not hooked[-1]:
            assert ddp not in _dispatchers, "the hook is gone, and not only idle"
            assert not ddp._comm_hooks
        sync.detach()
    return hooked, state["rows"], reason


@pytest.mark.slow
@pytest.mark.parametrize("by_module", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_trial_in_which_rows_are_slower_leaves_no_hook(by_module: bool) -> None:
    first, *others = [one.value for one in run_ranks(_plays, by_module, 3.2, world_size=3, timeout_seconds=60)]
    assert all(other == first for other in others)
    hooked, state, reason = first
    assert state["standing"] == trials.STOCK
    assert sum(hooked) == 2
    assert not any(hooked[:3]), "stock waited for less than rows cost before their first sum"
    assert reason.startswith("stock DDP: a step with rows takes 3.20 times as long")


@pytest.mark.slow
@pytest.mark.parametrize("by_module", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_trial_in_which_rows_are_faster_keeps_them(by_module: bool) -> None:
    first, *others = [one.value for one in run_ranks(_plays, by_module, 0.2, world_size=2, timeout_seconds=60)]
    assert all(other == first for other in others)
    hooked, state, _ = first
    assert state["standing"] == trials.ROWS
    assert all(hooked[12:])


class Skips(nn.Module):
    """A table, and a layer that some ranks skip in some steps."""

    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=is_sparse)
        self.skipped, self.over = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, skips: bool) -> Tensor:
        found = self.table(ids)
        return self.over(found if skips else self.skipped(found)).sum()


def _finds_unused(context: RankContext, rows: float) -> tuple[list[bool], list[str]]:
    """Whether each step had a hook, and how the table is summed in the end."""
    exact.ROUTE_VARIABLE = "UNSET"
    note, seconds, hooked = Trial.note, {trials.STOCK: 1.0, trials.ROWS: rows}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "note", lambda trial, *_: note(trial, seconds.get(trial.arm, 9.0), 1.0))
        stock, ddp = (DistributedDataParallel(Skips(), find_unused_parameters=True) for _ in range(2))
        sync = thinwire.attach(ddp)
        for step in range(60):
            hooked.append(ddp in _dispatchers and _dispatchers[ddp].target is not None)
            ids = torch.randint(ROWS, (50,), generator=torch.Generator().manual_seed(1000 * context.rank + step))
            for model in (ddp, stock):
                model.zero_grad()
                model(ids, step % 3 == 0 or (context.rank + step) % 2 == 0).backward()
            for mine, theirs in zip(ddp.parameters(), stock.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), "no rank used it"
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad)
        schemes = [str(row["scheme"]) for row in sync.table() if row["name"] == "table.weight"]
        sync.detach()
    return hooked, schemes


@pytest.mark.parametrize("rows", [3.2, 0.2])
def test_stock_plays_where_ddp_looks_for_unused_parameters(rows: float) -> None:
    """DDP sends which ones were used through the group of the model, and buckets go through that, too."""
    first, second = [outcome.value for outcome in run_ranks(_finds_unused, rows, world_size=2, timeout_seconds=60)]
    assert first == second
    hooked, schemes = first
    assert not any(hooked[:3])
    assert any(hooked)
    assert hooked[-1] == (rows < 1.0)
    assert rows < 1.0 or schemes == ["native"]


def _one_rank_watches(context: RankContext) -> None:
    """Rank 0 looks at each bucket of a trial, in which stock wins, and then no more."""
    exact.ROUTE_VARIABLE = "UNSET"
    note, seconds = Trial.note, {trials.STOCK: 1.0, trials.ROWS: 3.2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "note", lambda trial, *_: note(trial, seconds.get(trial.arm, 9.0), 1.0))
        ddp = DistributedDataParallel(Mixed(True))
        sync = thinwire.attach(ddp)
        if context.rank == 0:
            sync.watch_lane(lambda started, ended: None)
        for step in range(20):
            _trained(ddp, context.rank, step)
        assert sync.state_dict()["rows"]["standing"] == trials.STOCK
        assert sync.state_dict()["rows"]["tests"] == 1
        assert bool(ddp._comm_hooks) == (context.rank == 0)
        if context.rank == 0:
            sync.watch_lane(None)
        for step in range(2):
            _trained(ddp, context.rank, step)
        assert context.rank or _dispatchers[ddp].target is None, "idle, until all ranks drop it"
        sync.detach()
        again = thinwire.attach(ddp)
        _trained(ddp, context.rank, 0)
        assert not ddp._comm_hooks
        again.detach()


def test_one_rank_may_watch_while_all_leave_a_model_to_ddp() -> None:
    """A reducer that never had a hook broadcasts its buckets: all ranks get one, or none."""
    run_ranks(_one_rank_watches, world_size=2, timeout_seconds=40)


def _registers(context: RankContext) -> tuple[str, str]:
    """Rank 1 registers a hook of its own after `attach`, that does the same as stock."""
    exact.ROUTE_VARIABLE = "UNSET"
    os.environ["THINWIRE_HOST"] = str(context.rank)
    note = Trial.note
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "note", lambda trial, *_: note(trial, 1.0, 1.0))
        patch.setattr(DenseChoice, "_verdict", lambda *_: Verdict(True, "pays"))
        model = Mixed(True)
        model.sparse.requires_grad_(False)
        ddp = DistributedDataParallel(model)
        sync = thinwire.attach(ddp)
        if context.rank == 1:
            ddp.register_comm_hook(sync._native.process_group, lambda group, bucket: _stock(group, bucket.buffer()))
        for step in range(12):
            ddp(torch.arange(5) + step).backward()
        state = sync.state_dict()
        sync.detach()
    return state["rows"]["reason"], state["dense"]["trial"]["reason"]


def test_a_hook_that_a_rank_registers_after_attach_ends_all_trials_that_want_one() -> None:
    for outcome in run_ranks(_registers, world_size=2, timeout_seconds=40):
        rows, codes = outcome.value
        assert rows == f"stock DDP: rank 1 has registered {trials.TAKEN}"
        assert codes == f"rank 1 has registered {trials.TAKEN}"


def _idle(context: RankContext) -> tuple[list[bool], str, float]:
    """Whether steps of a model whose hook is seen, and then idle, have stock's bits; then rank 1 fails in one."""
    exact.ROUTE_VARIABLE = "UNSET"
    same = []
    stock, ddp = (DistributedDataParallel(Mixed(True), process_group=dist.new_group()) for _ in range(2))
    sync = thinwire.attach(ddp)
    sync.watch_lane(lambda started, ended: None)
    for step in range(6):
        if step == 3:
            sync.watch_lane(None)
        pairs = zip(_trained(ddp, context.rank, step), _trained(stock, context.rank, step), strict=True)
        same.append(all(torch.equal(mine, theirs) for mine, theirs in pairs))
    assert _dispatchers[ddp].target is None
    if context.rank == 1:
        ddp.module.over.weight.register_hook(_fail)
    started = monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        _trained(ddp, context.rank, 6)
    sync.detach()
    return same, str(caught.value), monotonic() - started


def test_an_idle_hook_has_the_bits_of_stock_and_hangs_up_for_a_rank_that_fails() -> None:
    for outcome in run_ranks(_idle, world_size=3, timeout_seconds=60):
        same, error, seconds = outcome.value
        assert all(same), same
        assert "on all ranks" in error if outcome.rank == 1 else "rank" in error, error
        assert seconds < LIMIT_SECONDS


def _joins_idle(context: RankContext) -> list[bool]:
    """Whether a model that had a hook has stock's parameters after `join`, in which rank 0 has no data."""
    exact.ROUTE_VARIABLE = "UNSET"
    models = [DistributedDataParallel(Mixed(True), process_group=dist.new_group()) for _ in range(2)]
    sync = thinwire.attach(models[1], "zen")
    for ddp in models * 2:  # torch has no zeros for a bucket of a sparse table before its second step
        _trained(ddp, context.rank, 0)
    sync.detach()
    sync = thinwire.attach(models[1])
    assert sync._plug.is_stale, "the first forward outside of join drops the hook"
    for ddp in models:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(2 * context.rank):
                _trained(ddp, context.rank, step)
                optimizer.step()
    sync.detach()
    return [torch.equal(*pair) for pair in zip(*(ddp.parameters() for ddp in models), strict=True)]


def test_no_rank_makes_a_new_reducer_while_others_may_have_no_data() -> None:
    """It is made together, as it broadcasts its buckets, and a rank without data does not come."""
    for outcome in run_ranks(_joins_idle, world_size=2, timeout_seconds=40):
        assert all(outcome.value)


def _sends_nothing(context: RankContext, rows: str) -> None:
    """Rank 1 makes no pass in `one_sync`, and gets the mean all the same, rows of sparse tables among it."""
    exact.ROUTE_VARIABLE = "UNSET"
    ddp = DistributedDataParallel(Mixed(True))
    sync = thinwire.attach(ddp, rows)
    for step in range(3):
        ids = torch.randint(ROWS, (50,), generator=torch.Generator().manual_seed(step))
        alone = Mixed(True)
        alone(ids).backward()
        ddp.zero_grad()
        with sync.one_sync():
            if context.rank == 0:
                ddp(ids).backward()
        for mine, one in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_dense(), one.grad.to_dense() / context.world_size)
        assert ddp.module.sparse.weight.grad.is_sparse
    sync.detach()


@pytest.mark.parametrize("rows", ["auto", pytest.param("zen", marks=pytest.mark.slow)])
def test_a_rank_without_any_pass_sends_no_rows_of_a_sparse_table(rows: str) -> None:
    run_ranks(_sends_nothing, rows, world_size=2, timeout_seconds=60)


def _threads(context: RankContext) -> list[tuple[list[int], list[tuple[int, str]], bool]]:
    """Threads of the back ends of DDP's group, which of them do its sums, and whether it was connected for a model."""
    exact.ROUTE_VARIABLE = "UNSET"
    groups, threads = list[dist.ProcessGroup](), []

    def spied(number: int, back_end: Any) -> Any:
        def spy(name: str, *given: Any) -> Any:
            used.append((number, name))
            return getattr(back_end, name)(*given)

        return SimpleNamespace(allreduce=partial(spy, "allreduce"), broadcast=partial(spy, "broadcast"))

    layers = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4), *(nn.EmbeddingBag(9, 4, sparse=True) for _ in "12")
    for number, layer in enumerate(layers):
        ddp = DistributedDataParallel(nn.Sequential(layer, nn.Linear(4, 1)), find_unused_parameters=number == 3)
        sync = thinwire.attach(ddp)
        assert sync._native is not None
        group: Any = sync._native.process_group
        used: list[tuple[int, str]] = []
        back_ends = list(islice(getattr(group, "turns", [back_end_of(group)]), 2))
        if len(back_ends) > 1:
            group.turns = cycle(map(spied, count(), back_ends))
        for step in range(3):
            ddp(torch.tensor([[step, 2, 8 - context.rank]])).sum().backward()
        threads.append(([one.options._threads for one in back_ends], used, group not in groups))
        if len(back_ends) > 1:
            group.turns = cycle(back_ends)
        groups.append(group)
        sync.detach()
    return threads


def test_torch_sums_sparse_gradients_one_after_the_other() -> None:
    """Two threads of Gloo write the names of their collectives to one string, whose memory both free if it is long."""
    step = [(turn, "allreduce") for turn in (0, 1)]  # a table, and the rest
    turns = [*step, (0, "broadcast"), (1, "broadcast"), *step, *step]  # of rebuilt buckets
    for outcome in run_ranks(_threads, world_size=2, timeout_seconds=60):
        assert outcome.value == [
            ([1, 1], turns, True),
            ([2], [], True),
            ([1, 1], turns, False),
            ([1, 1], 3 * step, False),  # by a hook: with find_unused_parameters DDP's own go through its group
        ]


def _loses_a_peer(context: RankContext, dies: bool) -> tuple[str, float]:
    """Rank 1 fails in the backward of a table that is left to DDP, or ends there; what another one raises, and when."""
    exact.ROUTE_VARIABLE = "UNSET"
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)))
    sync = thinwire.attach(ddp)
    ddp(torch.tensor([context.rank])).sum().backward()
    if context.rank == 1:
        ddp.module[0].weight.register_hook(lambda _: os._exit(0) if dies else _fail(_))
    started = monotonic()
    try:
        ddp(torch.tensor([context.rank])).sum().backward()
    except (RuntimeError, ValueError) as error:
        sync.detach()
        return str(error), monotonic() - started
    raise AssertionError("a sum without rank 1")


@pytest.mark.parametrize("dies", [False, True])
def test_an_error_names_the_rank_that_left_a_sum_of_torch_of_sparse_gradients(dies: bool) -> None:
    for outcome in run_ranks(_loses_a_peer, dies, world_size=3, timeout_seconds=60, check=False):
        if outcome.rank != 1:
            error, seconds = outcome.value
            assert "rank 1" in error, error
            assert seconds < LIMIT_SECONDS


def _untouched(context: RankContext, by_module: bool) -> set[str]:
    """What a job whose network is fast never pays for."""
    exact.ROUTE_VARIABLE = "UNSET"
    ddp = DistributedDataParallel(Mixed(by_module))
    sync = thinwire.attach(ddp)
    hooks = (ddp.module.sparse, ddp.module.dense, ddp.module.dense.weight)
    for step in range(20):
        _trained(ddp, context.rank, step)
    assert not any(getattr(one, name) for one in hooks[:2] for name in ("_forward_hooks", "_forward_pre_hooks"))
    assert not hooks[2]._backward_hooks
    assert not sync._lane._measured
    tables = {sync._names[key] for key in sync._buckets._tables}
    sync.detach()
    return tables


@pytest.mark.parametrize("by_module", [True, False])
def test_before_stock_has_waited_nothing_is_hooked_and_nothing_is_measured(by_module: bool) -> None:
    """But a table that no module announces has been seen in the first forward."""
    for outcome in run_ranks(_untouched, by_module, world_size=2, timeout_seconds=60):
        assert outcome.value == {"dense.weight"}


def _hooked(context: RankContext, is_ddp: bool, is_sparse: bool, rows: float) -> tuple[list[bool], list[str]]:
    """Whether the table of a model with hooks went as rows in each step, and how it is summed in the end."""
    exact.ROUTE_VARIABLE = "UNSET"
    note, seconds, went = Trial.note, {trials.STOCK: 1.0, trials.ROWS: rows}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "note", lambda trial, *_: note(trial, seconds.get(trial.arm, 9.0), 1.0))
        module, alone = Skips(is_sparse), Skips(is_sparse)
        wrapped = DistributedDataParallel(module, find_unused_parameters=True) if is_ddp else module
        sync = thinwire.attach(wrapped)
        for step in range(60):
            went.append(not sync._gradients.is_stock)
            ids = torch.randint(ROWS, (50,), generator=torch.Generator().manual_seed(1000 * context.rank + step))
            for model in (wrapped, alone):
                model.zero_grad()
                model(ids, step % 3 == 0 or (context.rank + step) % 2 == 0).backward()
            for mine, own in zip(module.parameters(), alone.parameters(), strict=True):
                used = torch.tensor(float(own.grad is not None))
                mean = torch.zeros_like(own) if own.grad is None else own.grad.to_dense() / context.world_size
                dist.all_reduce(used)
                dist.all_reduce(mean)
                assert (mine.grad is None) == (used == 0)
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad.to_dense(), mean)
            assert module.table.weight.grad.is_sparse == is_sparse
        rows_of_table = [row for row in sync.table() if row["name"] == "table.weight"]
        assert sum(int(row["total_bytes"]) for row in sync.table()) == sync.stats()["comm/bytes_sent"]
        sync.detach()
    return went, [str(row["scheme"]) for row in rows_of_table]


@pytest.mark.parametrize("rows", [3.2, 0.2])
@pytest.mark.parametrize(("is_ddp", "is_sparse"), [(False, False), (False, True), (True, True)])
def test_stock_plays_where_hooks_stay(is_ddp: bool, is_sparse: bool, rows: float) -> None:
    """In a plain module, and where torch's sums of sparse gradients would race in a group that DDP keeps."""
    outcomes = run_ranks(_hooked, is_ddp, is_sparse, rows, world_size=2, timeout_seconds=60)
    first, second = [outcome.value for outcome in outcomes]
    assert first == second
    went, schemes = first
    assert not any(went[:3])
    assert any(went)
    assert went[-1] == (rows < 1.0)
    assert rows < 1.0 or schemes == ["native"]


def _with_nothing_to_gain(kind: str, size: int) -> nn.Module:
    """Return a small model on a fast network, of so many layers or tables."""
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 if "table" in kind else size)])
    if "table" not in kind:
        return layers
    is_sparse = kind == "sparse table"
    return nn.Sequential(Sum(nn.Embedding(50, 4, sparse=is_sparse) for _ in range(1 if is_sparse else size)), layers)


class Sum(nn.ModuleList):
    """The sum of the rows that are looked up in some tables."""

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([table(batch[:, 0].long()) for table in self]).sum(0)


def _costs(context: RankContext, kind: str) -> tuple[list[str], list[int]]:
    """What loads kernels, and how many calls of Python a step has more than one of stock, by size of the model."""
    exact.ROUTE_VARIABLE = "UNSET"
    loads, added = list[str](), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "has_numba", lambda: bool(loads.append(kind)) or True)
        patch.setattr(trials, "SETUP_SECONDS", 1e6)  # more than a busy machine can make them wait
        for size in (3, 26):
            made = []
            for is_attached in (False, True):
                model = _with_nothing_to_gain(kind, size)
                if kind == "FSDP2":
                    model = fully_shard(model)
                elif kind != "plain module":
                    model = DistributedDataParallel(model, process_group=dist.new_group(), bucket_cap_mb=1e-4)
                sync = thinwire.attach(model) if is_attached else None
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                made.append(min(_calls(model, optimizer, step) for step in range(20)))
                if sync is not None:
                    if (rows := sync._steps.decisions.rows) is not None:
                        rows.trial.decline("what a trial would say")
                        made[1] = max(made[1], min(_calls(model, optimizer, step) for step in range(20)))
                    booked = {row["steps"] for row in sync.table() if row["bytes"]}
                    assert booked <= {sync.stats()["comm/steps"]}, "steps that DDP did are counted when somebody reads"
                    assert not sync._lane._measured
                    assert not getattr(model, "_comm_hooks", ())
                    sync.detach()
            added.append(made[1] - made[0])
    return loads, added


def _calls(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    profile = cProfile.Profile()
    profile.enable()
    model(torch.full((8, 4), float(step))).sum().backward()
    optimizer.step()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats() if not isinstance(entry.code, str))  # of C


@pytest.mark.parametrize("kind", ["MLP", "tables", "sparse table", "plain module", "FSDP2"])
def test_a_model_with_nothing_to_gain_loads_no_kernels_and_has_no_hook_in_its_buckets(kind: str) -> None:
    """Beside DDP, what a step costs does not grow with the model: nothing is called for a bucket or a parameter."""
    for outcome in run_ranks(_costs, kind, world_size=2, timeout_seconds=60):
        loads, (small, large) = outcome.value
        assert loads == []
        if kind not in ("plain module", "FSDP2"):
            assert small == large <= MOST_ADDED_CALLS, (small, large)
        elif kind == "plain module":
            assert large - small <= MOST_CALLS_OF_A_PARAMETER * 2 * (26 - 3), (small, large)


def _keeps_its_gradient(context: RankContext) -> list[bool]:
    """Whether torch's all-reduce leaves the gradient alone that DDP handed over, which is the parameter's own."""
    unchanged = []
    native = NativeAllReduce(dist.group.WORLD, exact.GradientSync("auto"), thinwire.LostPeerError)  # type: ignore[arg-type]
    for start in (
        lambda gradient: native.start_sparse("table", gradient, Clock().submit(Load("bucket 0"))),
        lambda gradient: _stock(dist.group.WORLD, gradient),  # type: ignore[arg-type]
    ):
        gradient = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), torch.ones(3, 2), (5, 2))
        parts = gradient._indices(), gradient._values()
        mean = start(gradient).wait().to_dense()
        assert mean.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
        now = gradient._indices(), gradient._values()
        unchanged.append(
            all(a.data_ptr() == b.data_ptr() and len(a) == len(b) for a, b in zip(parts, now, strict=True))
        )
    return unchanged


def test_no_thread_of_torch_writes_to_a_gradient_that_the_user_has_back() -> None:
    """A backward that fails returns at once, while the all-reduce of a bucket may end at any time afterwards."""
    for outcome in run_ranks(_keeps_its_gradient, world_size=2, timeout_seconds=60):
        assert outcome.value == [True, True]


def _steps(context: RankContext, how: str) -> Iterator[thinwire.Synchronizer]:
    """A table that goes as rows."""
    model = Tables(torch.float32)
    sync = thinwire.attach(DistributedDataParallel(model) if how == "DDP" else model)
    for step in count():
        model.zero_grad()
        sync._model([lookup(context.rank, step, 0, 20 + step)]).backward()
        yield sync


TABLE = "tables.0.weight"
RANGES = {
    "DDP": {f"synchronize {TABLE}", "all_reduce bucket 1"},
    "plain": {f"synchronize {TABLE}", "all_reduce group 1"},
}


def _profiles(context: RankContext, how: str) -> set[str]:
    found = set()
    steps = _steps(context, how)
    for _ in range(3):
        with profiler.profile() as trace:
            next(steps)
        found |= {event.name.removeprefix("thinwire::") for event in trace.function_events or ()}
    return {name for name in found if name.startswith(("all_reduce ", "synchronize "))}


@pytest.mark.slow
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
            next(steps)
            late += SlowRange.not_ended
        seen = set(SlowRange.seen)
        patch.setattr(exact.GradientSync, "tables", _fail)
        with pytest.raises(ValueError, match="on all ranks"):
            next(steps)
        return seen, late, list(SlowRange.not_ended)


def _fail(*arguments: object) -> None:
    raise told(ValueError("on all ranks"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", RANGES)
def test_a_range_of_the_profiler_ends_before_its_backward(how: str) -> None:
    """A profile may end with backward, and frees the memory into which torch writes the end of a range."""
    for outcome in run_ranks(partial(_late_ranges, how=how), world_size=2, timeout_seconds=60):
        seen, late, of_failure = outcome.value
        assert seen == {f"thinwire::{name}" for name in RANGES[how]}
        assert late == []
        assert not [name for name in of_failure if TABLE in name], "others need not be over when backward raises"
