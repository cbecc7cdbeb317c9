"""Steps on any number of ranks: one digest, whatever befalls them."""

from __future__ import annotations

import copy
import itertools
import random
import signal
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.reproducible.reproduced import JOBS, Fate, Made, alone, on_ranks, with_fates
from thinwire import reproducible
from thinwire.errors import ThinwireError
from thinwire.reproducible.steps import deal

SLOW = pytest.mark.slow, pytest.mark.timeout(300)


def finished(found: list[Any], dead: set[int] = frozenset()) -> list[Made]:
    """What those that live returned; others were killed."""
    for rank, outcome in enumerate(found):
        assert isinstance(outcome, Made) or (rank in dead and outcome.exit_code == -signal.SIGKILL), outcome
    return [outcome for outcome in found if isinstance(outcome, Made)]


@given(st.integers(1, 40), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12))
def test_each_micro_batch_is_dealt_once(count: int, seconds: list[float]) -> None:
    shares = deal(range(count), seconds)
    assert sorted(index for share in shares for index in share) == list(range(count))
    ends = [len(share) * each for share, each in zip(shares, seconds, strict=True)]
    assert max(ends) <= min(end + each for end, each in zip(ends, seconds, strict=True)) + 1e-9, (
        "nobody would be sooner"
    )


def test_one_process_needs_no_process_group() -> None:
    """And the mean is that of all micro-batches, each with generators of its own."""
    model = nn.Linear(6, 3)
    start = [entry.detach().clone() for entry in model.parameters()]
    steps = reproducible.Steps(model, micro_batches=5, steps=1, seed=3)
    draws, gradients = [], []
    for step in steps:
        for index in step:
            inputs = torch.randn(4, 6)
            draws.append((index, inputs))
            model(inputs).square().mean().backward()
            gradients.append([entry.grad.double() for entry in model.parameters()])
        mean = [(sum(parts) / 5).float() for parts in zip(*gradients, strict=True)]
        assert all(torch.equal(entry.grad, one) for entry, one in zip(model.parameters(), mean, strict=True))
    assert [index for index, _ in draws] == list(range(5))
    assert len({float(inputs.sum()) for _, inputs in draws}) == 5
    for entry, before in zip(model.parameters(), start, strict=True):
        assert torch.equal(entry, before)
    again = []
    for step in reproducible.Steps(model, 5, 1, seed=3):
        for _ in step:
            again.append(torch.randn(4, 6))
            model(again[-1]).sum().backward()
    assert all(torch.equal(inputs, one) for (_, inputs), one in zip(draws, again, strict=True))


@pytest.mark.ranks
def test_three_ranks_make_what_one_makes() -> None:
    one = alone("transformer", steps=2)
    found = on_ranks("transformer", [Fate(rank, slow=0.01 * rank, seed=rank) for rank in range(3)], steps=2)
    assert {made.digest for made in found} == {one.digest}
    assert sorted(call for made in found for call in made.calls) == sorted(one.calls), "each once"


SIZES = (3, 8), (2, 5)
"""Each job on two numbers of ranks, by turns: each number has three jobs."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("job", "world_size"),
    [pytest.param(job, size, marks=SLOW) for at, job in enumerate(JOBS) for size in SIZES[at % len(SIZES)]],
)
def test_any_number_of_ranks_makes_what_one_makes(job: str, world_size: int) -> None:
    if job == "bert":
        pytest.importorskip("transformers")
    fates = [Fate(rank, slow=0.02 * (rank % 3), seed=rank) for rank in range(world_size)]
    found = on_ranks(job, fates, steps=6, micro_batches=7)  # 8 ranks have one without any
    assert {made.digest for made in found} == {alone(job, steps=6, micro_batches=7).digest}


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_a_killed_rank_leaves_its_share_to_the_others() -> None:
    fates = [Fate(0, slow=0.01), Fate(1, slow=0.01, dies_at=(0, 1)), Fate(2, slow=0.01)]
    found = finished(with_fates("images", fates, steps=3, micro_batches=9), {1})
    one = alone("images", steps=3, micro_batches=9)
    assert {made.digest for made in found} == {one.digest}
    assert len(found) == 2
    kept = [call for made in found for call in made.calls]
    assert len(kept) == len(set(kept)), "nobody makes again what is there"
    assert set(one.calls) == set(kept)


@pytest.mark.ranks
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=SLOW) for seed in range(8)])
def test_ranks_are_killed_and_frozen_anywhere(seed: int) -> None:
    """Some come back; the digest is that of one rank."""
    draw = random.Random(seed)
    fates = [Fate(rank, slow=0.04) for rank in range(draw.choice([3, 4, 5]))]
    dead = set()
    for rank in draw.sample(range(len(fates)), draw.choice([1, 2])):
        if draw.random() < 0.7:
            fates[rank].dies_after = draw.uniform(1.0, 6.0)
            dead.add(rank)
        else:
            fates[rank].stops_at = draw.randrange(2, 20), draw.randrange(3)
    for rank in sorted(dead):
        fates.append(Fate(rank, waits=draw.uniform(6.0, 9.0), slow=0.04, seed=9))
    job = draw.choice(["transformer", "images", "recurrent"])
    found = finished(with_fates(job, fates, steps=40, micro_batches=10, seconds=200.0), dead)
    assert {made.digest for made in found} == {alone(job, steps=40, micro_batches=10).digest}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_comes_back_takes_parameters_and_optimizer() -> None:
    fates = [
        Fate(0, slow=0.05),
        Fate(1, slow=0.05),
        Fate(2, slow=0.05, dies_at=(2, 0)),
        Fate(2, waits=1.5, replaces=True, slow=0.05, seed=9),
    ]
    found = finished(with_fates("transformer", fates, steps=60), {2})
    assert {made.digest for made in found} == {alone("transformer", steps=60).digest}
    joined = found[-1].calls
    assert 2 < joined[0][0] < 60


@pytest.mark.ranks
@pytest.mark.slow
def test_a_silent_fault_is_found_and_its_rank_named() -> None:
    found = with_fates("faulty", [Fate(rank) for rank in range(3)], steps=12, check_every=1)
    for outcome in found:
        assert "its gradients have other bits on rank 2" in outcome.error
    assert {made.digest for made in finished(with_fates("images", [Fate(0), Fate(1)], check_every=1))} == {
        alone("images").digest
    }


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_compute_otherwise_are_refused_at_the_start() -> None:
    found = with_fates("threads", [Fate(0), Fate(1)])
    assert any("arithmetic" in str(outcome.error) or "threads" in str(outcome.error) for outcome in found)


# --- what is refused


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.rest(inputs)


def test_state_that_forward_writes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"1 is a BatchNorm1d.*GroupNorm"):
        reproducible.Steps(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 2, 1)
    reproducible.Steps(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), 2, 1)
    reproducible.Steps(nn.BatchNorm1d(4, track_running_stats=False), 2, 1)
    model = Counting()

    def train() -> None:
        for step in reproducible.Steps(model, 2, 1):
            for _ in step:
                model(torch.randn(2, 3)).sum().backward()

    with pytest.raises(ValueError, match="buffer calls is written by forward"):
        train()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": range(0, 10, 2)}, "the stride of steps is 2"),
        ({"check_every": 0}, "check_every is 0"),
        ({"threads": True}, "threads is True"),
        ({"steps": range(3, 2)}, "the first of steps is 3: pass a number from 0 to 2"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        reproducible.Steps(nn.Linear(1, 1), **{"micro_batches": 2, "steps": 2, **options})


def test_a_step_is_all_or_nothing() -> None:
    model = nn.Linear(2, 1)

    def leave() -> None:
        for step in reproducible.Steps(model, 3, 2):
            next(iter(step))

    with pytest.raises(ThinwireError, match="step 0 was left before its end"):
        leave()
    for step in reproducible.Steps(model, 3, 1):
        for _ in step:
            model(torch.randn(3, 2)).sum().backward()
        with pytest.raises(ThinwireError, match="step 0 is complete"):
            list(step)


def test_gradients_that_are_made_behind_the_loop_are_refused() -> None:
    for step in reproducible.Steps(nn.Linear(2, 1), 3, 1):
        with pytest.raises(ValueError, match=r"step 0 has no gradients.*list"):
            list(step)
        break


# --- leaving, resuming, freezing


class Trained:
    """A small training in one process, which a test may leave anywhere."""

    def __init__(self, steps: int = 4, seed: int = 0, first: int = 0, state: Any = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        if state is not None:
            self.model.load_state_dict(state[0])
            self.optimizer.load_state_dict(state[1])
        self.steps = reproducible.Steps(self.model, 3, range(first, steps), optimizer=self.optimizer)

    def make(self) -> None:
        (self.model(torch.randn(4, 6)).square().mean() / 4).backward()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: Any = None) -> Trained:
        for step in self.steps if steps is None else steps:
            for _ in step:
                self.make()
            self.end()
        return self

    def digest(self) -> str:
        return reproducible.digest(self.model)


def test_a_micro_batch_that_an_exception_left_is_made_again() -> None:
    """It was lost, and the mean was that of the others, without a word."""
    left, flaky = Trained(), [2, 5, 6]
    for step in left.steps:
        while True:
            try:
                for index in step:
                    left.make()
                    if 3 * step.number + index in flaky:
                        flaky.remove(3 * step.number + index)
                        raise OSError("a file that is read again")
                break
            except OSError:
                continue
        left.end()
    assert not flaky
    assert left.digest() == Trained().run().digest()


def test_another_loop_goes_on_with_the_next_step() -> None:
    """As epochs of ``islice`` do, and ``break``; after the last step there is nothing."""
    epochs = Trained()
    epochs.run(itertools.islice(epochs.steps, 1)).run(itertools.islice(epochs.steps, 2)).run()
    assert epochs.digest() == Trained().run().digest()
    assert list(epochs.steps) == []


def test_a_checkpoint_is_resumed_at_its_step() -> None:
    half = Trained(steps=2).run()
    state = copy.deepcopy((half.model.state_dict(), half.optimizer.state_dict()))
    assert Trained(first=2, seed=7, state=state).run().digest() == Trained().run().digest()


def test_draws_before_the_micro_batches_follow_the_step() -> None:
    def draws(seed: int) -> list[float]:
        torch.manual_seed(seed)
        model, drawn = nn.Linear(2, 1), []
        for step in reproducible.Steps(model, 2, 3):
            drawn.append(float(torch.rand(())))
            for _ in step:
                model(torch.randn(3, 2)).sum().backward()
            drawn.append(float(torch.rand(())))
        return drawn

    assert draws(1) == draws(2)
    assert len(set(draws(1))) == 6


def test_what_is_unfrozen_before_the_micro_batches_is_summed() -> None:
    """Its gradient was that of this rank's micro-batches, added up by autograd."""
    model, gradients = nn.Linear(3, 2), []
    model.bias.requires_grad_(False)
    for step in reproducible.Steps(model, 3, 2):
        model.bias.requires_grad_(step.number == 1)
        for _ in step:
            model(torch.randn(4, 3)).square().mean().backward()
            gradients.append(model.bias.grad)
        assert (model.bias.grad is None) == (step.number == 0)
    assert torch.equal(model.bias.grad, (sum(one.double() for one in gradients[3:]) / 3).float())


def test_threads_stay_as_they_were_set() -> None:
    model, threads = nn.Linear(2, 1), torch.get_num_threads()
    try:
        for step in reproducible.Steps(model, 2, 1, threads=1):
            for _ in step:
                assert torch.get_num_threads() == 1
                model(torch.randn(3, 2)).sum().backward()
                torch.set_num_threads(2)
    finally:
        torch.set_num_threads(threads)


def test_each_trained_parameter_is_in_an_optimizer() -> None:
    """Or ranks that join would not get its state."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizers = [torch.optim.Adam(layer.parameters()) for layer in model]
    with pytest.raises(ValueError, match=r"parameter 1.weight is in none of the optimizers.*optimizer=\[one, other\]"):
        reproducible.Steps(model, 2, 1, optimizer=optimizers[0])
    reproducible.Steps(model, 2, 1, optimizer=optimizers)
    model[1].requires_grad_(False)
    reproducible.Steps(model, 2, 1, optimizer=optimizers[0])


def test_one_of_several_processes_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"one of 4 processes.*init_process_group"):
        reproducible.Steps(nn.Linear(2, 2), 2, 1)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        reproducible.Steps(nn.ReLU(), 2, 1)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter weight is a Parameter of torch.complex64"):
        reproducible.Steps(nn.Linear(2, 2, dtype=torch.complex64), 2, 1)
