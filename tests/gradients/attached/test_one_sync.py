"""One synchronization for many backward passes: nested in one, as GradCache's, or one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire.errors import ThinwireError
from thinwire.gradients import passes
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks
WORDS = 701


class Encoder(nn.Module):
    """A table, hidden layers, one that only some batches use, and a buffer that each batch changes."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, sparse=sparse)
        self.hidden = nn.Linear(16, 300)
        self.rare = nn.Linear(300, 300)
        self.out = nn.Linear(300, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += ids.numel()
        hidden = self.hidden(self.words(ids).mean(1)).tanh()
        return self.out(self.rare(hidden) if int(ids[0, 0]) % 3 == 0 else hidden)


class AllUsed(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rare(self.hidden(self.words(ids).mean(1)).tanh()))


def batches(rank: int, step: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(torch.rand(3, 5, generator=generator) ** 3 * WORDS).long() for _ in range(count)]


def cached(model: nn.Module, parts: list[Tensor], after: Callable[[int], None] = lambda part: None) -> Tensor:
    """A step of GradCache: the model runs without gradients, and again for each part, inside of the backward."""
    with torch.no_grad():
        found = [model(part) for part in parts]
    leaves = [one.requires_grad_() for one in found]
    whole = torch.cat(leaves)
    loss = (whole @ whole.T).logsumexp(1).mean()
    loss.backward()
    last = loss.detach().requires_grad_()

    def hook(gradient: Tensor) -> None:
        with torch.enable_grad():
            for number, (part, leaf) in enumerate(zip(parts, leaves, strict=True)):
                (model(part) * leaf.grad).sum().backward()
                after(number)

    last.register_hook(hook)
    last.backward()
    return loss.detach()


def means(model: nn.Module) -> list[Tensor | None]:
    """The means over ranks of the gradients that are there, in order; None where no rank has one."""
    found: list[Tensor | None] = []
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense().clone()
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(gradient)
        dist.all_reduce(used)
        found.append(gradient / dist.get_world_size() if used else None)
    return found


def check(model: nn.Module, expected: list[Tensor | None]) -> None:
    for (name, parameter), mean in zip(model.named_parameters(), expected, strict=True):
        assert (parameter.grad is None) == (mean is None), name
        if mean is not None and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.to_dense(), mean, rtol=1e-5, atol=1e-7, msg=name)


WRAPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "plain": (Encoder, {}, {}),
    "plain_lossless": (Encoder, {}, {"dense": "lossless"}),
    "ddp": (AllUsed, {}, {"rows": "zen"}),
    "left_to_ddp": (AllUsed, {}, {"rows": "dense"}),
    "sparse": (lambda: AllUsed(sparse=True), {}, {}),
    "unused": (Encoder, {"find_unused_parameters": True}, {"rows": "zen"}),
    "views": (AllUsed, {"gradient_as_bucket_view": True}, {"dense": "lossless"}),
    "auto": (AllUsed, {}, {}),
}


def _steps(context: RankContext) -> None:
    for case, (make, wraps, options) in WRAPPED.items():
        torch.manual_seed(0)
        local = make()
        inner = copy.deepcopy(local)
        model = inner if case.startswith("plain") else DistributedDataParallel(inner, **wraps)
        sync = thinwire.attach(model, **options)
        for step in range(5):
            parts = batches(context.rank, step, 2 + context.rank * (step % 2) * case.startswith("plain"))
            for one in (local, model):
                one.zero_grad(set_to_none=step != 3)
            done = sync.stats()["comm/steps"]
            if step in (0, 2, 3):
                losses = [cached(one, parts) for one in (local, model)]
                assert losses[0] == losses[1], case
            else:
                with sync.one_sync():
                    for part in parts:
                        model(part).square().mean().backward()
                for part in parts:
                    local(part).square().mean().backward()
            assert sync.stats()["comm/steps"] == done + 1, (case, step)
            check(inner, means(local))
        cached(model, parts[:2], lambda part: sync.detach() if part == 1 else None)  # noqa: B023
        assert case.startswith("plain") or model.require_backward_grad_sync


def _one_has_no_batch(context: RankContext) -> None:
    for model in (Encoder(), DistributedDataParallel(Encoder(), find_unused_parameters=True, broadcast_buffers=False)):
        inner = getattr(model, "module", model)
        local = copy.deepcopy(inner)
        sync = thinwire.attach(model)
        parts = batches(context.rank, 0, 2) if context.rank == 0 else []
        with sync.one_sync():
            for part in parts:
                model(part).square().mean().backward()
        for part in parts:
            local(part).square().mean().backward()
        check(inner, means(local))
        sync.detach()


def test_a_rank_may_have_no_pass_at_all() -> None:
    run_ranks(_one_has_no_batch, world_size=2, timeout_seconds=60)


@pytest.mark.slow
def test_a_step_of_many_passes_is_sent_once() -> None:
    run_ranks(_steps, world_size=2, timeout_seconds=60)


def _odd_passes(context: RankContext) -> None:
    for is_ddp in (False, True):
        _odd(context, is_ddp)


def _odd(context: RankContext, is_ddp: bool) -> None:
    torch.manual_seed(0)
    local = AllUsed()
    inner = copy.deepcopy(local)
    # buffers are broadcast by torch, where ranks would wait for others
    model = DistributedDataParallel(inner, broadcast_buffers=False) if is_ddp else nn.Sequential(inner)
    sync = thinwire.attach(model)
    first, second = batches(context.rank, 0, 2)
    expected = [first, second]
    steps = 0

    def compare(sends: int = 1) -> None:
        nonlocal steps
        steps += sends
        for part in expected:
            local(part).square().sum().backward()
        check(inner, means(local))
        assert sync.stats()["comm/steps"] == steps
        for one in (local, model):
            one.zero_grad()

    anchor = torch.ones((), requires_grad=True)  # re-entrant checkpointing of the whole model
    outputs = [checkpoint(lambda ids, anchor: model(ids), part, anchor, use_reentrant=True) for part in expected]
    sum(one.square().sum() for one in outputs).backward()  # type: ignore[union-attr]
    compare()
    if not is_ddp:  # a pass through the output of the model holds nothing
        again = checkpoint(model, first, use_reentrant=False)
        (again.square().sum() + model(second).square().sum()).backward()
        compare()
    with sync.no_sync():  # local on purpose
        cached(model, expected)
    cached(local, expected)
    for mine, theirs in zip(inner.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    model.zero_grad(), local.zero_grad()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # which steps inside of the outer pass
    cached(local, expected)
    wanted = [
        parameter - 0.1 * mean
        for parameter, mean in zip(local.parameters(), means(local), strict=True)
        if mean is not None
    ]
    cached(model, expected, lambda part: optimizer.step() if part == 1 else None)
    for mine, weight in zip(inner.parameters(), wanted, strict=True):
        torch.testing.assert_close(mine.detach(), weight.detach())
    steps += 1
    local.load_state_dict(inner.state_dict())
    model.zero_grad(), local.zero_grad()

    def fail(part: int) -> None:
        raise KeyError("on purpose")

    def interrupted() -> None:
        with sync.one_sync():
            model(first).square().sum().backward()
            fail(0)

    with pytest.raises(KeyError, match="on purpose"):
        interrupted()
    local(first).square().sum().backward()
    for mine, theirs in zip(inner.parameters(), local.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    model.zero_grad(), local.zero_grad()
    with sync.one_sync():
        for part in expected:
            model(part).square().sum().backward()
    compare()

    with pytest.raises(KeyError, match="on purpose"):
        cached(model, [first, second], fail)  # on all ranks
    if is_ddp:
        assert model.require_backward_grad_sync
    with pytest.raises(KeyError, match="on purpose"):
        cached(local, [first, second], fail)
    for mine, theirs in zip(inner.parameters(), local.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    sync.detach()
    model.zero_grad(), local.zero_grad()
    sync = thinwire.attach(model)
    cached(model, expected), cached(local, expected)
    check(inner, means(local))
    model.zero_grad()
    dist.barrier()
    expected_error = KeyError if context.rank else ThinwireError
    with pytest.raises(expected_error):
        cached(model, [first, second], fail if context.rank else lambda part: None)
    sync.detach()


def _uneven_passes(context: RankContext) -> None:
    """Steps of which one rank makes no pass, and steps by a compiled forward, whose hooks do not run, and by another.

    On rank 0 the model is called once without gradients, as for a validation.
    """
    model = DistributedDataParallel(AllUsed(), broadcast_buffers=False)
    sync = thinwire.attach(model)
    ids = batches(context.rank, 0, 1)[0]
    for step in range(1, 4):
        with sync.one_sync():
            if step != 2 or context.rank == 0:
                model(ids).sum().backward()
        assert sync.stats()["comm/steps"] == step
    sync.detach()
    sync = thinwire.attach(model)
    for step in range(1, 4):
        passes.is_compiling = lambda: True
        model(ids).sum().backward()
        passes.is_compiling = lambda: False
        assert sync.stats()["comm/steps"] == step
        if context.rank == 0 and step == 1:
            with torch.no_grad():
                model.module(ids)
    model(ids).sum().backward()
    assert sync.stats()["comm/steps"] == 4
    rows = sync._steps.decisions.rows
    assert rows is not None
    assert rows.trial.steps == 3, "all ranks decide after the same steps"
    sync.detach()


def test_a_step_counts_on_a_rank_without_a_forward() -> None:
    run_ranks(_uneven_passes, world_size=2, timeout_seconds=60)


def _frozen(context: RankContext) -> None:
    model = AllUsed()
    sync = thinwire.attach(model)
    local = copy.deepcopy(model)
    parts = batches(0, 0, 1) if context.rank == 0 else []
    for is_frozen in (False, True, False):
        for one in (local, model):
            one.zero_grad()
            one.hidden.requires_grad_(not is_frozen)
        with sync.one_sync():
            for part in parts:
                model(part).sum().backward()
        for part in parts:
            local(part).sum().backward()
        check(model, means(local))
    sync.detach()


def test_a_rank_without_any_pass_sees_what_is_frozen() -> None:
    run_ranks(_frozen, world_size=2, timeout_seconds=60)


def _changed(context: RankContext) -> None:
    for model in (AllUsed(), DistributedDataParallel(AllUsed(), broadcast_buffers=False)):
        sync = thinwire.attach(model)
        getattr(model, "module", model).out = nn.Linear(300, 8)
        with pytest.raises(ThinwireError, match=r"'out\.weight' was added or replaced after attach"), sync.one_sync():
            model(batches(context.rank, 0, 1)[0]).sum().backward()
        sync.detach()


def test_a_parameter_that_is_replaced_is_refused_where_each_step_is_sent_once() -> None:
    run_ranks(_changed, world_size=2, timeout_seconds=60)


def _refused(context: RankContext) -> None:
    static = DistributedDataParallel(AllUsed(), static_graph=True)
    sharded = fully_shard(AllUsed())
    for model, why in ((static, "static_graph"), (sharded, "set_requires_gradient_sync")):
        sync = thinwire.attach(model)
        with pytest.raises(ValueError, match=why), sync.one_sync():
            pass
        sync.detach()
    local = AllUsed()
    local.load_state_dict(static.module.state_dict())
    sync = thinwire.attach(static)
    parts = batches(context.rank, 0, 2)
    cached(static, parts), cached(local, parts)  # as stock does: each pass is sent
    check(static.module, means(local))
    assert sync.stats()["comm/steps"] == 2
    sync.detach()


def test_what_cannot_be_held_is_sent_each_time() -> None:
    run_ranks(_refused, world_size=2, timeout_seconds=60)


def test_exceptions_and_passes_of_other_kinds() -> None:
    run_ranks(_odd_passes, world_size=2, timeout_seconds=60)
