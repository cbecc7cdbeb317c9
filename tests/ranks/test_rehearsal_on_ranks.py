"""A rehearsal on real ranks: seldom, counted, and of no influence on gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine
from thinwire.gradients import exact
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.sync import choose, experience
from thinwire.sync.choose import Point, Rehearsal
from thinwire.sync.experience import Experience
from thinwire.sync.named import name_of

NUM_WORDS, WIDTH, STEPS = 4000, 16, 8
MACHINE = Machine(2e-3, 3e-4, 2e-9, 2e-9, 1e-5, 1e-8, 1e-10, 1e-8, 1e-10, 1e-8, 1e-10)


def _train(context: RankContext, is_rehearsed: bool) -> tuple[torch.Tensor, float, float, float, int]:
    begun: list[int] = []
    original = exact.Rehearsal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "machine", lambda lane: MACHINE)  # two runs that measure may choose differently
        patch.setattr(exact, "LEFT_BYTES", -1)
        patch.setattr(choose, "MIN_BYTES", 1.0 if is_rehearsed else float("inf"))
        patch.setattr(choose, "MAX_SECONDS", float("inf"))
        patch.setattr(choose, "HOPELESS", float("inf"))
        patch.setattr(choose, "FIRST_REGRET", float("inf"))
        patch.setattr(exact, "Rehearsal", lambda points, *rest: begun.append(len(points)) or original(points, *rest))
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Embedding(NUM_WORDS, WIDTH, sparse=True))
        sync = thinwire.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(context.rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            words = torch.randint(NUM_WORDS, (200,), generator=generator)
            model(words).square().sum().backward()
            optimizer.step()
        stats = sync.stats()
        booked = sum(row["total_bytes"] for row in sync.table())
        sync.detach()
    assert stats["comm/rehearsals"] == len(begun) <= 3
    weight = model.module.weight.detach().clone()
    return weight, stats["comm/bytes_sent"], booked, stats["comm/setup_bytes"], len(begun)


def test_a_rehearsal_changes_no_bit_and_all_bytes_are_counted() -> None:
    tried = [outcome.value for outcome in run_ranks(_train, True, world_size=3, timeout_seconds=60)]
    untried = [outcome.value for outcome in run_ranks(_train, False, world_size=3, timeout_seconds=60)]
    for (mine, counted, booked, setup, begun), (other, *_, none) in zip(tried, untried, strict=True):
        assert torch.equal(mine, other), "schemes that are rehearsed add in the same order"
        assert counted == booked
        assert 0 < setup <= 2e6
        assert begun > 0
        assert none == 0


def _learn(context: RankContext) -> tuple[set[str], set[str]]:
    """What was tried, and of what there are seconds; what stands stays."""
    decide, original, tried = Experience._decide, exact.Rehearsal, set()

    def decide_once(learned: Experience) -> None:
        if learned.choice is None:
            decide(learned)

    def rehearse(points: list[Point], held: float) -> Rehearsal:
        tried.update(map(name_of, points))
        return original(points, held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "machine", lambda lane: MACHINE)
        patch.setattr(exact, "LEFT_BYTES", -1)
        patch.setattr(choose, "MIN_BYTES", 1.0)
        patch.setattr(experience, "FIRST_REGRET", float("inf"))
        patch.setattr(Experience, "_decide", decide_once)
        patch.setattr(exact, "Rehearsal", rehearse)
        patch.setattr(experience, "is_clearly_torchs", lambda *_: False)  # which would end the rehearsal
        model = DistributedDataParallel(nn.Embedding(NUM_WORDS, WIDTH, sparse=True))
        sync = thinwire.attach(model)
        for _ in range(STEPS):
            model(torch.arange(200)).square().sum().backward()
        (learned,) = sync._gradients.experiences.values()
        sync.detach()
    return tried, set(learned._samples)


def test_every_trial_is_learned_the_last_one_too() -> None:
    for outcome in run_ranks(_learn, world_size=2, timeout_seconds=60):
        tried, known = outcome.value
        assert len(tried) > 1
        assert known >= tried


def _compiles_for_a_while(context: RankContext) -> tuple[torch.Tensor, float]:
    """Rank 0 says at first that it compiles kernels: its seconds tell nothing, and no rank believes others."""
    compiling = [context.rank == 0] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "machine", lambda lane: MACHINE)
        patch.setattr(exact, "LEFT_BYTES", -1)
        patch.setattr(choose, "MIN_BYTES", 1.0)
        patch.setattr(choose, "HOPELESS", float("inf"))
        patch.setattr(choose, "FIRST_REGRET", float("inf"))
        patch.setattr(exact.dispatch, "is_compiling", lambda: bool(compiling and compiling.pop()))
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Embedding(NUM_WORDS, WIDTH, sparse=True))
        sync = thinwire.attach(model)
        for step in range(12):
            model.zero_grad()
            model(torch.arange(200) + 50 * context.rank + step).square().sum().backward()
        rehearsals = sync.stats()["comm/rehearsals"]
        sync.detach()
    assert not compiling
    return model.module.weight.grad.to_dense(), rehearsals


def test_ranks_that_compile_put_trials_off_together() -> None:
    seen = [outcome.value for outcome in run_ranks(_compiles_for_a_while, world_size=3, timeout_seconds=60)]
    assert all(torch.equal(gradient, seen[0][0]) and rehearsals == seen[0][1] > 0 for gradient, rehearsals in seen)
