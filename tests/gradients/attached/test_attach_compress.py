"""`attach` with compression on real ranks: DDP in its modes and plain modules take the same steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.compress.base import Identity, Parameter
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4


class Network(nn.Module):
    """Several matrices, a table with sparse gradients, one with dense ones, and a layer that a step may leave out."""

    def __init__(self, tables: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 16, sparse=True) if tables else None
        self.tags = nn.Embedding(600, 16) if tables else None
        self.first = nn.Linear(16, 48)
        self.middle = nn.Linear(48, 48)
        self.optional = nn.Linear(48, 48)
        self.last = nn.Linear(48, 30)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, batch: Tensor, with_optional: bool = True) -> Tensor:
        hidden = batch
        if self.words is not None and self.tags is not None:
            ids = (batch[:, 0].abs() * 1000).long() % 500
            hidden = self.words(ids) + self.tags(ids + 3)
        hidden = torch.tanh(self.middle(torch.tanh(self.first(hidden))))
        if with_optional:
            hidden = hidden + torch.tanh(self.optional(hidden))
        return self.last(hidden) * self.scale


def everywhere(parameter: Parameter) -> thinwire.compress.Compressor:
    """Biases too, so that nothing depends on how a bucket is summed."""
    return thinwire.compress.top_k(0.1)


def batches(rank: int, steps: int) -> Iterator[Tensor]:
    data = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(12, 16, generator=data) for _ in range(steps))


def train(
    context: RankContext,
    model: nn.Module,
    sync: thinwire.Synchronizer,
    steps: range = range(STEPS),
    accumulate: bool = False,
    optional: Callable[[int, int], bool] = lambda rank, step: True,
) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches(context.rank, steps.stop)):
        if step not in steps:
            continue
        optimizer.zero_grad()
        for micro in range(1 + accumulate):
            with sync.no_sync() if micro < accumulate else contextlib.nullcontext():
                model(batch * (1 + micro), optional(context.rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def attached(
    ddp_options: dict[str, Any] | None = None, tables: bool = False, **options: Any
) -> tuple[nn.Module, thinwire.Synchronizer]:
    torch.manual_seed(0)
    model: nn.Module = Network(tables)
    if ddp_options is not None:
        model = DistributedDataParallel(model, **ddp_options)
    return model, thinwire.attach(model, **options)


def assert_same_everywhere(context: RankContext, parameters: list[Tensor]) -> None:
    flat = torch.cat([parameter.flatten() for parameter in parameters])
    gathered = [torch.empty_like(flat) for _ in range(context.world_size)]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(other, flat) for other in gathered)


# --- the state follows its parameter, wherever DDP puts it

MODES: dict[str, dict[str, Any]] = {
    "buckets rebuilt": {"bucket_cap_mb": 0.004},
    "one bucket": {},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.004},
    "find unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.004},
    "bucket view": {"gradient_as_bucket_view": True},
}


def _modes(context: RankContext) -> None:
    """Each rank chooses and remembers by parameter, so all ways to group parameters take bitwise the same steps."""
    for exchange in ("auto", "two_shot"):
        model, sync = attached(dense=lambda parameter, how=exchange: everywhere(parameter).by(how))
        expected = train(context, model, sync)
        memories = sync.state_dict()["compress"]["states"]
        assert sync.stats()["compress/parameters"] == len(expected)
        assert_same_everywhere(context, expected)
        sync.detach()
        for mode in MODES if exchange == "auto" else ("buckets rebuilt",):
            model, sync = attached(MODES[mode], dense=lambda parameter, how=exchange: everywhere(parameter).by(how))
            found = train(context, model, sync)
            assert all(map(torch.equal, found, expected)), f"{mode}, {exchange}"
            states = sync.state_dict()["compress"]["states"]
            assert set(states) == set(memories)
            if exchange == "auto":
                assert all(torch.equal(states[name]["error"], memories[name]["error"]) for name in states), mode
            sync.detach()


@pytest.mark.slow
def test_every_mode_of_ddp_and_a_plain_module_take_the_same_steps() -> None:
    run_ranks(_modes, world_size=3, timeout_seconds=120)


def _accumulated(context: RankContext) -> None:
    """With a layer that some ranks leave out of some steps, and gradients that add up over two backward passes."""

    def optional(rank: int, step: int) -> bool:
        return (rank + step) % 3 != 0

    plain, plain_sync = attached(dense=everywhere)
    expected = train(context, plain, plain_sync, accumulate=True, optional=optional)
    ddp, ddp_sync = attached({"find_unused_parameters": True}, dense=everywhere)
    found = train(context, ddp, ddp_sync, accumulate=True, optional=optional)
    assert all(map(torch.equal, found, expected))
    assert_same_everywhere(context, found)
    assert plain_sync.stats()["comm/steps"] == ddp_sync.stats()["comm/steps"] == STEPS
    _break_off(plain)
    with pytest.raises(thinwire.ThinwireError, match="stopped after an earlier failure"):
        train(context, plain, plain_sync)
    plain_sync.detach()
    plain_sync = thinwire.attach(plain, dense=everywhere)
    assert_same_everywhere(context, train(context, plain, plain_sync))
    for sync in (plain_sync, ddp_sync):
        sync.detach()


def _break_off(model: nn.Module) -> None:
    """A backward that fails on all ranks in the middle, after some groups were sent."""

    def strike(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = model.first.weight.register_hook(strike)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(torch.ones(2, 16)).sum().backward()
    handle.remove()


def test_accumulation_and_unused_parameters() -> None:
    run_ranks(_accumulated, world_size=3, timeout_seconds=120)


# --- a plain module, exactly


def _plain_exact(context: RankContext) -> None:
    torch.manual_seed(0)
    stock = DistributedDataParallel(Network(tables=True))
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    for batch in batches(context.rank, STEPS):
        optimizer.zero_grad()
        stock(batch).square().mean().backward()
        optimizer.step()
    for dense in ("native", Identity()):
        torch.manual_seed(context.rank)  # rank 0 has the parameters that all get
        model = Network(tables=True)
        torch.nn.init.constant_(model.scale, 1.0 + context.rank)
        if context.rank == 0:
            torch.manual_seed(0)
            model = Network(tables=True)
        sync = thinwire.attach(model, dense=dense)
        found = train(context, model, sync)
        for mine, theirs in zip(found, stock.module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), atol=1e-6, rtol=1e-5)
        assert model.scale.item() == 1.0
        assert_same_everywhere(context, found)
        kinds = {row["name"]: row["kind"] for row in sync.table()}
        assert kinds["words.weight"] == "sparse gradient"
        assert kinds["tags.weight"] == "dense gradient, rows known"
        assert ("middle.weight" in kinds) == (dense != "native")
        sync.detach()
        sync.detach()
        model.zero_grad()
        model(torch.full((2, 16), 0.01 * context.rank)).sum().backward()
        assert model.first.weight.grad is not None
        gathered = [torch.empty(48, 16) for _ in range(context.world_size)]
        dist.all_gather(gathered, model.first.weight.grad)
        assert not torch.equal(gathered[0], gathered[1]), "after detach gradients stay where they are"


@pytest.mark.slow
def test_a_plain_module_trains_as_stock_ddp() -> None:
    run_ranks(_plain_exact, world_size=3, timeout_seconds=120)


# --- resume


def _resume(context: RankContext, folder: str) -> None:
    options: dict[str, Any] = {"dense": thinwire.compress.top_k(0.05).by("two_shot")}
    model, sync = attached({}, **options)
    expected = train(context, model, sync, range(6))
    sync.detach()
    model, sync = attached({}, **options)
    train(context, model, sync, range(3))
    torch.save({"model": model.state_dict(), "sync": sync.state_dict()}, f"{folder}/{context.rank}.pt")
    sync.detach()
    model, sync = attached({}, **options)
    saved = torch.load(f"{folder}/{context.rank}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    sync.load_state_dict(saved["sync"])
    found = train(context, model, sync, range(3, 6))
    assert all(map(torch.equal, found, expected))
    assert sync.stats()["comm/steps"] == 6
    sync.detach()
    model, sync = attached({}, dense=thinwire.compress.top_k(0.05))
    with pytest.raises(ValueError, match=r"by all_gather here, and was .* by two_shot"):
        sync.load_state_dict(saved["sync"])
    sync.detach()
    model, sync = attached({})
    with pytest.raises(ValueError, match="saved with compression, and attach was called without"):
        sync.load_state_dict(saved["sync"])
    sync.detach()


def _other_world_size(context: RankContext, folder: str) -> None:
    model, sync = attached({}, dense=thinwire.compress.top_k(0.05).by("two_shot"))
    saved = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(3)]
    with pytest.raises(ValueError, match=r"saved by 3 ranks, and there are 2 now: .* thinwire\.compress\.redistribute"):
        sync.load_state_dict(saved[0]["sync"])
    dealt = thinwire.compress.redistribute([state["sync"] for state in saved], context.world_size)
    sync.load_state_dict(dealt[context.rank])
    assert_same_everywhere(context, train(context, model, sync, range(3, 5)))
    sync.detach()


@pytest.mark.slow
def test_a_checkpoint_resumes_bitwise_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(_resume, str(tmp_path), world_size=3, timeout_seconds=120)
    run_ranks(_other_world_size, str(tmp_path), world_size=2, timeout_seconds=120)


# --- several passes for one step


def _synced_twice(context: RankContext) -> None:
    for ddp_options in ({}, None):
        model, sync = attached(ddp_options, dense=thinwire.compress.sign_sgd())
        train(context, model, sync, accumulate=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches(context.rank, 2):
            model(batch).square().mean().backward()
        with pytest.warns(UserWarning, match=r"several synchronized backward passes.* no_sync\(\)"):
            optimizer.step()
        sync.detach()


def test_several_passes_for_one_step_are_warned_of_unless_they_are_sent_at_once() -> None:
    run_ranks(_synced_twice, world_size=2, timeout_seconds=120)


# --- the end of compression


def _frozen_meanwhile(context: RankContext) -> None:
    for ddp_options in ({"find_unused_parameters": True}, None):
        model, sync = attached(ddp_options, dense=everywhere)
        train(context, model, sync)
        assert sync._compressed is not None
        memories, (weight, *_) = sync._compressed.memories, model.parameters()
        name = next(iter(sync._compressed.plans))
        memory = memories.outstanding(name)
        assert memory is not None
        assert bool(memory.any())
        kept = memory.clone()
        assert memories.drop()
        train(context, model, sync, range(1))
        weight.requires_grad_(False)
        train(context, model, sync, range(25))
        memories.load_state_dict(copy.deepcopy(memories.state_dict()))
        assert torch.equal(memories.states[name]["error"], kept), "nothing of it was used, so all of it is there"
        weight.requires_grad_(True)
        train(context, model, sync, range(18))
        assert torch.equal(memories.states[name]["error"], kept), "one part of twenty is left"
        train(context, model, sync, range(1))
        assert not memories.states[name]["error"].any()
        memories.load_state_dict({**memories.state_dict(), "flush_left": 0})  # as earlier states have it
        sync.detach()


def test_a_parameter_that_is_frozen_when_compression_ends_gets_its_memory_later() -> None:
    run_ranks(_frozen_meanwhile, world_size=2, timeout_seconds=120)


# --- mixed precision


def _scaled(context: RankContext) -> None:
    for ddp_options in ({}, None):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model, sync = attached(ddp_options, dense=thinwire.compress.top_k(0.1), grad_scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, batch in enumerate(batches(context.rank, 3)):
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch).float().square().mean()
            poison = float("inf") if (step, context.rank) == (1, 1) else 1.0
            scaler.scale(loss * poison).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, before, model.parameters())) == (step == 1)
        assert scaler.get_scale() == 512.0
        assert sync.stats()["compress/nonfinite_steps"] == 1.0
        errors = [state["error"] for state in sync.state_dict()["compress"]["states"].values()]
        assert all(bool(torch.isfinite(error).all()) and float(error.abs().max()) < 10.0 for error in errors)
        assert_same_everywhere(context, [parameter.detach() for parameter in model.parameters()])
        sync.detach()


def test_grad_scaler_skips_the_same_step_on_all_ranks() -> None:
    run_ranks(_scaled, world_size=2, timeout_seconds=120)


def _overflows_in_a_table(context: RankContext) -> None:
    scaler, factor = torch.amp.GradScaler("cpu", init_scale=1024.0), [1.0]
    model = nn.Sequential(nn.Embedding(5000, 16, sparse=True), nn.Linear(16, 128))

    def scale_gradients(module: nn.Module, ids: object, rows: Tensor) -> None:
        rows.register_hook(lambda gradient: gradient * factor[0])

    model[0].register_forward_hook(scale_gradients)
    ddp = DistributedDataParallel(model)
    sync = thinwire.attach(ddp, dense=thinwire.compress.top_k(0.1), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    for factor[0] in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.arange(50) + context.rank).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        errors.append(sync.state_dict()["compress"]["states"]["1.weight"]["error"].clone())
    assert scaler.get_scale() == 512.0
    assert torch.equal(errors[0], errors[1]), "what was sent for the skipped step comes again"
    assert not torch.equal(errors[1], errors[2])
    sync.detach()


def test_a_step_that_is_skipped_for_a_table_leaves_memories_as_they_were() -> None:
    run_ranks(_overflows_in_a_table, world_size=2, timeout_seconds=120)


# --- tables that a pattern takes from rows=


def _named_tables(context: RankContext, patterns: dict[str, Any], kind: str, has_ddp: bool) -> None:
    model, sync = attached({} if has_ddp else None, True, dense=patterns)
    stock, tags = Network(True), getattr(model, "module", model).tags.weight
    stock.load_state_dict(getattr(model, "module", model).state_dict())
    for step in range(2):
        batches = [
            torch.randn(24 + step, 16, generator=torch.Generator().manual_seed(rank))
            for rank in range(context.world_size)
        ]
        gradients = []
        for batch in batches:
            stock.zero_grad()
            stock(batch).square().sum().backward()
            gradients.append(stock.tags.weight.grad.clone())
        model.zero_grad()
        model(batches[context.rank]).square().sum().backward()
        exact = torch.stack(gradients).mean(0)
        torch.testing.assert_close(tags.grad, exact, rtol=2**-6, atol=float(exact.abs().max()) * 2**-7)
        assert torch.allclose(tags.grad, exact, rtol=1e-4, atol=1e-6) == (kind != "compressed"), "rounded, or exact"
        assert {row["name"]: row["kind"] for row in sync.table()}["tags.weight"].startswith(kind)
    assert_same_everywhere(context, [tags.grad])
    sync.detach()


@pytest.mark.few(1)
@pytest.mark.parametrize("has_ddp", [True, False])
def test_a_pattern_that_names_tables_alone_compresses_them(has_ddp: bool) -> None:
    bf16 = thinwire.compress.bf16()
    run_ranks(_named_tables, {"tags.*": bf16, "*": bf16}, "compressed", has_ddp, world_size=2, timeout_seconds=60)
    run_ranks(_named_tables, {"*": bf16}, "dense gradient", has_ddp, world_size=2, timeout_seconds=60)


# --- what is refused


def _refusals(context: RankContext) -> None:
    top_k = thinwire.compress.top_k(0.1)
    for reason, options in {
        "cannot be added element by element": {"dense": top_k.by("all_reduce")},
        "made by calling its constructor": {"dense": thinwire.compress.top_k},
        "no parameter that can be compressed .* has a name like 'words": {"dense": {"words.weight": top_k}},
        "no table that travels as rows can": {"dense": {"[wt]*s.weight": top_k}},
    }.items():
        with pytest.raises(ValueError, match=reason):
            attached({}, True, **options)
    model = Network()
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    large = [parameter for parameter in model.parameters() if parameter.numel() >= 1024]
    small = [parameter for parameter in model.parameters() if parameter.numel() < 1024]
    signum, dgc = thinwire.compress.sign_sgd(0.9), thinwire.compress.dgc(0.1)
    for compressor in (dgc, signum):
        copies = torch.optim.SGD([parameter.detach().clone() for parameter in large], lr=0.1, momentum=0.9)
        for optimizer in (momentum, torch.optim.Adam(model.parameters()), copies):
            with pytest.raises(ValueError, match="would count it twice"):
                thinwire.attach(model, dense=compressor, optimizer=optimizer)
        groups: list[dict[str, Any]] = [{"params": large, "momentum": 0.0}, {"params": small, "momentum": 0.9}]
        for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(groups, lr=0.1)):
            thinwire.attach(model, dense=compressor, optimizer=optimizer).detach()
    for compressor in (top_k, thinwire.compress.sign_sgd()):
        thinwire.attach(model, dense=compressor, optimizer=momentum).detach()
    with pytest.raises(thinwire.MismatchError, match=r"top_k\(0\.[12]\)"):
        attached({}, dense=thinwire.compress.top_k(0.1 + 0.1 * context.rank))
    for low_rank in (thinwire.compress.power_sgd, thinwire.compress.acp_sgd):
        with pytest.raises(thinwire.MismatchError, match="seed=1"):
            attached({}, dense=low_rank(2, seed=context.rank))
    other = Network()
    other.scale = torch.ones(1 + context.rank)
    with pytest.raises(thinwire.MismatchError, match="buffer 'scale'"):
        thinwire.attach(other)
    sync = thinwire.attach(model)
    with pytest.raises(ValueError, match="attached to this model already"):
        thinwire.attach(model)
    sync.detach()


def test_refusals() -> None:
    run_ranks(_refusals, world_size=2, timeout_seconds=120)


# --- torch.profiler


def _profiled(context: RankContext) -> None:
    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

    model, sync = attached({}, dense=thinwire.compress.top_k(0.1))
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        train(context, model, sync, range(2))
    names = {event.key for event in profiler.key_averages()}
    assert {"thinwire::compress", "thinwire::exchange", "thinwire::decompress"} <= names
    stats = sync.stats()
    parts = ("compress/encode_seconds", "compress/wire_seconds", "compress/decode_seconds")
    assert all(stats[part] > 0.0 for part in parts)
    assert sum(stats[part] for part in parts) <= stats["comm/seconds"]
    sync.detach()


def test_phases_are_seen_by_the_profiler() -> None:
    run_ranks(_profiled, world_size=2, timeout_seconds=120)
