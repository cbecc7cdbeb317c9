"""`attach` never does nothing in silence, and never raises a false alarm in the loops that people write."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def encode(self, ids: Tensor) -> Tensor:
        return self.body(self.table(ids))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids))


def ids_of(context: RankContext, step: int = 0) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + context.rank)
    return torch.randint(0, 600, (4 + 3 * step + context.rank,), generator=data)


def is_same_everywhere(model: nn.Module) -> bool:
    mine = torch.cat([entry.detach().flatten() for entry in model.parameters()])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return all(torch.equal(other, mine) for other in found)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([entry for module in modules for entry in module.parameters()], lr=0.1)


# --- what took the model over after attach: refused, with the line to write


def _cast(model: Net) -> object:
    return model.half()


def _move(model: Net) -> object:
    return model.head.to("meta")


def _add(model: Net) -> None:
    model.extra = nn.Linear(3, 3)


def _add_below(model: Net) -> None:
    model.body.append(nn.Linear(8, 8))


def _replace(model: Net) -> None:
    model.head.weight = nn.Parameter(torch.zeros(1, 8))


def _replace_module(model: Net) -> None:
    model.head = nn.Linear(8, 1)


def _shard(model: Net) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def _shard_part(model: Net) -> None:
    fully_shard(model.head, mesh=init_device_mesh("cpu", (2,)))


def _engine(model: Net) -> None:
    """As the one of DeepSpeed registers its hook."""

    class Engine:
        enable_backward_allreduce = True

    engine = Engine()

    def hook(module: nn.Module, args: Any) -> None:
        assert engine

    hook.__qualname__ = "DeepSpeedEngine._create_module_forward_pre_hook.<locals>.hook"
    model.register_forward_pre_hook(hook)


TAKEN: dict[Callable[[Net], object], str] = {
    _cast: r"'table.weight' became torch.float16 \[.*\] on cpu after attach.*attach it last",
    _move: "'head.weight' was added or replaced",
    _add: "'extra.weight' was added or replaced after attach.*detach",
    _add_below: "'body.2.weight' was added or replaced",
    _replace: "'head.weight' was added or replaced",
    _replace_module: "'head.weight' was added or replaced",
    _shard: r"sharded after attach.*`fully_shard\(model\); sync = thinwire.attach\(model\)`",
    _shard_part: r"sharded after attach.*fully_shard\(model\)",
    _engine: r"DeepSpeed.*thinwire.integrations.deepspeed.attach\(engine\)",
}


def _taken_over(context: RankContext) -> None:
    for change, message in TAKEN.items():
        for wrap in (lambda module: module, DistributedDataParallel):
            if wrap is DistributedDataParallel and change not in (_cast, _replace_module):
                continue
            torch.manual_seed(0)
            module = Net()
            model = wrap(module)
            thinwire.attach(model)
            model(ids_of(context)).sum().backward()
            change(module)
            with pytest.raises(thinwire.ThinwireError, match=message):
                model(ids_of(context))


def test_a_model_that_changed_after_attach_is_refused_with_the_line_to_write() -> None:
    run_ranks(_taken_over, world_size=2, timeout_seconds=60)


def _on_one_rank(context: RankContext) -> str:
    """The others are told, and do not wait for gradients that never come."""
    model = Net()
    thinwire.attach(model)
    if context.rank == 0:
        model.head = nn.Linear(8, 1)
    with pytest.raises(thinwire.ThinwireError) as caught:
        model(ids_of(context)).sum().backward()
    return str(caught.value)


def test_a_change_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(_on_one_rank, world_size=2, timeout_seconds=60)
    assert "'head.weight' was added" in first.value
    assert second.value.startswith("rank 0 ")
    assert "'head.weight' was added" in second.value


def _harmless(context: RankContext) -> None:
    """Frozen parts, buffers, values, and evaluation in another dtype change nothing that is synchronized."""
    torch.manual_seed(0)
    model = Net()
    sync = thinwire.attach(model)
    optimizer = sgd(model)
    for step in range(4):
        model.zero_grad()
        model(ids_of(context, step)).sum().backward()
        optimizer.step()
        model.register_buffer(f"running_{step}", torch.zeros(2))
        model.add_module(f"teacher_{step}", copy.deepcopy(model.body).requires_grad_(False))
        model.teacher_0.double()
        model.head.weight.data = model.head.weight.detach().clone()
        with torch.no_grad():
            model.double()(ids_of(context))
            model.float()
    assert sync.stats()["comm/steps"] == 4
    assert is_same_everywhere(model)
    sync.detach()


# --- loops in which every gradient is synchronized, or local on purpose: no warning


def contrastive(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """Two forwards before a backward, and a third one for the validation."""
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        query, document = model(ids_of(context, step)), model(ids_of(context, step))
        (query - document.detach()).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(ids_of(context))


def grad_cache(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """Embeddings without a graph, the gradient of the loss in them, and then a backward for each chunk."""
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        chunks = ids_of(context, step + 1).chunk(3)
        with torch.no_grad():
            cached = torch.cat([model(chunk) for chunk in chunks])
        cached.requires_grad_()
        cached.softmax(0).square().sum().backward()
        assert cached.grad is not None
        for number, (chunk, gradient) in enumerate(
            zip(chunks, cached.grad.split([len(c) for c in chunks]), strict=True)
        ):
            if number < 2:
                with sync.no_sync():
                    model(chunk).backward(gradient)
            else:
                model(chunk).backward(gradient)
        optimizer.step()


def accumulation(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """With steps that GradScaler skips, and a local step on purpose."""
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    for step in range(3):
        with sync.no_sync():
            scaler.scale(model(ids_of(context, step)).sum()).backward()
        scaler.scale(model(ids_of(context, step)).sum() * 1e30).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with sync.no_sync():
        model(ids_of(context)).sum().backward()
    optimizer.step()


def frozen(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """Only a head of somebody else is trained, in between."""
    head = nn.Linear(1, 1)
    optimizer = sgd(head)
    for step in range(2):
        with torch.no_grad():
            found = model(ids_of(context, step))
        head(found).sum().backward()
        optimizer.step()
    model.eval()
    model(ids_of(context))
    model.train()
    sgd(model).step()


def two_optimizers(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """Of one model, both after one backward; and one that shares a table with another model."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    table, rest = sgd(module.table), sgd(module.body, module.head)
    for step in range(2):
        model.zero_grad()
        model(ids_of(context, step)).sum().backward()
        table.step()
        rest.step()


def preference(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """DPO: two forwards of the policy, and two of a frozen reference."""
    reference = copy.deepcopy(model.module if isinstance(model, DistributedDataParallel) else model)
    optimizer = sgd(model)
    for step in range(2):
        with torch.no_grad():
            base = [reference(ids_of(context, step + place)).mean() for place in (0, 1)]
        chosen, rejected = (model(ids_of(context, step + place)).mean() - base[place] for place in (0, 1))
        optimizer.zero_grad()
        (rejected - chosen).exp().backward()
        optimizer.step()


def average(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """A student, and a teacher that is its moving average."""
    teacher = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(ids_of(context, step))
        (model(ids_of(context, step)) - wanted - 1).square().sum().backward()
        optimizer.step()
        teacher.update_parameters(model)


ANY = (contrastive, grad_cache, accumulation, frozen, two_optimizers, preference, average)


def adversarial(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """A GAN in one module, whose parts are called by themselves, with an optimizer each."""
    assert isinstance(model, Net)
    generator, critic = sgd(model.table, model.body), sgd(model.head)
    for step in range(2):
        generator.zero_grad()
        critic.zero_grad()
        model.head(model.encode(ids_of(context, step)).detach()).sum().backward()
        critic.step()
        generator.zero_grad()
        (-model.head(model.encode(ids_of(context, step)))).sum().backward()
        generator.step()
    with sync.no_sync():
        model.head(model.encode(ids_of(context))).sum().backward()
    generator.step()


def reinforcement(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """Two losses of one forward, each with a backward of its own; manual optimization after either."""
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        found = model(ids_of(context, step))
        found.sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        model(ids_of(context, step)).square().sum().backward()
        optimizer.step()


def meta_learning(model: nn.Module, sync: thinwire.Synchronizer, context: RankContext) -> None:
    """MAML: a forward with weights that were made of the model's own."""
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        own = dict(model.named_parameters())
        loss = model(ids_of(context, step)).square().sum()
        made = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        fast = {name: entry - 0.1 * slope for (name, entry), slope in zip(own.items(), made, strict=True)}
        torch.func.functional_call(model, fast, ids_of(context, step)).sum().backward()
        optimizer.step()


PLAIN = (adversarial, reinforcement, meta_learning)


def _quiet(context: RankContext) -> None:
    for loop in (*ANY, *PLAIN):
        for wrap in (lambda module: module, DistributedDataParallel) if loop in ANY else (lambda module: module,):
            torch.manual_seed(0)
            model = wrap(Net())
            sync = thinwire.attach(model)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loop(model, sync, context)
            if loop not in (accumulation, adversarial):  # which end with a local step
                assert is_same_everywhere(model), loop.__name__
            sync.detach()
    _harmless(context)


@pytest.mark.slow
def test_no_false_alarm_in_the_loops_that_people_write() -> None:
    run_ranks(_quiet, world_size=2, timeout_seconds=100)


# --- gradients that nobody synchronized: one warning


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(ids).sum(), parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


def functional(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    values = {name: entry.detach().clone().requires_grad_() for name, entry in model.named_parameters()}
    torch.func.functional_call(model, values, ids).sum().backward()


def inside(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model.module(ids).sum().backward()
    optimizer.step()


def _warned(context: RankContext) -> None:
    for loop, wrap, message in (
        (by_hand, lambda module: module, "SGD uses gradients that it did not synchronize"),
        (functional, lambda module: module, "as its parameter 'table.weight', as torch.func does"),
        (inside, DistributedDataParallel, "SGD uses gradients that it did not synchronize: no backward pass"),
    ):
        for synchronized_before in (0, 2):
            torch.manual_seed(0)
            model = wrap(Net())
            sync = thinwire.attach(model)
            optimizer = sgd(model)
            for step in range(synchronized_before):
                optimizer.zero_grad()
                model(ids_of(context, step)).sum().backward()
                optimizer.step()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(3):
                    optimizer.zero_grad()
                    loop(model, optimizer, ids_of(context, step))
            assert [message in str(warning.message) for warning in caught] == [True], (loop, caught)
            sync.detach()


def test_gradients_that_are_not_synchronized_are_warned_of_once() -> None:
    run_ranks(_warned, world_size=2, timeout_seconds=60)


# --- optimizers that step before gradients are averaged: refused


def _stepped_in_a_hook(context: RankContext) -> None:
    """At the first gradient of a pass, and at the last one, when other buckets are on their way already."""
    for rows in ("zen", "auto"):
        for name in ("head.weight", "table.weight"):
            torch.manual_seed(0)
            module = Net()
            model = DistributedDataParallel(module, bucket_cap_mb=1e-3)
            sync = thinwire.attach(model, rows)
            optimizer = sgd(model)
            model(ids_of(context)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert is_same_everywhere(model)
            step = lambda parameter, optimizer=optimizer: optimizer.step()  # noqa: E731
            hook = module.get_parameter(name).register_post_accumulate_grad_hook(step)
            with sync.no_sync():  # local on purpose
                model(ids_of(context)).sum().backward()
            with pytest.raises(thinwire.ThinwireError, match=r"SGD steps in a hook of backward.* before they are aver"):
                model(ids_of(context)).sum().backward()
            hook.remove()
            sync.detach()


def test_an_optimizer_that_steps_in_a_hook_of_ddp_is_refused() -> None:
    run_ranks(_stepped_in_a_hook, world_size=2, timeout_seconds=60)


def _stepped_by_the_parameter(context: RankContext) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, on which its module is built
        from torch.distributed.optim import _apply_optimizer_in_backward
    for wrap in (lambda module: module, DistributedDataParallel):
        module = Net()
        model = wrap(module)
        _apply_optimizer_in_backward(torch.optim.SGD, module.head.parameters(), {"lr": 0.1})
        with pytest.raises(ValueError, match=r"parameter 'head.weight' has an optimizer that steps in backward: grad"):
            thinwire.attach(model)


def test_an_optimizer_that_a_parameter_has_is_refused_by_attach() -> None:
    run_ranks(_stepped_by_the_parameter, world_size=2, timeout_seconds=60)


# --- parameters that are left alone


class Private(Net):
    """With parts that each rank has for itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.own = nn.ModuleDict({"table": nn.Embedding(700 + 100 * rank, 8), "odd": nn.Linear(8, 8 + rank)})
        self.own.register_buffer("count", torch.zeros(1 + rank))
        self.tied = self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids) + self.own["table"](ids)) + self.own["odd"](self.encode(ids))[:, :1]


def _left_out(context: RankContext) -> None:
    torch.manual_seed(context.rank)
    model = Private(context.rank)
    before = model.head.weight.detach().clone()
    sync = thinwire.attach(model, exclude=["own.*", model.tied.weight])
    assert torch.equal(model.head.weight, before)
    twin = copy.deepcopy(model)
    for step in range(3):
        for each in (model, twin):
            each.zero_grad()
            each(ids_of(context, step)).sum().backward()
        for name, entry in model.named_parameters():
            mine, local = entry.grad, twin.get_parameter(name).grad
            assert mine is not None
            assert local is not None
            if name.startswith("own.") or name == "head.weight":
                assert torch.equal(mine, local)
                continue
            total = local.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(mine, total / 2)
    assert not any("own" in str(row["name"]) for row in sync.table())
    assert not any("own" in name or "head.w" in name for name in sync.state_dict()["parameters"])
    sync.detach()
    for wrong, message in (
        ("own.tabel.weight", "Did you mean 'own.table.weight'"),
        ("body", r"'body', which is no parameter or buffer of Private. Did you mean 'body.\*'"),
        ([nn.Parameter(torch.zeros(2))], "a Parameter of another model"),
    ):
        with pytest.raises(ValueError, match=message):
            thinwire.attach(model, exclude=wrong)
    with pytest.raises(ValueError, match="_set_params_and_buffers_to_ignore_for_model"):
        thinwire.attach(DistributedDataParallel(Net()), exclude="head.*")
    with pytest.raises((ValueError, thinwire.MismatchError), match=r"tabel|rank 0"):
        thinwire.attach(model, exclude="own.tabel" if context.rank == 0 else "own.*")
    with pytest.raises(thinwire.MismatchError):
        thinwire.attach(Net(), exclude="head.*" if context.rank == 0 else ())


def test_what_is_excluded_stays_on_its_rank() -> None:
    run_ranks(_left_out, world_size=2, timeout_seconds=60)


# --- tables that no module announces


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(900, 8))
        self.dense = nn.Parameter(torch.randn(700, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found = nn.functional.embedding(ids, self.words) - nn.functional.embedding(ids // 2, self.words)
        return self.out(found + self.dense.mean(0))


def _bare(context: RankContext) -> list[list[str]]:
    kinds = []
    for wrap in (lambda module: module, DistributedDataParallel):
        torch.manual_seed(0)
        module = Bare()
        stock = DistributedDataParallel(copy.deepcopy(module))
        model = wrap(module)
        sync = thinwire.attach(model, "zen")
        for step in range(4):
            for each in (model, stock):
                each.zero_grad()
                each(ids_of(context, step)).square().sum().backward()
            for mine, expected in zip(model.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, expected.grad)
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            model(ids_of(context)).sum().backward()
        shown = {event.name for event in trace.events() or () if event.name.startswith("thinwire::")}
        assert any("synchronize words" in name for name in shown), shown
        kinds.append([f"{row['name']}: {row['kind']}" for row in sync.table() if row["kind"] != "all-reduce"])
        sync.detach()
    return kinds


def test_functional_lookups_of_any_parameter_travel_as_rows_that_are_known() -> None:
    for rank in run_ranks(_bare, world_size=2, timeout_seconds=60):
        assert rank.value == [["words: dense gradient, rows known"]] * 2
