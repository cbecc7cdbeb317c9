"""What a training script does with a model beside training it: copies, saves, drops, compiles, wraps, joins."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import thinwire
from clocks import PATIENCE
from thinwire import outer
from thinwire.comm.lane import Lane
from thinwire.errors import LostPeerError, ThinwireError, raising
from thinwire.gradients import synchronizer
from thinwire.gradients import torch_internals as internals
from thinwire.integrations.attachment import Attachment
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


class Model(nn.Module):
    """A table whose rows are watched, and a dense layer."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8, sparse=sparse)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids)))


class Dense(nn.Sequential):
    """Nothing in it is a table, so that DDP is left to do it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.float().unsqueeze(1) / 1000)


def made(kind: str, sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = Dense() if kind == "dense ddp" else Model(sparse)
    return module if kind == "plain" else DistributedDataParallel(module)


def ids_of(rank: int, step: int = 0) -> Tensor:
    return torch.randint(0, 1000, (16,), generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, rank: int, steps: int = 3) -> Tensor:
    optimizer = torch.optim.SGD([entry for entry in model.parameters() if entry.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(ids_of(rank, step)).square().mean().backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def is_same_on_all_ranks(tensor: Tensor) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return all(torch.equal(tensor, other) for other in every)


# --- copies and files


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "averaged": lambda model: AveragedModel(model).module,
    "torch.save": saved_and_loaded,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "a copy of a copy": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(model)))),
}


def _copies(context: RankContext, kind: str) -> None:
    model = made(kind)
    sync = thinwire.attach(model)
    train(model, context.rank)
    for _ in ("attached", "detached"):
        before = sync.table()
        for make in COPIES.values():
            twin = make(model)
            assert type(twin) is type(model)
            assert torch.equal(flat(twin), flat(model))
            stock = made(kind)
            stock.load_state_dict(model.state_dict())
            assert torch.equal(train(twin, context.rank), train(stock, context.rank))
            with pytest.raises(ValueError, match="there is no hook"):
                _raise_unless_inert(twin)
        assert sync.table() == before
        assert sync.stats()["comm/steps"] == 3
        if isinstance(model, DistributedDataParallel):
            assert torch.equal(flat(copy.deepcopy(model.module)), flat(model))
        sync.detach()


def _raise_unless_inert(twin: nn.Module) -> None:
    """A copy can be attached for itself, which it could not be with hooks that reach the first one's lane."""
    for module in twin.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            assert not type(hook).__module__.startswith("thinwire")
    raise ValueError("there is no hook of thinwire")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "dense ddp", "plain"])
def test_copies_and_files_of_an_attached_model_are_models_without_thinwire(kind: str) -> None:
    run_ranks(_copies, kind, world_size=2, timeout_seconds=60)


WITHOUT_THINWIRE = """
import sys
sys.modules["thinwire"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
model(torch.arange(4)).sum().backward()
assert model[0].weight.grad is not None
"""


def _file(context: RankContext, path: str) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 3)))
    sync = thinwire.attach(model)
    model(ids_of(context.rank)).sum().backward()
    if context.rank == 0:
        torch.save(model.module, path)
        assert b"thinwire" not in pickle.dumps(model)
        assert b"thinwire" not in Path(path).read_bytes()
    sync.detach()


@pytest.mark.slow
def test_a_file_of_an_attached_model_loads_where_thinwire_is_not_installed(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    run_ranks(_file, str(path), world_size=2, timeout_seconds=60)
    subprocess.run([sys.executable, "-c", WITHOUT_THINWIRE, str(path)], check=True, timeout=60)


def _script(context: RankContext) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    sync = thinwire.attach(model)
    with pytest.raises(Exception, match="script the module before attach, or after"):
        torch.jit.script(model)
    sync.detach()
    torch.jit.script(model)


def test_torch_script_of_an_attached_module_says_what_to_do() -> None:
    run_ranks(_script, world_size=1, timeout_seconds=60)


# --- freed


def _freed(context: RankContext, kind: str) -> tuple[int, int]:
    """Without garbage collection: C++ holds DDP's hooks, where no collector looks."""
    gc.collect()
    gc.disable()
    used = []
    for _ in range(4):
        model = made(kind)
        sync = thinwire.attach(model, dense=thinwire.compress.top_k(0.1) if kind == "plain" else "auto")
        train(model, context.rank)
        held = model, sync, sync._lane, next(model.parameters())
        refs = [weakref.ref(entry) for entry in held]
        del model, sync, held
        until(lambda refs=refs: all(ref() is None for ref in refs))
        time.sleep(0.1)  # whichever thread drops the last reference to a Gloo group joins its threads after that
        used.append(resources())
    assert used[0] == used[-1], used
    return used[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "dense ddp", "plain"])
def test_a_model_that_is_dropped_without_detach_is_freed_with_threads_and_sockets(kind: str) -> None:
    run_ranks(_freed, kind, world_size=2, timeout_seconds=60)


def until(condition: Callable[[], bool]) -> None:
    """The thread of a lane ends by itself, in its own time."""
    stop = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < stop
        time.sleep(0.01)


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _again(context: RankContext, detached: bool) -> None:
    """Eight times a process group, as notebooks and elastic jobs have it."""
    gc.collect()
    gc.disable()
    used = []
    for _ in range(8):
        model = made("ddp")
        sync = thinwire.attach(model)
        train(model, context.rank, steps=1)
        thinwire.sparse_all_reduce(torch.ones(10, 2))
        if detached:
            sync.detach()
        lanes = weakref.ref(sync._lane), weakref.ref(thinwire.all_reduce._lanes[dist.group.WORLD])  # type: ignore
        store = dist.distributed_c10d._get_default_store()
        del model, sync
        dist.barrier()
        dist.destroy_process_group()
        until(lambda lanes=lanes: all(lane() is None for lane in lanes))
        used.append(resources())
        prefix = dist.PrefixStore(f"again {len(used)}", store)
        dist.init_process_group("gloo", store=prefix, rank=context.rank, world_size=context.world_size)
        del store, prefix
    assert used[1] == used[-1]


@pytest.mark.slow
@pytest.mark.parametrize("detached", [True, False])
def test_eight_process_groups_one_after_the_other_leave_nothing(detached: bool) -> None:
    run_ranks(_again, detached, world_size=2, timeout_seconds=60)


def _interrupted(context: RankContext) -> None:
    """Ctrl-C while detach waits for the jobs of its lane."""
    model = made("plain")
    sync = thinwire.attach(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "close", lambda lane: raising(KeyboardInterrupt())())
        with pytest.raises(KeyboardInterrupt):
            sync.detach()
    sync.detach()
    again = thinwire.attach(model)
    train(model, context.rank)
    again.detach()


def test_a_model_can_be_attached_again_after_ctrl_c_in_detach() -> None:
    run_ranks(_interrupted, world_size=1)


def _kept(context: RankContext) -> None:
    """The Synchronizer keeps alive a module that was made to be attached only; its end is an error, not silence."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    sync = thinwire.attach(nn.Sequential(first, second))
    second(first(torch.ones(2, 4) * context.rank)).sum().backward()
    assert is_same_on_all_ranks(torch.cat([first.weight.grad.flatten(), second.weight.grad.flatten()]))
    del sync
    with pytest.raises(thinwire.ThinwireError, match="gone"):
        second(first(torch.ones(2, 4))).sum().backward()


def _after_detach(context: RankContext) -> None:
    """What needs other ranks raises, on all of them, where it waited for ever."""
    model = Model()
    sync = thinwire.attach(model)
    states = sync.gathered()
    model(torch.tensor([1, context.rank])).sum().backward()
    kept = sync.state_dict()
    sync.detach()
    assert sync.state_dict() == kept
    for call in (states.state_dict, lambda: _once(sync, model)):
        with pytest.raises(ThinwireError, match=r"ranks exchange nothing after detach\(\)"):
            call()


def _once(sync: thinwire.Synchronizer, model: nn.Module) -> None:
    with sync.one_sync():
        model(torch.tensor([1])).sum().backward()


def test_what_needs_other_ranks_raises_after_detach() -> None:
    run_ranks(_after_detach, world_size=2, timeout_seconds=30)


def _watches_after_detach(context: RankContext) -> None:
    model = made("dense ddp")
    assert isinstance(model, DistributedDataParallel)
    sync = thinwire.attach(model)
    train(model, context.rank, 1)
    sync.detach()
    busy: list[float] = []
    sync.watch_lane(lambda started, ended: busy.append(ended))
    with sync.trace() as trace:
        assert is_same_on_all_ranks(train(model, context.rank))
    assert not internals.comm_hooks(model)
    assert not busy
    assert not trace.events


def test_who_watches_after_detach_sees_nothing_and_puts_no_hook_on_the_model() -> None:
    """DDP calls a hook for life, so the model would not have been stock again."""
    run_ranks(_watches_after_detach, world_size=2, timeout_seconds=30)


def _inside(context: RankContext) -> None:
    """All ranks detach inside of a backward, at whose end they would ask each other."""
    for model in (Model(), DistributedDataParallel(Model())):
        sync = thinwire.attach(model)
        for step in range(3):
            output = model(torch.tensor([1, context.rank])).sum()
            if step == 2:
                table = getattr(model, "module", model).table.weight
                table.register_post_accumulate_grad_hook(lambda _, sync=sync: sync.detach())
            (0.0 * output).backward()
            assert all(not parameter.grad.any() for parameter in model.parameters())


def test_ranks_that_detach_in_a_backward_ask_nothing_at_its_end() -> None:
    run_ranks(_inside, world_size=2, timeout_seconds=30)


def _fails_at_its_end(context: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is interrupted when its model has hooks already. Both train and attach the same models afterwards."""
    monkeypatch.setenv("THINWIRE_HOST", str(context.rank))
    for model in (Model(), DistributedDataParallel(Model())):
        with monkeypatch.context() as patch:
            if context.rank == 1:
                patch.setattr(synchronizer, "DenseChoice", lambda *_: raising(KeyboardInterrupt())())
            with pytest.raises(KeyboardInterrupt if context.rank == 1 else LostPeerError):
                thinwire.attach(model)
        dist.barrier()
        model(torch.tensor([1, context.rank])).sum().backward()
        sync = thinwire.attach(model)
        model(torch.tensor([1, context.rank])).sum().backward()
        assert sync.stats()["comm/steps"] == 1
        sync.detach()


def _fails(context: RankContext) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _fails_at_its_end(context, monkeypatch)


def test_an_attach_that_failed_leaves_no_hooks() -> None:
    run_ranks(_fails, world_size=2, timeout_seconds=40)


def test_a_container_lives_as_long_as_its_synchronizer() -> None:
    run_ranks(_kept, world_size=2, timeout_seconds=60)


# --- compiled


def _compiled(context: RankContext, sparse: bool) -> None:
    from torch._dynamo.utils import counters

    found: list[tuple[int, Tensor]] = []
    for attached in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = made("ddp", sparse)
        sync = thinwire.attach(model) if attached else None
        parameters = train(torch.compile(model, backend="aot_eager"), context.rank)
        found.append((sum(counters["graph_break"].values()), parameters))
        assert sync is None or sync.stats()["comm/steps"] == 3
    (stock_breaks, stock), (breaks, mine) = found
    assert breaks == stock_breaks
    torch.testing.assert_close(mine, stock)
    assert is_same_on_all_ranks(mine)


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
def test_compiled_ddp_has_the_graph_breaks_of_stock_and_trains_alike(sparse: bool) -> None:
    run_ranks(_compiled, sparse, world_size=2, timeout_seconds=120)


def _full_graph(context: RankContext, kind: str) -> None:
    outcomes = []
    for attached in (False, True):
        torch._dynamo.reset()
        model = made(kind)
        sync = thinwire.attach(model) if attached else None
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.compile(backend="aot_eager", fullgraph=True)
        if sync is not None and kind == "plain":
            _break_off(inner, context.rank)
        outcomes.append(train(model, context.rank))
        assert sync is None or sync.stats()["comm/steps"] == 3
    if kind == "ddp":
        torch.testing.assert_close(*outcomes)
    assert is_same_on_all_ranks(outcomes[-1])


def _break_off(module: nn.Module, rank: int) -> None:
    """A backward that an exception ends on all ranks: the next forward is compiled, and still begins a new one."""

    def fail(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError

    handle = module.table.weight.register_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        module(ids_of(rank)).sum().backward()
    handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_a_full_graph_can_be_compiled_of_an_attached_model(kind: str) -> None:
    run_ranks(_full_graph, kind, world_size=2, timeout_seconds=120)


# --- what attach finds inside, and what inside of what it refuses


class Wrapper(nn.Module):
    """As a framework has it around a DDP model."""

    def __init__(self, model: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.head = model, head

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


def _wrapped(context: RankContext) -> None:
    for wrap in (Wrapper, lambda model: torch.compile(model, backend="eager")):
        ddp = made("ddp")
        wrapped = wrap(ddp)
        sync = thinwire.attach(wrapped)
        mine = train(wrapped, context.rank)
        assert sync.stats()["comm/steps"] == 3
        with pytest.raises(ValueError, match="attached to this model already"):
            thinwire.attach(ddp)
        sync.detach()
        assert torch.allclose(mine, train(made("ddp"), context.rank), atol=1e-6)
    with pytest.raises(ValueError, match=r"attach\(model.inner\)$"):
        thinwire.attach(Wrapper(made("ddp"), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"2 Distr.*attach\(model.inner\) and attach\(model.head\)"):
        thinwire.attach(Wrapper(made("ddp"), made("ddp")))


@pytest.mark.slow
def test_attach_finds_the_one_ddp_that_a_wrapper_holds() -> None:
    run_ranks(_wrapped, world_size=2, timeout_seconds=60)


def _inside_ddp(context: RankContext) -> None:
    def attach_first(module: nn.Module) -> nn.Module:
        thinwire.attach(module)
        return DistributedDataParallel(module)

    def attach_unwrapped(module: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(module)
        thinwire.attach(ddp.module)
        return ddp

    def attach_part(module: nn.Module) -> nn.Module:
        thinwire.attach(module.out)  # type: ignore[arg-type]
        return DistributedDataParallel(module)

    def attach_and_replicate(module: nn.Module) -> nn.Module:
        thinwire.attach(module)
        return replicate(module)

    for wrap in (attach_first, attach_unwrapped, attach_part, attach_and_replicate):
        model = wrap(Model())
        with pytest.raises(thinwire.ThinwireError, match=r"sync = thinwire.attach\(ddp\)"):
            model(ids_of(context.rank))
    with pytest.raises(ValueError, match=r"sync = thinwire.attach\(ddp\)"):
        thinwire.attach(replicate(Model()))


def test_a_module_inside_ddp_is_refused_with_the_line_to_write() -> None:
    run_ranks(_inside_ddp, world_size=2, timeout_seconds=60)


def _beside_ddp(context: RankContext) -> None:
    """In somebody's ordinary module, in one that DDP calls but does not hold, in one that DDP was told to ignore."""
    inside = made("plain")
    sync = thinwire.attach(inside)
    train(Wrapper(inside), context.rank)
    assert sync.stats()["comm/steps"] == 3

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.hidden = nn.Linear(3, 1), [inside]

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.hidden[0](ids))

    DistributedDataParallel(Calls())(ids_of(context.rank)).sum().backward()
    assert sync.stats()["comm/steps"] == 4
    outer = Wrapper(inside, nn.Linear(3, 1))
    names = [f"inner.{name}" for name, _ in inside.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, names)
    DistributedDataParallel(outer)(ids_of(context.rank)).sum().backward()
    assert sync.stats()["comm/steps"] == 5


def test_a_module_that_no_ddp_synchronizes_may_be_anywhere() -> None:
    run_ranks(_beside_ddp, world_size=2, timeout_seconds=60)


# --- ignored parameters, join


def _ignored(context: RankContext, compress: bool) -> None:
    """A table that each rank has for itself, of another size."""
    results = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Model()
        model.local = nn.Embedding(1000 + 500 * context.rank, 8)
        model.local.odd = nn.Parameter(torch.zeros(2, 2 + context.rank, dtype=torch.complex64))
        ignored = ["local.weight", "local.odd", "out.weight"]
        model.also_out = model.out  # by this name it is not ignored
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        ddp = DistributedDataParallel(model)
        sync = None
        if attached:
            sync = thinwire.attach(ddp, dense=thinwire.compress.bf16() if compress else "auto")
        ddp(ids_of(context.rank)).sum().backward()
        model.local(ids_of(context.rank)).sum().backward()
        results.append([entry.grad for entry in model.parameters() if entry.grad is not None])
        if sync is not None:
            assert not any("local" in str(row["name"]) for row in sync.table())
            assert "local.weight" not in sync.state_dict()["parameters"]
            sync.detach()
    for stock, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, stock, atol=0.02 if compress else 1e-6, rtol=0.02 if compress else 1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("compress", [False, True])
def test_parameters_that_ddp_ignores_are_left_alone(compress: bool) -> None:
    run_ranks(_ignored, compress, world_size=2, timeout_seconds=60)


def _join(context: RankContext, first_batches: int) -> None:
    """Ranks of different numbers of batches; a rank may have none at all."""
    batches = first_batches + 2 * context.rank
    outcomes = []
    for attached in (False, True):
        model = made("ddp")
        sync = thinwire.attach(model, timeout=timedelta(seconds=30)) if attached else None
        with model.join():
            train(model, context.rank, batches)
        outcomes.append(flat(model))
        if sync is not None:
            sync.detach()
    torch.testing.assert_close(*outcomes)
    for is_idle in (False, True):
        model = made("ddp")
        sync = thinwire.attach(model, "zen")
        if is_idle:
            sync.detach()
        other = model.join(divide_by_initial_world_size=False)
        with pytest.raises(thinwire.ThinwireError, match=r"call model.join\(\) without it"), other:
            train(model, context.rank, batches)


@pytest.mark.few(1)
@pytest.mark.parametrize("first_batches", [0, 1])
def test_join_trains_as_stock_and_another_divisor_is_refused_on_all_ranks(first_batches: int) -> None:
    run_ranks(_join, first_batches, world_size=2, timeout_seconds=60)


# --- the warning of gradients that nobody synchronized


def _warnings(train_once: Callable[[DistributedDataParallel, torch.optim.Optimizer], object]) -> list[str]:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = thinwire.attach(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            train_once(model, optimizer)
    sync.detach()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message)[:24] for warning in caught]


def _around_ddp(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    model.module(torch.arange(4)).sum().backward()
    optimizer.step()


def _two_forwards(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """As in GANs and contrastive training."""
    with torch.no_grad():
        model(torch.arange(4))
    (model(torch.arange(4)) - model(torch.arange(4, 8))).square().sum().backward()
    optimizer.step()


def _another_optimizer(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    other = nn.Linear(3, 1)
    other(model(torch.arange(4)).detach()).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def _local_steps(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    with model.no_sync():
        model(torch.arange(4)).sum().backward()
    optimizer.step()


def _warned(context: RankContext) -> None:
    assert _warnings(_around_ddp) == ["thinwire is attached, but"[:24]]
    for quiet in (_two_forwards, _another_optimizer, _local_steps):
        assert _warnings(quiet) == []
    from torch.optim import optimizer

    assert not optimizer._global_optimizer_pre_hooks


def test_gradients_that_are_used_unsynchronized_are_warned_of_once_and_forwards_are_not_counted() -> None:
    run_ranks(_warned, world_size=2, timeout_seconds=60)


# --- one file for all ranks


def _one_file(context: RankContext, path: str) -> None:
    """As Accelerate saves what is registered with it: state_dict on all ranks, written by rank 0."""
    compress = thinwire.compress.top_k(0.2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    sync = thinwire.attach(model, dense=compress)

    def step(number: int) -> Tensor:
        model.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + context.rank))).sum().backward()
        return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])

    step(0)
    for registered in (sync, sync.gathered()):
        state = registered.state_dict()
        if context.rank == 0:
            torch.save(state, path)
        before = step(1)
        dist.barrier()
        loaded = torch.load(path, weights_only=True)
        if registered is sync and context.rank > 0:
            with pytest.raises(ValueError, match=r"register_for_checkpointing\(sync.gathered\(\)\)"):
                registered.load_state_dict(loaded)
        if registered is not sync:
            read = loaded if context.rank == 0 else {}  # the other ranks may have no such file
            registered.load_state_dict(registered.of_rank_0(read))
            assert torch.equal(step(1), before)
            assert registered.of_rank_0({}) == {}
        dist.barrier()
    if context.rank > 0:
        with pytest.raises(ValueError, match="rank 0 writes"):
            sync.gathered().load_state_dict(state)
    sync.detach()


def _fewer_ranks(context: RankContext, path: str) -> None:
    sync = thinwire.attach(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), dense=thinwire.compress.top_k(0.2))
    sync.gathered().load_state_dict(torch.load(path, weights_only=True))
    assert sync.stats()["comm/steps"] == 2
    sync.detach()


def test_one_file_has_the_memories_of_all_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "custom_checkpoint_0.pkl")
    run_ranks(_one_file, path, world_size=3, timeout_seconds=60)
    run_ranks(_fewer_ranks, path, world_size=2, timeout_seconds=60)


def _one_refuses(context: RankContext) -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    attachment = Attachment(model, "", dense=thinwire.compress.top_k(0.2))
    sync = attachment.synchronizer

    def fails(*_: object) -> None:
        raise MemoryError

    alone = sync.state_dict()
    with pytest.raises(ValueError, match="rank 0: no states of all ranks in it"):
        attachment.load_state_dict(alone if context.rank == 0 else {})
    with pytest.raises(ValueError, match="rank 0: "):
        attachment.load_state_dict({"ranks": [torch.zeros(3, dtype=torch.uint8)]} if context.rank == 0 else {})
    saved = attachment.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1:
            patch.setattr(sync._compressed.memories, "state_dict", fails)
        with pytest.raises(ThinwireError, match="rank 1: MemoryError"):
            attachment.state_dict()
        with pytest.raises(ValueError, match="rank 1: MemoryError"):
            attachment.load_state_dict(saved)
    attachment.load_state_dict(saved)
    attachment.detach()


def test_whatever_one_rank_raises_over_states_is_heard_by_all() -> None:
    run_ranks(_one_refuses, world_size=2, timeout_seconds=60)


# --- a file for each rank


def _attached(context: RankContext) -> tuple[Attachment, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
    attachment = Attachment(model, "", dense=thinwire.compress.top_k(0.2))

    def step(number: int) -> Tensor:
        model.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + context.rank))).sum().backward()
        return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])

    return attachment, step


def _file_each(context: RankContext, shared: Path) -> None:
    """Ranks have folders of their own, as on nodes that share no disk."""
    own, name = shared / str(context.rank), f"thinwire-{context.rank:05}.pt"
    attachment, step = _attached(context)

    def other_bytes() -> float:
        return attachment.stats()["comm/setup_bytes"]

    attachment.load(own)  # nothing is there, which a log line says
    step(0)
    attachment.save(own)
    attachment.save(shared / "all")
    sent, others = attachment.stats()["comm/bytes_sent"], other_bytes()
    gathered = attachment.state_dict()
    assert other_bytes() - others < (3_000 if context.rank == 0 else 25_000), "rank 0 gets each state once"
    assert attachment.stats()["comm/bytes_sent"] == sent, "no gradients"
    before, others = step(1), other_bytes()
    attachment.load(own)
    assert torch.equal(step(1), before)
    assert other_bytes() - others < 2_000, "a state has 17 kB"
    (own / name).unlink()
    others = other_bytes()
    attachment.load_state_dict(gathered)
    assert torch.equal(step(1), before)
    assert other_bytes() - others < (2 * 25_000 if context.rank == 0 else 3_000), "each gets its own"
    after = step(2)

    def refused(folder: Path, match: str) -> None:
        """Ranks that could read their state go on with the one that they had."""
        attachment.load(shared / "all")
        step(1)
        with pytest.raises(ValueError, match=match):
            attachment.load(folder)
        assert torch.equal(step(2), after)

    attachment.save(own)
    if context.rank == 1:
        (own / name).unlink()
    refused(own, r"rank 1: no thinwire-00001.pt in .*/1, and 2 of 3 ranks have theirs: copy it")
    attachment.save(own)
    content = torch.load(own / name, weights_only=True)
    if context.rank == 2:
        torch.save({**content, "mark": 1}, own / name)
    refused(own, "rank 2: thinwire-00002.pt in .* is of another checkpoint than the file of rank 0: copy it")
    if context.rank == 2:
        content["state"]["compress"]["methods"] = {"0.weight": "another method"}
        torch.save(content, own / name)
    refused(own, "rank 2: parameter .* and was another method when the state was saved")
    if context.rank == 2:
        (own / name).write_bytes(b"PK")
    refused(own, "rank 2: cannot read thinwire-00002.pt")
    with pytest.raises(ThinwireError, match=r"rank 1: cannot write .*thinwire-00001.pt"):
        attachment.save(own / name if context.rank == 1 else own)  # a file where a folder should be
    assert not list(shared.rglob("*.part"))
    attachment.load(shared / "all")
    _per_step(attachment, step)
    attachment.detach()


def _per_step(attachment: Attachment, step: Callable[[int], Tensor]) -> None:
    """Two optimizers step after three backward passes, as with cached gradients; then once after one."""
    model = attachment.synchronizer._model
    weights, biases = (torch.optim.SGD([p for p in model.parameters() if p.dim() == dim]) for dim in (2, 1))
    another = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())  # as of the other network of a pair
    before = attachment.stats()
    for passes in (3, 1):
        for number in range(passes):
            step(number)
            for parameter in another.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            another.step()
        assert passes == 1 or attachment.per_step() == {}, "no optimizer has stepped"
        weights.step()
        biases.step()
    now, logged = attachment.stats(), attachment.per_step()
    assert now["comm/steps"] - before["comm/steps"] == 4
    assert now["comm/optimizer_steps"] - before["comm/optimizer_steps"] == 2
    assert logged["comm/bytes_sent_per_step"] == (now["comm/bytes_sent"] - before["comm/bytes_sent"]) / 2 > 0


def _another_number(context: RankContext, shared: Path) -> None:
    attachment, _ = _attached(context)
    attachment.load(shared / "all")
    assert attachment.stats()["comm/steps"] == 1
    with pytest.raises(ValueError, match="3 ranks saved this checkpoint, and there are 2 now: rank 0 needs thinwire-"):
        attachment.load(shared / "0" if context.rank == 0 else None)
    attachment.save(shared / "all")
    attachment.detach()


def _the_first_number(context: RankContext, shared: Path) -> None:
    attachment, _ = _attached(context)
    attachment.load(shared / "all")
    assert attachment.stats()["comm/steps"] == 1
    attachment.detach()


@pytest.mark.slow
def test_each_rank_reads_the_file_that_it_wrote(tmp_path: Path) -> None:
    run_ranks(_file_each, tmp_path, world_size=3, timeout_seconds=60)
    (tmp_path / "all" / "thinwire-00002-1.pt").touch()  # of another part of the model
    run_ranks(_another_number, tmp_path, world_size=2, timeout_seconds=60)
    left = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert left == ["thinwire-00000.pt", "thinwire-00001.pt", "thinwire-00002-1.pt"], "no rank 2 has saved this one"
    run_ranks(_the_first_number, tmp_path, world_size=3, timeout_seconds=60)


_seen: list[int] = []


def _of_the_user(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types
    _seen.append(bucket.index())
    return allreduce_hook(state, bucket)


def _registers_a_hook(context: RankContext, keeps: bool) -> bool:
    """A hook of the user's while attached, and after detach; where DDP keeps ours, the model stays as it is."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), gradient_as_bucket_view=keeps)
    stock = DistributedDataParallel(copy.deepcopy(model.module), gradient_as_bucket_view=keeps)
    sync = thinwire.attach(model, rows="zen")
    with pytest.raises(ValueError, match="leave out register_comm_hook"):
        model.register_comm_hook(None, _of_the_user)
    train(model, context.rank, 1)
    sync.detach()
    if keeps:
        with pytest.raises(ValueError, match=r"build DistributedDataParallel\(model\) again"):
            model.register_comm_hook(None, _of_the_user)
    else:
        model.register_comm_hook(None, _of_the_user)
    train(stock, context.rank, 1)
    torch.testing.assert_close(train(model, context.rank), train(stock, context.rank))
    copied = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(train(copied, context.rank), train(copy.deepcopy(model), context.rank))
    if keeps:
        thinwire.attach(model, rows="zen").detach()
    return bool(_seen)


@pytest.mark.parametrize("keeps", [False, True])
def test_after_detach_ddp_takes_a_hook_or_says_what_to_do(keeps: bool) -> None:
    for outcome in run_ranks(_registers_a_hook, keeps, world_size=2, timeout_seconds=60):
        assert outcome.value != keeps


def in_fork(function: Callable[[], object]) -> str:
    """Return what a function returns or raises in a forked process, which ends behind it."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this process has
        process = os.fork()
    if process == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    is_there = bool(select.select([reading], [], [], PATIENCE)[0])
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    text = os.read(reading, 4096).decode() if is_there else "it hangs"
    os.close(reading)
    return text


class _Ids(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return ids_of(0, index)


def _forks(context: RankContext, kind: str) -> None:
    model = made("ddp" if kind == "ddp" else "plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_loop = kind == "loop"
    ours = outer.attach(model, optimizer, outer.local_sgd(every=1)) if is_loop else thinwire.attach(model)
    other = copy.deepcopy(model)

    def step(number: int) -> Tensor:
        model(ids_of(context.rank, number)).square().mean().backward()
        optimizer.step()
        return flat(model)

    step(0)
    step(1)  # in whose forward DDP makes its buckets again, by a collective
    inner = model.module if kind == "ddp" else model
    assert in_fork(lambda: inner(ids_of(0)).requires_grad) == "True"
    says = in_fork(lambda: step(2))
    assert says.startswith("ThinwireError: rank ")
    assert 'a forked process has no connections: start it by "spawn", or train copy.deepcopy(model)' in says
    if not is_loop:
        assert in_fork(ours.detach) == "None"
    if kind != "ddp":  # whose copy has a reducer, and its group
        assert in_fork(lambda: len(train(other, 0))) == str(len(flat(other)))
    loader = torch.utils.data.DataLoader(_Ids(), 2, num_workers=2, multiprocessing_context="fork")
    assert [len(batch) for batch in loader] == [2] * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "break_off", lambda *arguments: pytest.fail("the parent broke off"))
        theirs = [torch.empty_like(step(3)) for _ in range(2)]
    dist.all_gather(theirs, flat(model))
    assert torch.equal(*theirs)
    ours.detach()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["plain", "ddp", "loop"])
def test_a_forked_process_is_told_that_it_has_no_connections_and_the_parent_trains_on(kind: str) -> None:
    run_ranks(_forks, kind, world_size=2, timeout_seconds=60)
