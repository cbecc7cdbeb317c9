"""attach(dense=): the bits of a sum in rank order on all ranks, whatever the model; decisions of "auto"; failures."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import kernels
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine
from thinwire.compress import Parameter
from thinwire.errors import MissingPackageError, ThinwireError
from thinwire.gradients.lossless import ROW, LosslessSync
from thinwire.gradients.steps import dense
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.plan import Group
from thinwire.plan.plan import fingerprint
from thinwire.rows import floats
from thinwire.tune import playing
from thinwire.tune.trial import Trial

pytestmark = pytest.mark.ranks

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Network(nn.Module):
    """Layers of several dtypes, one that only some batches reach, and one of complex numbers."""

    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float32,), table: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 40) if table else None
        self.first = nn.Linear(40, 70)
        self.middle = nn.ModuleList([nn.Linear(70, 70, dtype=dtype) for dtype in dtypes])
        self.side = nn.Linear(70, 70)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: Tensor, reaches_side: bool = True) -> Tensor:
        hidden = self.first(batch if self.table is None else self.table(batch)).tanh()
        for layer in self.middle:
            values = hidden.to(layer.weight.dtype)
            out = layer(values)
            hidden = (out.real + out.imag if out.is_complex() else out).float().tanh()
        if reaches_side:
            hidden = hidden + self.side(hidden)
        return (hidden * self.scalar).square().mean()


def batch_of(model: Network, rank: int, step: int) -> Tensor:
    """A batch of a size that changes from step to step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if model.table is None:
        return torch.randn(3 + 5 * step, 40, generator=generator)
    return torch.randint(0, 500, (3 + 5 * step,), generator=generator)


def rank_order_mean(mine: Tensor) -> Tensor:
    """The mean that an uncoded sum in rank order gives, from the gradients of all ranks."""
    real = (torch.view_as_real(mine) if mine.is_complex() else mine).contiguous()
    found = [torch.empty_like(real) for _ in range(dist.get_world_size())]
    dist.all_gather(found, real)
    wide = torch.float32 if real.element_size() == 2 else real.dtype
    total = found[0].to(wide)
    for other in found[1:]:
        total = total + other.to(wide)
    mean = (total * (1.0 / len(found))).to(real.dtype)
    return torch.view_as_complex(mean) if mine.is_complex() else mean


def same_bits(one: Tensor, other: Tensor) -> bool:
    pair = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (one, other)]
    first, second = (tensor.contiguous().view(BITS[tensor.element_size()]) for tensor in pair)
    return torch.equal(first, second)


def expected_gradients(model: Network, batches: Sequence[Tensor], reaches: bool, autocast: bool) -> dict[str, Tensor]:
    """The means of the gradients of all ranks, computed without any wrapper; None for those that nobody has."""
    alone = copy.deepcopy(model)
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            alone(batch, reaches).backward()
    used = torch.tensor([float(p.grad is not None) for p in alone.parameters()])
    dist.all_reduce(used)
    found = {}
    for (name, parameter), count in zip(alone.named_parameters(), used, strict=True):
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        mean = rank_order_mean(gradient.detach())
        if count:
            found[name] = mean
    return found


def check_steps(
    context: RankContext,
    wrap: Callable[[Network], nn.Module],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    table: bool = False,
    autocast: bool = True,
    uneven: bool = False,
    accumulate: int = 1,
    exact: Callable[[str], bool] = lambda name: not name.startswith("table"),
    native: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> thinwire.Synchronizer:
    """Train some steps, and compare each dense gradient with the mean in rank order, bit by bit; native ones nearly."""
    torch.manual_seed(0)
    model = Network(dtypes, table)
    wrapped = wrap(model)
    sync = thinwire.attach(wrapped, **{"dense": "lossless", **options})
    optimizer, differ = torch.optim.SGD(model.parameters(), lr=0.1), False
    for step in range(4):
        reaches = not (uneven and (step + context.rank) % 2)
        batches = [batch_of(model, context.rank, accumulate * step + part) for part in range(accumulate)]
        expected = expected_gradients(model, batches, reaches, autocast)
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if number + 1 < accumulate:
                    with sync.no_sync():
                        wrapped(batch, reaches).backward()
                else:
                    wrapped(batch, reaches).backward()
        for name, parameter in model.named_parameters():
            if exact(name) and (name in expected or parameter.grad is not None):
                mean = expected.get(name, torch.zeros_like(parameter))
                assert same_bits(parameter.grad, mean), f"step {step}, {name}"
            elif native(name):
                torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-5)
                differ |= not same_bits(parameter.grad, expected[name])
        optimizer.step()
    rows = {str(row["name"]): row for row in sync.table()}
    stats = sync.stats()
    assert stats["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in rows.values())
    assert rows[ROW]["scheme"] == "lossless"
    is_mixed = any(native(name) for name, _ in model.named_parameters())
    assert ("all other parameters" in rows) == is_mixed
    assert differ == (is_mixed and context.world_size > 2), "torch adds in another order"
    assert stats["lossless/values"] > 0
    return sync


def _models(context: RankContext) -> None:
    ddp, mixed = DistributedDataParallel, (torch.bfloat16, torch.float64, torch.float16, torch.complex64)

    def small(model: Network) -> nn.Module:
        return ddp(model, bucket_cap_mb=0.02)

    for wrap in (ddp, small, lambda model: model):
        check_steps(context, wrap).detach()
        check_steps(context, wrap, table=True).detach()
        check_steps(context, wrap, dtypes=mixed, autocast=False).detach()
        check_steps(context, wrap, accumulate=3).detach()
    check_steps(context, lambda model: ddp(model, static_graph=True)).detach()
    check_steps(context, lambda model: ddp(model, gradient_as_bucket_view=True)).detach()
    check_steps(context, lambda model: ddp(model, find_unused_parameters=True), uneven=True).detach()
    check_steps(context, lambda model: model, uneven=True).detach()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_bits_of_a_sum_in_rank_order(world_size: int) -> None:
    run_ranks(_models, world_size=world_size, timeout_seconds=110)


def _with_others(context: RankContext) -> None:
    """Compression, plans and policies beside it, and models with tables whose gradients are sparse."""
    ddp, top, leave_small = DistributedDataParallel, thinwire.compress.top_k(0.1), thinwire.compress.leave_small
    dense_only = {"exact": lambda name: name.split(".")[0] in ("scalar",) or name.endswith("bias")}
    for wrap in (ddp, lambda model: model):
        sync = check_steps(context, wrap, dense=leave_small(top, rest="lossless"), **dense_only)
        assert "compressed" in {row["kind"] for row in sync.table()}
        sync.detach()
    check_steps(context, lambda model: model, dense=thinwire.fuse.cupcake("lossless")).detach()


def test_what_is_not_compressed_is_lossless() -> None:
    run_ranks(_with_others, world_size=2, timeout_seconds=110)


def _mixed(context: RankContext) -> None:
    """Each parameter has its own exact sum: by pattern, by a rule, around a policy, and by the groups of a plan."""
    ddp = DistributedDataParallel
    names = [name for name, _ in Network().named_parameters()][::-1]
    parameters = [Parameter(name, tuple(one.shape)) for name, one in Network().named_parameters()]
    coded = {name for name in names if name.startswith(("middle", "scalar"))}
    groups = [Group((name,), 4, dense="lossless" if name in coded else "native") for name in names]
    plan = thinwire.Plan(context.world_size, fingerprint(parameters), tuple(groups), 0.0, 0.0)
    patterns = {"middle.*": "lossless", "scalar": "lossless"}
    for wrap, how in (
        (ddp, patterns),
        (
            lambda model: ddp(model, bucket_cap_mb=0.02),
            lambda parameter: "lossless" if parameter.name in coded else "native",
        ),
        (lambda model: model, {**patterns, "*": "auto"}),
        (lambda model: model, thinwire.fuse.one_bucket(patterns)),
        (lambda model: model, plan),
    ):
        exact, native = coded.__contains__, (set(names) - coded).__contains__
        check_steps(context, wrap, exact=exact, native=native, dense=how).detach()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_each_parameter_has_its_own_exact_sum(world_size: int) -> None:
    run_ranks(_mixed, world_size=world_size, timeout_seconds=110)


def _odd_values(context: RankContext) -> None:
    """Gradients that are no numbers arrive as such, and a scaler skips their step on all ranks."""
    torch.manual_seed(0)
    model = Network()
    sync = thinwire.attach(DistributedDataParallel(model), dense="lossless")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())
    for step, bad in enumerate([torch.inf, torch.nan, 1.0]):
        optimizer.zero_grad()
        batch = torch.full((4, 40), bad if context.rank == 1 else 1.0)
        scaler.scale(sync._model(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        is_same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert is_same == (step < 2)
    sync.detach()


def _empty_joined_and_back(context: RankContext) -> None:
    """Ranks that ran out of data, models that are detached and attached again, and arguments that differ."""
    ddp = DistributedDataParallel(Network())
    sync = thinwire.attach(ddp, dense="lossless")
    with ddp.join():
        for step in range(2 + context.rank):
            ddp(batch_of(ddp.module, context.rank, step)).backward()
    sync.detach()
    check_steps(context, lambda model: DistributedDataParallel(model)).detach()
    with pytest.raises(thinwire.MismatchError, match="dense="):
        thinwire.attach(ddp, dense="lossless" if context.rank else "native")
    stock, native = DistributedDataParallel(copy.deepcopy(ddp.module)), thinwire.attach(ddp, dense="native")
    for one in (ddp, stock):
        one.zero_grad()
        one(batch_of(ddp.module, context.rank, 1)).backward()
    assert all(map(same_bits, *([p.grad for p in one.parameters()] for one in (ddp, stock))))
    assert "lossless/values" not in native.stats()
    native.detach()


def test_odd_values_and_life_cycles() -> None:
    run_ranks(_odd_values, world_size=2, timeout_seconds=60)
    run_ranks(_empty_joined_and_back, world_size=2, timeout_seconds=60)


class _Ready:
    """All kernels are compiled; here perhaps they are not, and "auto" would wait for them."""

    is_compiling = bool
    called: ClassVar[set[str]] = set()

    @classmethod
    def unready_calls(cls) -> int:
        """As many as kernels of floats, because the first call of each loads it."""
        return len(cls.called)

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(playing, "dispatch", cls)
        patch.setattr(cls, "called", set())
        for name in ("encode_floats", "decode_floats", "estimate_floats"):
            kernel = getattr(kernels, name)

            def call(*args: Any, kernel: Any = kernel, name: str = name) -> Any:
                cls.called.add(name)
                return kernel(*args)

            patch.setattr(kernels, name, call)


@pytest.mark.parametrize(("hosts", "seconds"), [(["a", "b"], 4e-8), (["a", "a"], 1e-8)])
def test_a_byte_of_an_all_reduce_takes_as_long_as_one_of_a_message(hosts: list[str], seconds: float) -> None:
    machine = replace(SLOW, byte_seconds=4e-8, reduced_byte_seconds=1e-8)
    lane: Any = MagicMock(world_size=2, exchange=MagicMock(hosts=hosts), machine=lambda: machine)
    found = dense._measured(lane)
    assert found is not None
    assert found.reduced_byte_seconds == seconds


SLOW = Machine(1e-4, 1e-4, 1e-4, 1e-4, 1e-5, *[1e-8, 1e-10] * 3)
FAST = Machine(1e-4, 1e-4, 1e-12, 1e-12, 1e-5, *[1e-8, 1e-10] * 3)


def _takes(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """A lossless step takes so many seconds, and a native one 1, for all of which it waits for the network."""
    note = Trial.note
    patch.setattr(Trial, "note", lambda trial, *_: note(trial, seconds if trial.arm == dense.LOSSLESS else 1.0, 1.0))


def _decides(
    context: RankContext, wrap: Callable[[Network], nn.Module], machine: Machine, seconds: float, hosts: bool
) -> list[tuple[bool, str]]:
    """Train with "auto", and return after each step whether gradients go the lossless way, and why."""
    os.environ["THINWIRE_HOST"] = str(context.rank if hosts else 0)
    seen: list[tuple[bool, str]] = []
    logger, handler, said = logging.getLogger("thinwire"), logging.Handler(), list[str]()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "machine", lambda lane: machine)
        patch.setattr(dense, "KEPT_STEPS", 4)
        _takes(patch, seconds)
        _Ready.install(patch)
        torch.manual_seed(0)
        model = Network(table=context.world_size == 3)
        wrapped = wrap(model)
        sync = thinwire.attach(wrapped)
        for step in range(24):
            model.zero_grad()
            lossless = sync._lossless or LosslessSync({}, reason="on one host")
            batch, way = batch_of(model, context.rank, step % 3), lossless.dtypes
            expected = expected_gradients(model, [batch], True, True)
            with torch.autocast("cpu", torch.bfloat16):
                wrapped(batch).backward()
            exact = [same_bits(p.grad, expected[name]) for name, p in model.named_parameters() if "table" not in name]
            assert all(exact) or not way
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)
            seen.append((bool(lossless.dtypes), lossless.reason))
        assert sync.stats()["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in sync.table())
        if isinstance(wrapped, DistributedDataParallel) and model.table is None:
            assert bool(wrapped._comm_hooks) == bool(lossless.dtypes), "what native sums win has no hook"
        sync.detach()
    pinned = [line.partition('; dense="')[0] for line in said if "pins that" in line]
    decided = dict.fromkeys(reason for _, reason in seen if "are summed" in reason)
    assert pinned == [*decided] * (context.rank == 0 and hosts), "each decision is logged once, with what pins it"
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DistributedDataParallel, nn.Module.train], ids=["ddp", "plain"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_auto_tries_what_promises_a_gain_and_keeps_what_pays(wrap: Callable[..., nn.Module], world_size: int) -> None:
    """A machine on which bytes cost everything, and steps that are faster or slower by a factor of 3.5."""
    for seconds, is_kept in ((0.28, True), (3.5, False)):
        outcomes = run_ranks(_decides, wrap, SLOW, seconds, True, world_size=world_size, timeout_seconds=60)
        first, *others = [outcome.value for outcome in outcomes]
        assert all(other == first for other in others), "all ranks decide the same, in the same steps"
        ways = [is_lossless for is_lossless, _ in first]
        assert not any(ways[:3]), "natively, until steps have waited for long enough"
        assert any(ways), first
        assert ways[-1] == is_kept
        assert not is_kept or any("dense gradients are summed losslessly" in reason for _, reason in first)
        assert any(reason.startswith("some steps are summed losslessly") for _, reason in first), "before the first one"


@pytest.mark.slow
def test_auto_declines_where_bytes_cost_nothing() -> None:
    for machine, hosts, can_code, reason in (
        (FAST, True, True, "no code could pay"),
        (SLOW, False, True, "on one host"),
        (SLOW, True, False, "natively: rank 1 cannot run compiled kernels: pip install '.[cpu]' in a checkout"),
    ):
        for outcome in run_ranks(_decides_to_decline, machine, hosts, can_code, world_size=2, timeout_seconds=60):
            assert not any(is_lossless for is_lossless, _ in outcome.value)
            assert reason in outcome.value[-1][1]


def _decides_to_decline(context: RankContext, machine: Machine, hosts: bool, can_code: bool) -> list[tuple[bool, str]]:
    with nullcontext() if can_code or context.rank == 0 else kernels.using("reference"):
        return _decides(context, DistributedDataParallel, machine, 0.28, hosts)


BETWEEN = Machine(1e-9, 1e-9, 8e-10, 8e-10, 1e-9, *[1e-8, 1e-10] * 3)


def _decides_on(context: RankContext, cores: Sequence[int]) -> list[tuple[bool, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: cores[context.rank])
        return _decides(context, DistributedDataParallel, BETWEEN, 0.28, True)


def test_hosts_of_different_numbers_of_cores_decide_alike() -> None:
    """By this link a code pays with 64 cores, and not with one: the host that has the fewest decides."""
    for outcome in run_ranks(_decides_on, (64, 1), world_size=2, timeout_seconds=60):
        assert outcome.value[-1] == (False, "dense gradients are summed natively: no code could pay on this link")


def _is_refused(context: RankContext, dense: str) -> str:
    how = dense if dense == "lossless" else thinwire.compress.top_k(0.1, values=thinwire.compress.lossless())
    with kernels.using("reference") if context.rank else nullcontext(), pytest.raises(ThinwireError) as caught:
        thinwire.attach(nn.Linear(40, 40), dense=how)
    assert isinstance(caught.value, MissingPackageError) == (context.rank == 1)
    return str(caught.value)


@pytest.mark.parametrize("dense", ["lossless", "top_k"])
def test_all_ranks_raise_where_one_can_make_no_codes(dense: str) -> None:
    """As without numba: it says what to install, and the others say the same of it."""
    for outcome in run_ranks(_is_refused, dense, world_size=2, timeout_seconds=60):
        assert "pip install '.[cpu]' in a checkout" in outcome.value
        assert "lossless" in outcome.value


def _goes_on(context: RankContext) -> None:
    """A decision that is saved and restored: the bits of a run that goes on are those of one that never stopped."""
    os.environ["THINWIRE_HOST"] = str(context.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "machine", lambda lane: SLOW)
        _takes(patch, 0.28)
        _Ready.install(patch)
        torch.manual_seed(0)
        model = Network()
        ddp = DistributedDataParallel(model)
        sync, saved = thinwire.attach(ddp), {}
        for step in range(20):
            if step == 18:
                assert sync._lossless.dtypes, sync._lossless.reason
                saved = copy.deepcopy(sync.state_dict())
            model.zero_grad()
            ddp(batch_of(model, context.rank, step)).backward()
        sync.detach()
        again = DistributedDataParallel(copy.deepcopy(model))
        restored = thinwire.attach(again)
        restored.load_state_dict(saved)
        assert restored.state_dict()["dense"] == saved["dense"]
        again.zero_grad()
        again(batch_of(model, context.rank, 19)).backward()
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert same_bits(one.grad, other.grad)
        assert restored.stats()["lossless/values"] > 0
        restored.detach()
        with kernels.using("reference") if context.rank else nullcontext():
            third = DistributedDataParallel(copy.deepcopy(model))
            unable = thinwire.attach(third)
            unable.load_state_dict(saved)
            third(batch_of(model, context.rank, 19)).backward()
            assert unable._lossless.reason.startswith("dense gradients are summed natively: rank 1 cannot run compiled")
            assert not unable._lossless.dtypes
            unable.detach()


def test_a_decision_is_part_of_the_state() -> None:
    run_ranks(_goes_on, world_size=2, timeout_seconds=60)


def _seen_and_counted(context: RankContext) -> None:
    """Phases in a trace, the network's times, and bytes that were predicted."""
    model = nn.Sequential(nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 300))
    sync = thinwire.attach(DistributedDataParallel(model), dense="lossless")
    busy: list[float] = []
    sync.watch_lane(lambda started, ended: busy.append(ended - started))
    with sync.trace() as trace:
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = sync._model(torch.randn(20 + step, 300)).square().mean()
            loss.backward()
    names = {event.name.split()[0] for event in trace.events}
    assert {"encode", "wire", "decode", "communicate"} <= names
    assert busy
    (row,) = sync.table()
    assert row["predicted_bytes"] == pytest.approx(row["bytes"], rel=0.02)
    assert row["bytes"] < 0.6 * row["dense_bytes"]
    stats, (push, pull) = sync.stats(), map(float, str(row["formats"]).split(" bits")[0].split(" + "))
    assert stats["lossless/bits_per_value"] == pytest.approx(push + pull, abs=0.11)
    assert stats["lossless/values"] == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert stats["lossless/encode_seconds"] + stats["lossless/decode_seconds"] > 0.0
    sync.detach()


def test_traces_and_predictions() -> None:
    run_ranks(_seen_and_counted, world_size=3, timeout_seconds=60)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, failing: list[bool]) -> Tensor:  # type: ignore[override]
        ctx.failing = failing
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.failing[0]:
            raise ValueError("in backward")
        return gradient, None


class _Failing(nn.Module):
    def __init__(self, failing: list[bool]) -> None:
        super().__init__()
        self.failing = failing

    def forward(self, values: Tensor) -> Tensor:
        return _Fails.apply(values, self.failing)


def _fails(context: RankContext, how: str, kind: str) -> tuple[float, str]:
    """A step that rank 1 spoils, after one that works."""
    timeout = timedelta(seconds=30)
    torch.manual_seed(0)
    failing = [False]
    model = nn.Sequential(nn.Linear(200, 300), _Failing(failing), nn.Linear(300, 200))
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    sync = thinwire.attach(wrapped, dense="lossless", timeout=timeout)
    encode, started, error = floats.encode, 0.0, ""
    for step in range(2):
        if step and context.rank == 1:
            failing[0] = how == "backward"

            def spoiled(values: Tensor) -> Tensor:
                if how == "dies":
                    os._exit(7)
                if how == "encode":
                    raise ValueError("in encode")
                return encode(values)[:-1]

            floats.encode = encode if how == "backward" else spoiled
        started = time.monotonic()
        try:
            wrapped(torch.randn(8, 200)).sum().backward()
        except (RuntimeError, ValueError) as caught:
            assert step
            error = f"{type(caught).__name__}: {caught}"
    with pytest.raises(RuntimeError):  # of DDP itself, or that the lane stopped
        wrapped(torch.randn(8, 200))
    sync.detach()
    return time.monotonic() - started, error


@pytest.mark.few(2)
@pytest.mark.parametrize(("how", "kind"), [("backward", "ddp"), ("dies", "ddp"), ("encode", "plain"), ("code", "ddp")])
def test_a_failure_of_one_rank_reaches_all_at_once(how: str, kind: str) -> None:
    for outcome in run_ranks(_fails, how, kind, world_size=3, timeout_seconds=60, check=False):
        if how == "dies" and outcome.rank == 1:
            continue
        assert not outcome.error, outcome.error
        seconds, error = outcome.value
        assert seconds < 15.0
        own = {"backward": "in backward", "encode": "in encode"}.get(how, "")
        assert own in error if outcome.rank == 1 else "rank" in error, error
        assert error.split(":")[0] in (
            "ValueError",
            "CorruptHeaderError",
            "CorruptMessageError",
            "LostPeerError",
            "RuntimeError",
        )
