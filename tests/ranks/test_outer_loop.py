"""Outer loops in step with training, on real ranks: laws of the algorithms, resumed runs, and what training does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.compress import error_feedback, qsgd, top_k
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import OuterLoop, OuterRecipe, diloco, local_sgd

STREAMING = diloco(every=6, fragments=3, delay=2, mix=0.5, start_step=2)


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
    sync = thinwire.attach(model, outer=recipe, optimizer=optimizer, **options)
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
    for number in range(20):
        step(model, optimizer, context.rank, number)
        step(ddp, other, context.rank, number)
    torch.testing.assert_close(parameters(model), parameters(reference), rtol=1e-12, atol=1e-14)
    assert sync.stats()["outer/rounds"] == 20
    assert sync.stats()["outer/ranks"] == context.world_size
    sync.detach()

    plain = trained(context, local_sgd(every=3), 10)
    assert torch.equal(plain, trained(context, diloco(every=3, lr=1.0, momentum=0.0, nesterov=False), 10))
    assert not torch.equal(plain, trained(context, local_sgd(every=4), 10))
    whole = trained(context, diloco(every=4), 11)
    assert torch.equal(whole, trained(context, diloco(every=4, fragments=1, delay=0, mix=1.0), 11))
    post_local = trained(context, local_sgd(every=4, start_step=10), 10)
    assert torch.equal(post_local, trained(context, local_sgd(every=1), 10))


@pytest.mark.parametrize("world_size", [2, 3])
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


@pytest.mark.parametrize(
    ("recipe", "options", "dtype"),
    [
        (STREAMING, {}, torch.float32),
        (STREAMING, {"compress": error_feedback(top_k(0.05, values=qsgd(2)), decay=0.95)}, torch.float32),
        (diloco(every=5), {"compress": top_k(0.1), "scheme": "zen"}, torch.bfloat16),
        (local_sgd(every=5), {}, torch.float64),
    ],
    ids=["streaming", "sparse", "bf16", "fp64"],
)
def test_anchors_have_the_same_bits_on_all_ranks(
    recipe: OuterRecipe, options: dict[str, Any], dtype: torch.dtype
) -> None:
    run_ranks(_anchors_agree, recipe, options, dtype, world_size=4 if dtype == torch.float64 else 2, timeout_seconds=60)


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


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (STREAMING, {}),
        (diloco(every=4, fragments=2, delay=4, mix=0.7), {"compress": top_k(0.1, values=qsgd(4))}),
        (local_sgd(every=3, start_step=2), {"compress": error_feedback(top_k(0.1))}),
    ],
    ids=["streaming", "compressed", "local"],
)
def test_a_run_is_resumed_bitwise_from_each_step(recipe: OuterRecipe, options: dict[str, Any]) -> None:
    run_ranks(_resumes, recipe, options, 13, world_size=2, timeout_seconds=90)
