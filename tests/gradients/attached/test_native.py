"""Dense gradients by the native all-reduce, as stock DDP sends them: no job of the lane, no headers, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.gradients import exact, synchronizer
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


def _train(context: RankContext, attached: bool) -> tuple[list[Tensor], thinwire.Synchronizer | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(900, 16), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    sync = thinwire.attach(ddp, "zen") if attached else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(context.rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randint(0, 900, (20,), generator=data)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], sync


def _as_stock(context: RankContext) -> None:
    assert not exact.is_native(torch.distributed.group.WORLD, torch.device("cpu"))
    synchronizer.is_native = lambda group, device: True
    stock, _ = _train(context, False)
    mine, sync = _train(context, True)
    for ours, theirs in zip(mine, stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert sync is not None
    rows = {str(row["name"]): row for row in sync.table()}
    assert rows["all other parameters"]["scheme"] == "NCCL"
    assert rows["0.weight"]["kind"] == "dense gradient, rows scanned"
    assert sync.stats()["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in rows.values())
    sync.detach()


def test_dense_gradients_by_the_group_of_the_model() -> None:
    """As over NCCL: here it is Gloo's."""
    run_ranks(_as_stock, world_size=3, timeout_seconds=60)


def _in_parts(context: RankContext, dtypes: tuple[torch.dtype, ...]) -> None:
    synchronizer.is_native = lambda group, device: True
    parts: list[tuple[int, int]] = []
    start = exact.NativeAllReduce.start

    def counted(native: exact.NativeAllReduce, gradients: Sequence[Tensor]) -> tuple[exact.Started, ...]:
        started = start(native, gradients)
        parts.append((len(gradients), len(started)))
        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact.NativeAllReduce, "start", counted)
        results = []
        for attached in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential()
            for dtype in dtypes:
                model.extend([nn.Embedding(500, 16, dtype=dtype), nn.Linear(16, 5, dtype=dtype)])
            ddp = DistributedDataParallel(model)
            sync = thinwire.attach(ddp, "zen") if attached else None
            data = torch.Generator().manual_seed(context.rank)
            for step in range(3):
                words = torch.randint(0, 500, (20 + 10 * step,), generator=data)
                loss = sum(model[place + 1](model[place](words)).double().square().mean() for place in range(0, 6, 2))
                ddp.zero_grad()
                with patch.context() as through:
                    through.setattr(ddp.module, "forward", lambda loss: loss)
                    ddp(loss).backward()
            results.append([parameter.grad for parameter in model.parameters()])
            if sync is not None:
                sync.detach()
    for mine, stock in zip(results[1], results[0], strict=True):
        assert torch.equal(mine, stock), "of two ranks the sum has one order"
    tables = len(dtypes)
    assert max(parts)[0] >= tables - len(set(dtypes)) + 1, "a table lies between two parts"
    assert all(started == min(1, given) for given, started in parts), "one all-reduce for each bucket"


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float64, torch.float32)], ids=str)
def test_the_parts_of_a_bucket_are_all_reduced_at_once(dtypes: tuple[torch.dtype, ...]) -> None:
    run_ranks(partial(_in_parts, dtypes=dtypes), world_size=2, timeout_seconds=60)


LOOKS = (0, 2, 5)
"""Steps in which the rows of a table are looked at, of which all are non-zero."""


def _full_table(context: RankContext, scheme: str, how: str) -> None:
    """Every step looks up all rows, so there is nothing to leave out."""
    synchronizer.is_native = lambda group, device: True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(600, 16), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3))
    trained = DistributedDataParallel(model) if how == "DDP" else model
    sync = thinwire.attach(trained, scheme)
    reduced: list[int] = []
    jobs: list[int] = []
    all_reduce = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda tensor, *args, **kw: reduced.append(tensor.numel()) or all_reduce(tensor, *args, **kw)  # fmt: skip # noqa: E501
    sync._lane.submit = lambda *job, submit=sync._lane.submit, **how: jobs.append(0) or submit(*job, **how)
    try:
        for step in range(9):
            reduced.clear(), jobs.clear(), model.zero_grad()
            trained(torch.arange(600).roll(context.rank)).square().mean().backward()
            if (scheme == "dense" or step not in LOOKS) and (how == "DDP" or step):
                assert not jobs, "the lane has nothing to do"
                assert len(reduced) == 1, "one fragment, the table with its neighbours"
        assert sync.stats()["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in sync.table())
        assert {row["scheme"] for row in sync.table()} <= {"NCCL", "native"}
    finally:
        torch.distributed.all_reduce = all_reduce
        sync.detach()


@pytest.mark.few(2)
@pytest.mark.parametrize(("scheme", "how"), [("auto", "DDP"), ("dense", "DDP"), ("auto", "plain"), ("dense", "plain")])
def test_a_dense_table_goes_with_its_bucket(scheme: str, how: str) -> None:
    """By the group of the model, from the hook, and not over the lane, where it would be copied to the host."""
    run_ranks(partial(_full_table, scheme=scheme, how=how), world_size=2, timeout_seconds=60)


def _large(context: RankContext, how: str) -> tuple[Tensor, dict[str, float], int]:
    """Three steps without a table: parameters, statistics, and how many jobs a backward submitted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 3))
    trained = model if how == "plain" else DistributedDataParallel(model, bucket_cap_mb=0.005)
    sync = None if how == "stock" else thinwire.attach(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(context.rank)
    jobs: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = trained(torch.randn(20, 30, generator=data)).square().mean()
        with pytest.MonkeyPatch.context() as patch:
            if sync is not None:
                patch.setattr(
                    sync._lane,
                    "submit",
                    lambda *job, submit=sync._lane.submit, **how: jobs.append(0) or submit(*job, **how),
                )
            loss.backward()
        optimizer.step()
    stats = {} if sync is None else sync.stats()
    if sync is not None:
        sync.detach()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), stats, len(jobs)


def _left_to_ddp(context: RankContext) -> None:
    stock, _, _ = _large(context, "stock")
    for how in ("DDP", "plain"):
        mine, stats, jobs = _large(context, how)
        torch.testing.assert_close(mine, stock, atol=1e-6, rtol=1e-5)
        assert how == "plain" or torch.equal(mine, stock), "the bits of stock DDP, which has the same buckets"
        assert how == "plain" or jobs == 0
        gradient = 4 * mine.numel()
        assert stats["comm/steps"] == 3
        assert stats["comm/bytes_dense"] == pytest.approx(3 * gradient * 2 * 2 / 3, abs=300)
        assert stats["comm/bytes_sent"] == pytest.approx(stats["comm/bytes_dense"], abs=1000)
        assert stats["comm/exposed_seconds"] > 0
        assert stats["comm/seconds"] > 0


def test_without_tables_nothing_but_all_reduces() -> None:
    run_ranks(_left_to_ddp, world_size=3, timeout_seconds=60)


class Branches(nn.Module):
    """Of which the first parameters are used in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.last = nn.Linear(40, 40), nn.Linear(40, 4)

    def forward(self, features: Tensor, step: int) -> Tensor:
        return self.last(self.rare(features) if step % 2 else features)


def _no_hook(context: RankContext, **ddp: bool) -> None:
    """Only rank 0 looks at what DDP does, from the third step on."""
    torch.manual_seed(0)
    model = Branches()
    trained = DistributedDataParallel(model, **ddp)
    sync = thinwire.attach(trained)
    assert not trained._comm_hooks
    busy: list[float] = []
    trace = None
    for step in range(6):
        if step == 2 and context.rank == 0:
            trace = sync.trace()
            sync.watch_lane(lambda started, ended: busy.append(ended - started))
        with sync.no_sync():
            trained(torch.ones(2, 40), 1).sum().backward()
        local = model.rare.weight.grad.clone()
        trained(torch.full((2, 40), float(context.rank)), step if ddp else 1).sum().backward()
        assert sync.stats()["comm/steps"] == step + 1
        model.zero_grad()
    assert sync.stats()["comm/bytes_dense"] == 6 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert local.any()
    if trace is not None:
        assert len(trace.steps) == 4
        assert sum(event.name.startswith("communicate") for event in trace.events) == len(busy) >= 4
        assert min(busy) > 0
    sync.detach()
    thinwire.attach(trained, dense=thinwire.compress.top_k(0.1)).detach()
    assert trained._comm_hooks


@pytest.mark.parametrize("ddp", [{}, {"find_unused_parameters": True}])
def test_ddp_has_no_hook_where_there_is_nothing_to_gain(ddp: dict[str, bool]) -> None:
    run_ranks(partial(_no_hook, **ddp), world_size=2, timeout_seconds=60)


@pytest.mark.parametrize(("backend", "device", "expected"), [
    ("cpu:gloo,cuda:nccl", "cuda", True), ("cpu:gloo,cuda:nccl", "cpu", False), ("cpu:gloo,cuda:gloo", "cuda", False),
])  # fmt: skip
def test_when_that_is_taken(monkeypatch: pytest.MonkeyPatch, backend: str, device: str, expected: bool) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backend)
    assert exact.is_native(None, torch.device(device)) == expected  # type: ignore[arg-type]
