"""Tables summed by the model's own process group, as over NCCL: here it is Gloo's, with tensors on the CPU.

``THINWIRE_ROUTE=collective`` runs the code that NCCL runs. What it must give are the bits of the staged route.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.errors import LostPeerError, ThinwireError
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4
TABLES = ("words.weight", "users.weight", "items.weight")


class Tables(nn.Module):
    """Tables of several widths, dense and sparse gradients, and layers."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words, self.users = nn.Embedding(900, 16), nn.Embedding(1100, 8, sparse=sparse)
        self.items = nn.EmbeddingBag(700, 24, mode="sum")
        self.hidden, self.last = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, ids: Tensor, skip: bool = False) -> Tensor:
        hidden = self.hidden(self.words(ids)).tanh()
        if not skip:
            hidden = hidden + self.items(ids % 700, torch.arange(len(ids)))
        return self.last(hidden) * self.users(ids)


def batch(rank: int, step: int) -> Tensor:
    """Ids of a step: another number on each rank and in each step, none at all on the last rank of step 1."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    size = 0 if step == 1 and rank == dist.get_world_size() - 1 else 1 + (17 * step + 29 * rank) % 61
    return torch.randint(0, 900, (size,), generator=draw)


@contextmanager
def route(name: str) -> Iterator[None]:
    os.environ["THINWIRE_ROUTE"] = name
    try:
        yield
    finally:
        del os.environ["THINWIRE_ROUTE"]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.coalesce().to_dense() if parameter.grad.is_sparse else parameter.grad.clone()
    return found


def train(
    context: RankContext, way: str, how: str, dtype: torch.dtype = torch.float32, scheme: str = "zen", **options: Any
) -> tuple[list[dict[str, Tensor]], dict[str, float], list[dict[str, Any]]]:
    """The gradients of each step, and the statistics."""
    torch.manual_seed(0)
    sparse, dense = options.pop("sparse", True), options.pop("dense", "auto")
    accumulates = options.pop("accumulates", False)
    model = Tables(sparse).to(dtype)
    trained = DistributedDataParallel(model, bucket_cap_mb=0.02, **options) if how == "DDP" else model
    with route(way):
        sync = thinwire.attach(trained, scheme, dense)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        if accumulates:
            with sync.no_sync():
                trained(batch(context.rank, step + 7)).square().sum().backward()
        trained(batch(context.rank, step)).square().sum().backward()
        steps.append(gradients(model))
    stats, table = sync.stats(), sync.table()
    assert (sync._sums.collective is not None) == (way == "collective" and context.world_size > 1)
    sync.detach()
    return steps, stats, table


def check_same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys(), f"step {step}"
        for name in mine:
            if name in TABLES or name in ("one.weight", "two.weight"):
                assert torch.equal(mine[name], other[name]), f"step {step}, {name}"
            else:  # parts of a bucket that are reduced at once may be added in another order
                tolerance = 1e-2 if mine[name].dtype is torch.bfloat16 else 1e-5
                torch.testing.assert_close(mine[name], other[name], atol=tolerance, rtol=tolerance)


def _as_staged(context: RankContext, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        staged, _, _ = train(context, "staged", **case)
        mine, stats, table = train(context, "collective", **case)
        check_same(mine, staged)
        if context.world_size == 1:
            continue
        assert stats["comm/host_waits"] <= 2 * STEPS + 2 * 3, (
            "twice a step, apart in the first, in which tables are new"
        )
        assert stats["comm/bytes_sent"] == sum(row["total_bytes"] for row in table)
        if "dense" not in case:
            by = {row["name"]: (row["scheme"], row["formats"]) for row in table}
            assert {name for name, way in by.items() if way == ("zen", "by collectives")} == set(TABLES)


CASES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"how": "DDP"}, {"how": "plain"}, {"how": "DDP", "dtype": torch.bfloat16, "sparse": False},
              {"how": "plain", "dtype": torch.float64}],
    "ways of DDP": [{"how": "DDP", "sparse": False, "gradient_as_bucket_view": True, "accumulates": True},
                    {"how": "DDP", "static_graph": True}, {"how": "DDP", "find_unused_parameters": True},
                    {"how": "plain", "accumulates": True}],
}  # fmt: skip
SLOW = {"marks": pytest.mark.slow}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cases"), [
    pytest.param(1, "plain", **SLOW), (2, "plain"), (3, "ways of DDP"), pytest.param(4, "plain", **SLOW),
])  # fmt: skip
def test_the_bits_of_the_staged_route(world_size: int, cases: str) -> None:
    run_ranks(partial(_as_staged, cases=CASES[cases]), world_size=world_size, timeout_seconds=100)


def _on_two_hosts(context: RankContext) -> dict[str, float]:
    """Four ranks on two hosts: the bits of the lane in two levels, and what a sum sends between the hosts."""
    os.environ["THINWIRE_HOST"] = str(context.rank // 2)
    between = {}
    for case in ({"how": "DDP"}, {"how": "plain", "dtype": torch.bfloat16}):
        staged, _, _ = train(context, "staged", **case, scheme="two_level:zen")
        mine, stats, table = train(context, "collective", **case, scheme="two_level:zen")
        check_same(mine, staged)
        by = {row["name"]: (row["scheme"], row["formats"]) for row in table}
        assert {name for name, way in by.items() if way == ("two_level:zen", "by collectives")} == set(TABLES)
        assert stats["comm/host_waits"] <= 3 * STEPS + 3 * 3
        assert stats["comm/bytes_sent"] == sum(row["total_bytes"] for row in table)
        between["two"] = stats["comm/bytes_sent_between_hosts"]
    _, stats, _ = train(context, "collective", **case)
    auto, _, _ = train(context, "collective", "DDP", scheme="auto")
    first: list[Any] = [None] * context.world_size
    dist.all_gather_object(first, auto[-1])
    assert all(torch.equal(theirs[name], auto[-1][name]) for theirs in first for name in TABLES)
    return {**between, "one": stats["comm/bytes_sent_between_hosts"]}


@pytest.mark.slow
def test_two_levels_have_the_bits_of_the_lane() -> None:
    outcomes = [outcome.value for outcome in run_ranks(_on_two_hosts, world_size=4, timeout_seconds=100)]
    assert sum(sent["two"] for sent in outcomes) > 0


def _dies_on_two_hosts(context: RankContext) -> str:
    os.environ["THINWIRE_HOST"] = str(context.rank // 2)
    torch.manual_seed(0)
    model = Tables()
    with route("collective"):
        sync = thinwire.attach(model, "two_level:zen")
    model(batch(context.rank, 0)).square().sum().backward()
    if context.rank == 1:
        os._exit(1)
    loss = model(batch(context.rank, 2)).square().sum()
    with pytest.raises(LostPeerError, match="rank 1") as error:
        loss.backward()
    sync.detach()
    return str(error.value)


def test_a_rank_that_dies_on_one_host_is_named_on_both() -> None:
    outcomes = run_ranks(_dies_on_two_hosts, world_size=4, timeout_seconds=40, check=False)
    assert all("rank 1" in str(outcomes[rank].value) for rank in (0, 2, 3)), outcomes


def _with_compression(context: RankContext) -> None:
    """Compressed gradients go over the lane, tables of the same buckets do not."""
    for how in ("DDP", "plain"):
        options: dict[str, Any] = {"dense": {"hidden.*": thinwire.compress.top_k(0.2)}}
        staged, _, _ = train(context, "staged", how, **options)
        mine, stats, _ = train(context, "collective", how, **options)
        check_same(mine, staged)
        assert stats["comm/host_waits"] >= 2 * STEPS
        assert stats["compress/bytes_sent"] > 0


ORDER = ("all_reduce", "all_to_all_single", "all_gather_single", "all_gather_into_tensor", "allreduce_coalesced")


@contextmanager
def recorded(group: dist.ProcessGroup) -> Iterator[list[tuple[str, int]]]:
    """The collectives that are issued on a group, in order, with the threads that issue them."""
    calls: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in ORDER if hasattr(dist, name)}

    def record(name: str) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            if settings.get("group") is group:
                calls.append((name, threading.get_ident()))
            return originals[name](*args, **settings)

        return call

    for name in originals:
        setattr(dist, name, record(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _order(context: RankContext) -> None:
    """Two models in one backward: each has its buckets before its sum, in the same order on all ranks."""
    group = dist.group.WORLD
    assert group is not None
    for how in ("DDP", "plain"):
        torch.manual_seed(0)
        models = [Tables(), Tables()]
        trained = [DistributedDataParallel(model, bucket_cap_mb=0.02) if how == "DDP" else model for model in models]
        with route("collective"):
            syncs = [thinwire.attach(model, "zen") for model in trained]
        for step in range(3):
            ids = batch(context.rank, step)
            with recorded(group) as calls:
                (trained[0](ids).square().sum() + trained[1](ids.flip(0)).sum()).backward()
            assert len({thread for _, thread in calls}) == 1, "one thread issues"
            names = [name for name, _ in calls]
            told: list[Any] = [None] * context.world_size
            dist.all_gather_object(told, names)
            assert all(theirs == names for theirs in told)
            if step:
                sums = [place for place, name in enumerate(names) if name == "all_to_all_single"]
                assert len(sums) == 2 * 3, "counts, rows and sizes of one sum a model, for all of its tables"
        one = [sync.stats()["comm/host_waits"] for sync in syncs]
        assert one[0] == one[1] >= 6
        syncs[1].detach()
        trained[0](batch(context.rank, 9)).sum().backward()
        syncs[0].detach()
        with route("collective"):
            again = thinwire.attach(trained[0], "zen")
        models[0].zero_grad()
        trained[0](batch(context.rank, 10)).sum().backward()
        assert again.stats()["comm/host_waits"] >= 2
        again.detach()


def _scaler(context: RankContext) -> None:
    """Infinities survive the sum, so that all ranks skip the step."""
    torch.manual_seed(0)
    model = Tables()
    with route("collective"):
        sync = thinwire.attach(DistributedDataParallel(model), "zen")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    sync.detach()
    model = Tables(sparse=False)
    with route("collective"):
        ddp = DistributedDataParallel(model)
        sync = thinwire.attach(ddp, "zen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.words.weight.detach().clone()
    loss = ddp(batch(context.rank, 0)).sum()
    scaler.scale(loss * (float("inf") if context.rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.words.weight, before)
    assert scaler.get_scale() == 2.0
    sync.detach()


class Broken(torch.autograd.Function):
    """A gradient that this rank alone cannot use: its row ids are out of range."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return torch.sparse_coo_tensor(
            torch.tensor([[1, ctx.shape[0] + 5]]), torch.ones(2, ctx.shape[1]), ctx.shape, check_invariants=False
        )


class OneTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(2000, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, ids: Tensor, broken: bool = False) -> Tensor:
        return Broken.apply(self.table.weight) + 0 * self.last.weight.sum() if broken else self.last(self.table(ids))


def _fails(context: RankContext) -> None:
    torch.manual_seed(0)
    model = OneTable()
    with route("collective"):
        sync = thinwire.attach(model, "zen")
    for step in range(2):
        model.zero_grad()
        model(batch(context.rank, step)).sum().backward()
    model.zero_grad()
    with pytest.raises((ThinwireError, ValueError), match="out of range"):
        model(batch(context.rank, 2), broken=context.rank == 1).sum().backward()
    sync.detach()
    with route("collective"):
        sync = thinwire.attach(model, "zen")
    model.zero_grad()
    model(batch(context.rank, 3)).sum().backward()
    sync.detach()


def _leaves_in_the_middle(context: RankContext) -> None:
    """A user's exception on one rank: nothing of that step is summed there, and no later step is."""
    torch.manual_seed(0)
    model = Tables(sparse=False)
    with route("collective"):
        sync = thinwire.attach(model, "zen")
    model(batch(context.rank, 0)).sum().backward()
    model.zero_grad()

    def raising(gradient: Tensor) -> None:
        raise KeyError("of the user")

    output = model(batch(context.rank, 2))
    handle = model.last.weight.register_hook(raising)
    with pytest.raises(KeyError, match="of the user"):
        output.sum().backward()
    handle.remove()
    with pytest.raises(ThinwireError, match="an exception ended a backward pass"):
        model(batch(context.rank, 3))
    sync.detach()


def _other_route(context: RankContext) -> None:
    model = Tables()
    mine = "collective" if context.rank else "staged"
    with route(mine), pytest.raises(thinwire.MismatchError, match="THINWIRE_ROUTE"):
        thinwire.attach(model, "zen")
    error, legal = (ValueError, "unknown THINWIRE_ROUTE 'fast'; legal are auto, rows, collective, staged")
    with route("auto" if context.rank else "fast"), pytest.raises((error, thinwire.MismatchError), match=legal):
        thinwire.attach(model)
    with route("collective"), pytest.raises(thinwire.MismatchError, match=r"'users.weight'.*\[1100, 8\], sparse"):
        thinwire.attach(DistributedDataParallel(Tables(sparse=context.rank == 0)), "zen")


def _auto(context: RankContext) -> None:
    """A table of which all rows are non-zero goes with its bucket, and is looked at again; one of few rows does not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.full, self.rare = nn.Embedding(600, 16), nn.Embedding(200_000, 16)
            self.last = nn.Linear(16, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.last(self.full(torch.arange(600)).sum(0) + self.rare(ids * 200))

    for how in ("DDP", "plain"):
        torch.manual_seed(0)
        model = Model()
        with route("collective"):
            sync = thinwire.attach(DistributedDataParallel(model) if how == "DDP" else model)
        waits, ways = [], []
        for step in range(9):
            model.zero_grad()
            ids = batch(context.rank, step + 2)
            sync._model(ids).square().sum().backward()
            waits.append(sync.stats()["comm/host_waits"])
            ways.append({row["name"]: row["scheme"] for row in sync.table()})
            local = torch.autograd.grad(model(ids).square().sum(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), local, strict=True):
                dist.all_reduce(gradient)
                torch.testing.assert_close(parameter.grad, gradient / context.world_size, atol=1e-5, rtol=1e-5)
        told: list[Any] = [None] * context.world_size
        dist.all_gather_object(told, ways)
        assert all(theirs == ways for theirs in told), "all ranks go the same way in each step"
        assert all(way["rare.weight"] != "native" for way in ways), ways
        assert sum(way["full.weight"] == "native" for way in ways) >= 6, ways
        assert ways[0]["full.weight"] == "zen", "the first step looks"
        rows = {row["name"]: row for row in sync.table()}
        assert str(rows["full.weight"]["reason"]).startswith("native (")
        stats = sync.stats()
        assert stats["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in rows.values())
        assert stats["comm/host_waits"] <= 2 * 9 + 6
        sync.detach()


def _join(context: RankContext) -> None:
    """Ranks that have run out of data take part in the sums of the others."""
    torch.manual_seed(0)
    model = Tables(sparse=False)
    trained = DistributedDataParallel(model)
    with route("collective"):
        sync = thinwire.attach(trained, "auto")
    steps = 2 + 2 * context.rank
    with trained.join():
        for step in range(steps):
            model.zero_grad()
            trained(batch(0, step)).square().sum().backward()
            joined = sum(step < 2 + 2 * rank for rank in range(context.world_size))
            local = torch.autograd.grad(model(batch(0, step)).square().sum(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), local, strict=True):
                expected = gradient * joined / context.world_size
                torch.testing.assert_close(parameter.grad, expected, atol=1e-4, rtol=1e-4)
    sync.detach()


class TwoTables(nn.Module):
    """Of which each rank uses one in some steps, and none in others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(1000, 8), nn.Embedding(1000, 8, sparse=True)
        self.last = nn.Linear(8, 2)

    def forward(self, ids: Tensor, which: int) -> Tensor:
        hidden = torch.ones(1, 8)
        for number, table in enumerate((self.one, self.two)):
            hidden = hidden + (table(ids).sum(0) if which & 1 << number else 0)
        return self.last(hidden)


def _unused(context: RankContext) -> None:
    found = []
    for way in ("staged", "collective"):
        torch.manual_seed(0)
        model = TwoTables()
        with route(way):
            sync = thinwire.attach(model, "zen")
        steps = []
        for step in range(5):
            model.zero_grad()
            which = (step + context.rank) % 4 if step < 4 else 0
            model(batch(context.rank, step + 2), which).square().sum().backward()
            steps.append(gradients(model))
        sync.detach()
        found.append(steps)
    check_same(found[1], found[0])
    assert "one.weight" not in found[1][4], "a table that no rank used keeps no gradient"


LAWS = (
    _with_compression, _order, _scaler, _other_route, _auto, _join, _unused, _fails, _leaves_in_the_middle,
)  # fmt: skip


def _all_laws(context: RankContext) -> None:
    for law in LAWS:
        law(context)


@pytest.mark.slow
def test_laws_on_two_ranks() -> None:
    """One after the other, because to start ranks takes longer than most of them; the traceback names the law."""
    run_ranks(_all_laws, world_size=2, timeout_seconds=110)
