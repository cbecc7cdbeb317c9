"""Outer loops in step with training, on real ranks: laws of the algorithms, resumed runs, and what training does."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.compress import error_feedback, qsgd, top_k
from thinwire.errors import LostPeerError, MismatchError, ThinwireError
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import OuterLoop, OuterRecipe, diloco, local_sgd, shadow_sync

pytestmark = pytest.mark.ranks

STREAMING = replace(diloco(every=6, fragments=3, delay=2, mix=0.5), start_step=2)


class Net(nn.Module):
    """A table, tied to nothing; a matrix that is worth compressing; and statistics of batches."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16, dtype=dtype)
        self.first = nn.Linear(16, 80, dtype=dtype)
        self.norm = nn.BatchNorm1d(80, dtype=dtype)
        self.last = nn.Linear(80, 2, dtype=dtype)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(self.table(ids)))))


def made(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    """A batch of another size in each step."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    ids = torch.randint(0, 300, (6 + number % 5,), generator=generator)
    optimizer.zero_grad()
    (model(ids) - ids[:, None] / 150).square().mean().backward()
    optimizer.step()


def everywhere(tensor: Tensor) -> list[Tensor]:
    """What each rank has."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def is_same_on_all_ranks(model: nn.Module) -> bool:
    mine = parameters(model)
    return all(torch.equal(other, mine) for other in everywhere(mine))


def attached(model: nn.Module, recipe: OuterRecipe, optimizer: Any, **options: Any) -> OuterLoop:
    sync = thinwire.outer.attach(model, optimizer, recipe, **options)
    assert isinstance(sync, OuterLoop)
    return sync


def trained(
    context: RankContext, recipe: OuterRecipe, steps: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor:
    """The parameters of this rank after so many steps."""
    model = made(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sync = attached(model, recipe, optimizer, **options)
    for number in range(steps):
        step(model, optimizer, context.rank, number)
    sync.detach()
    return parameters(model)


# --- what the algorithms are


def _laws(context: RankContext) -> None:
    model = made(torch.float64)
    model.norm = nn.Identity()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attached(model, local_sgd(every=1), optimizer)
    ddp = DistributedDataParallel(reference)
    other = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(8):
        step(model, optimizer, context.rank, number)
        step(ddp, other, context.rank, number)
    torch.testing.assert_close(parameters(model), parameters(reference), rtol=1e-12, atol=1e-14)
    assert sync.stats()["outer/rounds"] == 8
    assert sync.stats()["outer/ranks"] == context.world_size
    sync.detach()

    plain = trained(context, local_sgd(every=3), 10)
    assert torch.equal(plain, trained(context, diloco(every=3, lr=1.0, momentum=0.0, nesterov=False), 10))
    assert not torch.equal(plain, trained(context, local_sgd(every=4), 10))
    whole = trained(context, diloco(every=4), 11)
    assert torch.equal(whole, trained(context, diloco(every=4, fragments=1, delay=0, mix=1.0), 11))
    post_local = trained(context, local_sgd(every=4, start_step=10), 10)
    assert torch.equal(post_local, trained(context, local_sgd(every=1), 10))

    model = made(torch.float64)
    model.norm = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = thinwire.outer.attach(model, optimizer, local_sgd(every=4))
    for number in range(2):
        step(model, optimizer, context.rank, number)
    with loop.global_parameters():
        assert is_same_on_all_ranks(model)
    loop.synchronize()
    assert is_same_on_all_ranks(model)
    loop.detach()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_step_is_ddp_and_recipes_meet_where_they_should(world_size: int) -> None:
    run_ranks(_laws, world_size=world_size, timeout_seconds=60)


def _anchors_agree(context: RankContext, recipe: OuterRecipe, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = made(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = attached(model, recipe, optimizer, **options)
    anchors = []
    for number in range(14):
        step(model, optimizer, context.rank, number)
        local = parameters(model)
        with sync.global_parameters():
            assert is_same_on_all_ranks(model), f"anchors after step {number + 1}"
            assert torch.equal(model.mask.isinf(), torch.ones(4, 4).triu(1).bool())
            anchors.append(parameters(model))
        assert torch.equal(parameters(model), local), "this rank's own are back"
    assert not torch.equal(anchors[0], anchors[-1])
    assert not is_same_on_all_ranks(model)
    sync.synchronize()
    assert is_same_on_all_ranks(model)
    assert all(torch.equal(model.norm.running_mean, other) for other in everywhere(model.norm.running_mean))
    assert model.norm.running_mean.any()
    assert sync.stats()["outer/refused"] == 0
    sync.detach()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("recipe", "options", "dtype"),
    [
        (STREAMING, {}, torch.float32),
        (STREAMING, {"dense": error_feedback(top_k(0.05, values=qsgd(2)), decay=0.95)}, torch.float32),
        pytest.param(diloco(every=5), {"dense": top_k(0.1), "rows": "zen"}, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(local_sgd(every=5), {}, torch.float64, marks=pytest.mark.slow),
    ],
    ids=["streaming", "sparse", "bf16", "fp64"],
)
def test_anchors_have_the_same_bits_on_all_ranks(
    recipe: OuterRecipe, options: dict[str, Any], dtype: torch.dtype
) -> None:
    run_ranks(_anchors_agree, recipe, options, dtype, world_size=4 if dtype == torch.float64 else 2, timeout_seconds=60)


def _adds_up(context: RankContext) -> None:
    """`Net` has more buffers than fit in the smallest record, and with ``min_ranks`` a round has an end."""
    model = made()
    model.more = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attached(model, diloco(every=1, min_ranks=1), optimizer, dense=top_k(0.1))
    for number in range(3):
        before = sync.stats()["comm/bytes_sent"]
        step(model, optimizer, context.rank, number)
        rows = sync.table()
        assert sum(int(row["bytes"]) for row in rows) == sync.stats()["comm/bytes_sent"] - before > 0
        (opening,) = [row for row in rows if row["name"] == "openings of rounds"]
        assert opening["bytes"] == opening["predicted_bytes"]
    sync.detach()


def test_rows_of_the_table_add_up_to_what_was_sent() -> None:
    run_ranks(_adds_up, world_size=2, timeout_seconds=60)


def _starts_exactly(context: RankContext) -> None:
    def trained_by(**options: Any) -> list[Tensor]:
        torch.manual_seed(context.rank)
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = attached(model, local_sgd(every=2, start_step=4), optimizer, **options)
        seen = []
        for number in range(6):
            step(model, optimizer, context.rank, number)
            seen.append(parameters(model))
        sync.detach()
        return seen

    exact, coded = trained_by(), trained_by(dense=error_feedback(top_k(0.05)))
    assert [torch.equal(*pair) for pair in zip(exact, coded, strict=True)] == [True] * 5 + [False]


def test_until_the_start_step_nothing_is_compressed() -> None:
    run_ranks(_starts_exactly, world_size=2, timeout_seconds=60)


# --- a state in the middle


def _resumes(context: RankContext, recipe: OuterRecipe, options: dict[str, Any], steps: int) -> None:
    def begin() -> tuple[Net, torch.optim.Optimizer, OuterLoop]:
        model = made()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, optimizer, attached(model, recipe, optimizer, **options)

    model, optimizer, sync = begin()
    states = []
    for number in range(steps):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict())))
        step(model, optimizer, context.rank, number)
    final = parameters(model)
    sync.detach()
    assert any(state[2]["flights"] for state in states) == (recipe.delay > 0)
    other, again, resumed = begin()
    for first, (weights, moments, state) in enumerate(states):
        torch.manual_seed(first)  # nothing that is drawn may come from here
        other.load_state_dict(weights)
        again.load_state_dict(moments)
        resumed.load_state_dict(state)
        for number in range(first, min(steps, first + 9)):
            step(other, again, context.rank, number)
            if number + 1 < steps:
                expected = states[number + 1]
                assert torch.equal(parameters(other), flat(expected[0], other)), f"step {number} from state {first}"
    assert torch.equal(parameters(other), final)
    resumed.detach()


def flat(state: Mapping[str, Tensor], like: nn.Module) -> Tensor:
    return torch.cat([state[name].double().reshape(-1) for name, _ in like.named_parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param(STREAMING, {}, marks=pytest.mark.slow),
        (diloco(every=4, fragments=2, delay=4, mix=0.7), {"dense": top_k(0.1, values=qsgd(4))}),
        pytest.param(local_sgd(every=3, start_step=2), {"dense": error_feedback(top_k(0.1))}, marks=pytest.mark.slow),
    ],
    ids=["streaming", "compressed", "local"],
)
def test_a_run_is_resumed_bitwise_from_each_step(recipe: OuterRecipe, options: dict[str, Any]) -> None:
    run_ranks(_resumes, recipe, options, 13, world_size=2, timeout_seconds=90)


# --- what training does


def _uneven(context: RankContext) -> None:
    """Ranks that make unlike numbers of steps, and of rounds, meet in synchronize, and go on together."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = replace(diloco(every=4, fragments=2, delay=1), start_step=1)
    sync = attached(model, recipe, optimizer)
    number = 0
    for _ in range(3):
        for _ in range(5 + 6 * context.rank):
            step(model, optimizer, context.rank, number)
            number += 1
        sync.synchronize()
        assert is_same_on_all_ranks(model)
        with sync.global_parameters():
            assert is_same_on_all_ranks(model)
    sync.synchronize()
    assert sync.stats()["outer/ranks"] >= 1, "of the last round that had any"
    for _ in range(5):
        step(model, optimizer, context.rank, number)
    sync.detach()
    sync.detach()
    with pytest.raises(ThinwireError, match="was detached"):
        sync.synchronize()


@pytest.mark.slow
def test_uneven_numbers_of_steps_meet_again() -> None:
    run_ranks(_uneven, world_size=3, timeout_seconds=60)


def _weights(context: RankContext) -> None:
    """One parameter, to which each rank adds its own number in each step: the mean weighs by steps."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = attached(model, local_sgd(every=100), optimizer)
    for _ in range(1 + 2 * context.rank):
        model.weight.grad = torch.full_like(model.weight, -(10.0**context.rank))
        optimizer.step()
    sync.synchronize()
    ranks = range(context.world_size)
    steps = [1 + 2 * rank for rank in ranks]
    expected = sum(steps[rank] * steps[rank] * 10.0**rank for rank in ranks) / sum(steps)
    assert model.weight.item() == pytest.approx(expected, rel=1e-12)
    sync.detach()


def test_a_mean_weighs_by_inner_steps() -> None:
    run_ranks(_weights, world_size=3, timeout_seconds=60)


class Scaled:
    """What Accelerate and Lightning wrap around an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def _steps_that_count(context: RankContext) -> None:
    model = made()
    groups = [{"params": model.table.parameters(), "lr": 0.2}, {"params": [*model.first.parameters()], "lr": 0.1}]
    optimizer = torch.optim.SGD([*groups, {"params": [*model.norm.parameters(), *model.last.parameters()]}], lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sync = attached(model, local_sgd(every=2), Scaled(optimizer))
    for number in range(4):
        model(torch.arange(3)).sum().backward()  # accumulation: only steps count
        step(model, optimizer, context.rank, number)
        schedule.step()
        assert is_same_on_all_ranks(model) == (number % 2 == 1)
    assert sync.stats()["outer/inner_steps"] == 4
    sync.detach()

    for is_fused in (False, True):  # whether the scaler skips the step, or the optimizer by itself
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=is_fused)
        sync = attached(model, local_sgd(every=2), optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(torch.arange(4) + context.rank).square().sum() * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert is_same_on_all_ranks(model) == (number == 2)
        assert sync.stats()["outer/inner_steps"] == 2
        sync.detach()

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # whose state is empty for ever
    sync = attached(model, local_sgd(every=2), optimizer)
    for number in range(4):
        step(model, optimizer, context.rank, number)
        optimizer.zero_grad()
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))  # which makes steps
        assert is_same_on_all_ranks(model) == (number % 2 == 1)
    assert sync.stats()["outer/inner_steps"] == 4
    sync.detach()

    model = made()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    sync = attached(model, local_sgd(every=1), optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(4) + context.rank).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert sync.stats()["outer/inner_steps"] == 1
    assert is_same_on_all_ranks(model)
    sync.detach()


def test_only_steps_of_the_optimizer_count() -> None:
    run_ranks(_steps_that_count, world_size=2, timeout_seconds=60)


class Tied(nn.Module):
    """The table is the output layer too, and another part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)
        self.late = nn.Linear(16, 16).requires_grad_(False)
        self.out = nn.Linear(16, 300, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.late(self.table(ids))))[:, :2]


def _tied_and_unfrozen(context: RankContext) -> None:
    torch.manual_seed(context.rank)  # rank 0's parameters count
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = attached(model, diloco(every=3, fragments=2), optimizer)
    assert is_same_on_all_ranks(model)
    before = model.late.weight.detach().clone()
    for number in range(6):
        step(model, optimizer, context.rank, number)
    assert torch.equal(model.late.weight, before)
    model.late.requires_grad_(True)
    model.table.requires_grad_(False)
    for number in range(6, 12):
        step(model, optimizer, context.rank, number)
    assert not torch.equal(model.late.weight, before)
    sync.synchronize()
    assert is_same_on_all_ranks(model)
    state = copy.deepcopy(sync.state_dict())
    assert set(state["anchors"]) == {"table.weight", "late.weight", "late.bias"}
    sync.load_state_dict(state)
    sync.detach()


def test_tied_weights_travel_once_and_unfrozen_ones_from_then_on() -> None:
    run_ranks(_tied_and_unfrozen, world_size=2, timeout_seconds=60)


def _buffers(context: RankContext) -> None:
    """Statistics of batches are averaged, only where they change; what does not change is not sent."""
    model = made(torch.float64)
    model.register_buffer("big", torch.randn(50_000))
    model.register_buffer(
        "short", torch.full((3,), 1.0 + context.rank).to(torch.float8_e4m3fn)
    )  # torch cannot add these
    big = model.big.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = attached(model, local_sgd(every=2), optimizer)
    step(model, optimizer, context.rank, 0)
    sent = sync.stats()["comm/bytes_sent"]
    alone = everywhere(model.norm.running_mean)
    with torch.no_grad():
        optimizer.step()  # the round: nothing else has changed
    torch.testing.assert_close(model.norm.running_mean, torch.stack(alone).mean(0), rtol=1e-14, atol=1e-16)
    assert torch.equal(model.big, everywhere(big)[0])
    assert model.short.float().tolist() == [1.0] * 3, "as on rank 0"
    assert sync.stats()["comm/bytes_sent"] - sent < 60_000, "the big buffer alone has 200,000 bytes"
    sync.detach()


def test_buffers_that_change_are_averaged() -> None:
    run_ranks(_buffers, world_size=2, timeout_seconds=60)


def _overflow(context: RankContext, delay: int) -> None:
    """The parameters of one rank become infinite: it takes the anchors, and all go on."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sync: Any = attached(model, diloco(every=4, delay=delay, mix=0.5), optimizer)

    def made_step(is_bad: bool) -> bool:
        for flight in sync._rounds._flights:
            flight.future.wait() if flight.future is not None else None  # the mean is there long before it lands
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        if is_bad and context.rank == 1:
            model.weight.grad.fill_(float("inf"))
        optimizer.step()
        return bool(model.weight.isfinite().all())

    finite = [made_step(is_bad=number == 3) for number in range(14)]
    assert all(found for number, found in enumerate(finite) if not 3 <= number < 3 + delay)
    assert sync.stats()["outer/refused"] == 1
    made_step(is_bad=True)
    sync.synchronize()
    assert is_same_on_all_ranks(model)
    assert all(made_step(is_bad=False) for _ in range(5)), "moments are finite again, too"
    assert sync.stats()["outer/refused"] == 2
    sync.detach()


@pytest.mark.parametrize("delay", [0, 2])
def test_a_rank_whose_parameters_overflowed_takes_the_anchors(delay: int) -> None:
    run_ranks(_overflow, delay, world_size=2, timeout_seconds=60)


# --- failures, and ends


def _lost(context: RankContext, delay: int) -> str:
    """Rank 1 leaves in the middle of a round: the first to learn it names it, all learn it once and can end."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attached(model, diloco(every=4, fragments=2, delay=delay), optimizer, timeout=timedelta(seconds=20))
    for number in range(5):
        step(model, optimizer, context.rank, number)
    if context.rank == 1:
        os._exit(0)

    def go_on() -> None:
        for number in range(5, 5 + 4 * 4):
            step(model, optimizer, context.rank, number)

    with pytest.raises(ThinwireError, match=f"rank [1{2 - context.rank}]") as lost:  # or who hung up because of it
        go_on()
    assert isinstance(lost.value, LostPeerError)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ThinwireError, match="stopped after an earlier failure"):
        sync.synchronize()
    sync.detach()
    sync.detach()
    assert "detached" in repr(sync)
    step(model, optimizer, context.rank, 0)
    return str(lost.value)


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_rank_that_leaves_is_named_once_and_training_can_end(delay: int) -> None:
    outcomes = run_ranks(_lost, delay, world_size=3, timeout_seconds=60, check=False)
    assert [outcome.error for outcome in outcomes if outcome.rank != 1] == [None, None]
    assert any("rank 1" in outcome.value for outcome in outcomes if outcome.rank != 1), "who is first to learn"


def _disagree(context: RankContext) -> None:
    """Recipes must be the same everywhere; who differs learns it, and the next attach works."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match="every="):
        attached(model, local_sgd(every=2 + context.rank), optimizer)
    with pytest.raises((ValueError, MismatchError), match="no parameter of the model"):
        attached(model, local_sgd(), torch.optim.SGD(made().parameters() if context.rank else model.parameters(), 0.1))
    torch.use_deterministic_algorithms(context.rank == 1)
    with pytest.raises(MismatchError, match="use_deterministic_algorithms"):
        attached(model, local_sgd(every=2), optimizer)
    torch.use_deterministic_algorithms(False)
    sync = attached(model, local_sgd(every=2), optimizer)
    with pytest.raises(ValueError, match="runs already"):
        attached(model, local_sgd(every=2), optimizer)
    for number in range(2):
        step(model, optimizer, context.rank, number)
    assert is_same_on_all_ranks(model)
    sync.detach()


def test_ranks_that_disagree_all_learn_it() -> None:
    run_ranks(_disagree, world_size=2, timeout_seconds=60)


def _freed(context: RankContext) -> None:
    """Nothing is left of a model that nobody references, nor of a detached one."""
    threads = {thread.name for thread in threading.enumerate()}
    model, other = made(), made()
    optimizer, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    sync, another = attached(model, STREAMING, optimizer), attached(other, local_sgd(every=2), second)
    for number in range(4):
        step(model, optimizer, context.rank, number)
        step(other, second, context.rank, number)
    copied = copy.deepcopy((model, optimizer))
    assert not copied[1]._optimizer_step_post_hooks
    gone = weakref.ref(model), weakref.ref(sync)
    another.detach()
    assert not second._optimizer_step_post_hooks
    assert not second._optimizer_step_pre_hooks
    del model, sync
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    for parameter in other.parameters():
        assert parameter._backward_hooks is None
    step_alone = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in step_alone:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # nobody waits for anybody
    deadline = time.monotonic() + 30
    while {thread.name for thread in threading.enumerate() if thread.is_alive()} - threads > {"thinwire-watch"}:
        assert time.monotonic() < deadline, "the threads of both lanes end"
        time.sleep(0.01)


def test_a_model_that_nobody_needs_is_freed_and_its_lane_ends() -> None:
    run_ranks(_freed, world_size=2, timeout_seconds=60)


def _evaluation(context: RankContext, recipe: OuterRecipe) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attached(model, recipe, optimizer)
    with sync.global_parameters(), pytest.raises(ThinwireError, match="inside of global_parameters"):
        step(model, optimizer, context.rank, 0)
    step(model, optimizer, context.rank, 0)
    own, state = parameters(model), copy.deepcopy(sync.state_dict())
    if context.rank == 0:  # not a collective call
        with sync.global_parameters():
            assert torch.is_grad_enabled()
            saved = parameters(model)
            with sync.global_parameters():  # as in a trainer that saves within a validation
                pass
            assert not torch.equal(parameters(model), own)
            for name, call in (
                ("a step", lambda: step(model, optimizer, 0, 1)),
                ("synchronize", sync.synchronize),
                ("load_state_dict", lambda: sync.load_state_dict(state)),
                ("detach", sync.detach),
            ):
                with pytest.raises(ThinwireError, match=rf"^{name}\S* inside of global_parameters"):
                    call()
        assert not torch.equal(saved, own)
        assert torch.equal(parameters(model), own), "its own parameters are back"
    sync.detach()


@pytest.mark.parametrize("recipe", [local_sgd(every=10), shadow_sync("average")], ids=["stepped", "background"])
def test_anchors_for_evaluation_need_no_other_rank(recipe: OuterRecipe) -> None:
    run_ranks(_evaluation, recipe, world_size=2, timeout_seconds=60)


def _gathered(context: RankContext) -> None:
    """One file for all ranks; and states of others are refused with nothing changed."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attached(model, STREAMING, optimizer, dense=top_k(0.1))
    for number in range(7):
        step(model, optimizer, context.rank, number)
    written = [sync.gathered().state_dict()]
    dist.broadcast_object_list(written, src=0)
    before = copy.deepcopy((model.state_dict(), sync.state_dict()))
    ends = []
    for _ in range(2):
        for number in range(7, 15):
            step(model, optimizer, context.rank, number)
        ends.append(parameters(model))
        model.load_state_dict(before[0])
        sync.gathered().load_state_dict(written[0])
    assert torch.equal(*ends)
    for change, message in (
        ({"version": 0}, "no state of an outer loop"),
        ({"recipe": "another"}, "saved with another"),
        ({"parameters": ["x"]}, "other parameters"),
        ({"anchors": {"table.weight": torch.ones(2)}}, "anchors of 'table.weight'"),
    ):
        with pytest.raises(ValueError, match=message):
            sync.load_state_dict({**before[1], **change})
    with pytest.raises(ValueError, match="no state of an outer loop"):
        sync.load_state_dict({"version": 3, "steps": 1, "parameters": []})
    sync.detach()


def test_states_of_all_ranks_in_one_file() -> None:
    run_ranks(_gathered, world_size=2, timeout_seconds=60)


def _gathered_in_the_background(context: RankContext) -> None:
    """What is in the model before is of a run that blew up, say: no round may copy it."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync: Any = attached(model, shadow_sync("average"), optimizer)
    step(model, optimizer, context.rank, 0)
    written = [sync.gathered().state_dict()]
    dist.broadcast_object_list(written, src=0)
    saved, begun, thread = parameters(model), [], threading.get_ident()
    begin = sync._rounds._begin

    def watched() -> None:
        if threading.get_ident() == thread:
            begun.append(parameters(model))
        begin()

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    sync._rounds._begin = watched
    sync.gathered().load_state_dict(written[0])
    assert len(begun) == 1
    assert torch.equal(begun[0], saved), "rounds begin when the rank's own parameters are back"
    sync.detach()


def test_rounds_in_the_background_begin_again_after_a_state_is_whole() -> None:
    run_ranks(_gathered_in_the_background, world_size=2, timeout_seconds=60)


def _fewer_ranks(context: RankContext, options: dict[str, Any]) -> None:
    """Another number of ranks goes on from the anchors, with all that compressors owe."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attached(model, diloco(every=2), optimizer, **options)
    for number in range(5):
        step(model, optimizer, context.rank, number)
    written, saved = [sync.gathered().state_dict()], copy.deepcopy(sync.state_dict())
    dist.broadcast_object_list(written, 0)
    sync.detach()
    alone = dist.new_group([context.rank], use_local_synchronization=True)
    sync = attached(model, diloco(every=2), optimizer, process_group=alone, **options)
    sync.gathered().load_state_dict(written[0])
    with sync.global_parameters():
        for name, anchor in saved["anchors"].items():
            assert torch.equal(model.get_parameter(name).detach(), anchor)
    for number in range(5, 8):
        step(model, optimizer, context.rank, number)
    sync.detach()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dense": error_feedback(top_k(0.1))}], ids=["exact", "compressed"])
def test_states_of_all_ranks_fit_another_number_of_ranks(options: dict[str, Any]) -> None:
    run_ranks(_fewer_ranks, options, world_size=2, timeout_seconds=60)


def _loads_too_late(context: RankContext, recipe: OuterRecipe) -> None:
    """A model that is loaded after attach would be taken for training; what another optimizer stepped is training."""
    model = made()
    optimizer, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.last))
    sync = attached(model, recipe, optimizer)
    other.register_step_post_hook(lambda *_: optimizer.step())
    step(model, other, context.rank, 0)
    sync.detach()
    sync = attached(model, recipe, optimizer)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    with pytest.raises(ValueError, match="was written to between attach and the first step"):
        step(model, optimizer, context.rank, 1)
    with contextlib.suppress(ThinwireError):  # rounds in the background heard of it
        sync.detach()


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", [diloco(every=4), shadow_sync()], ids=["diloco", "shadow"])
def test_a_model_that_is_loaded_after_attach_is_refused(recipe: OuterRecipe) -> None:
    run_ranks(_loads_too_late, recipe, world_size=2, timeout_seconds=60)


def _writes_to_itself(context: RankContext, recipe: OuterRecipe) -> None:
    """As nn.Embedding(max_norm=) does, a normed prototype, or SAM: here on one rank only, in the first step."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = attached(model, recipe, optimizer)
    before = parameters(model)

    def norm(module: nn.Module, args: object) -> None:
        model.first.weight.data.mul_(0.5)

    own = model.first.register_forward_pre_hook(norm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if context.rank:
            own.remove()
        step(model, optimizer, context.rank, 0)
    told = [
        str(one.message) for one in caught if "was written to between attach and the first step" in str(one.message)
    ]
    assert len(told) == (context.rank == 0)
    own.remove()
    sync.synchronize()
    assert is_same_on_all_ranks(model)
    assert not torch.equal(parameters(model), before)
    sync.detach()


@pytest.mark.parametrize("recipe", [local_sgd(every=4), shadow_sync()], ids=["local_sgd", "shadow"])
def test_a_model_that_writes_to_its_own_parameters_starts(recipe: OuterRecipe) -> None:
    run_ranks(_writes_to_itself, recipe, world_size=2, timeout_seconds=60)


def _loads_on_one_rank(context: RankContext) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attached(model, diloco(every=2), optimizer)
    if context.rank == 1:
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})

    def train() -> None:
        for number in range(2):
            step(model, optimizer, context.rank, number)

    with pytest.raises((ValueError, LostPeerError), match=r"parameter '.*' was written to between attach") as caught:
        train()
    assert isinstance(caught.value, ValueError) == (context.rank == 1)
    assert getattr(caught.value, "rank", 1) == 1
    with contextlib.suppress(ThinwireError):
        sync.detach()


def test_a_model_that_is_loaded_on_one_rank_is_an_error_on_all() -> None:
    run_ranks(_loads_on_one_rank, world_size=2, timeout_seconds=60)


def _loads_behind_flights(context: RankContext) -> None:
    """A state is loaded while a round is on its way, which writes to memories until it is done."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attached(model, diloco(every=2, delay=2), optimizer, dense=error_feedback(top_k(0.1)))
    for number in range(3):
        step(model, optimizer, context.rank, number)
    saved = copy.deepcopy((model.state_dict(), sync.state_dict()))

    def go_on() -> Tensor:
        for number in range(3, 9):
            step(model, optimizer, context.rank, number)
        return parameters(model)

    expected = go_on()
    release = threading.Event()
    sync._lane.submit(lambda lane: release.wait(30))
    step(model, optimizer, context.rank, 9)  # whose launch waits behind that
    timer = threading.Timer(0.3, release.set)
    timer.start()
    model.load_state_dict(saved[0])
    sync.load_state_dict(saved[1])
    assert torch.equal(go_on(), expected)
    timer.join()
    sync.detach()


def test_a_state_is_loaded_after_what_is_in_flight() -> None:
    run_ranks(_loads_behind_flights, world_size=2, timeout_seconds=60)
