"""The references of the outer loops, held to what their papers say of each other and to torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.outer.recipes.outer_references import (
    Params,
    Regression,
    Sgd,
    ShadowRound,
    bmuf,
    diloco,
    easgd,
    local_sgd,
    model_averaging,
    replicas_of,
    shadow_sync,
    sparse_loco,
    streaming_diloco,
    top_k,
)

PROBLEM = Regression()
NAMES = tuple(PROBLEM.initial())
INNER = partial(Sgd, 0.05, 0.9)
PLAIN = partial(Sgd, 0.05)


def assert_close(found: Params, expected: Params) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-14)


def assert_differ(found: Params, other: Params) -> None:
    assert any(np.abs(found[name] - other[name]).max() > 1e-6 for name in found)


def module_of(params: Params) -> nn.Module:
    inputs, hidden, outputs = PROBLEM.sizes
    module = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return module


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_training_of_a_replica_is_that_of_torch(momentum: float, nesterov: bool) -> None:
    (replica,) = replicas_of(PROBLEM, 1, partial(Sgd, 0.05, momentum, nesterov))
    module = module_of(replica.params)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum, nesterov=nesterov)
    for step in range(1, 21):
        inputs, targets = map(torch.from_numpy, PROBLEM.data(0, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()
        replica.step()
    assert_close({name: entry.detach().numpy() for name, entry in module.named_parameters()}, replica.params)


def test_a_mean_after_every_step_is_training_by_the_mean_gradient() -> None:
    params, optimizer = PROBLEM.initial(), PLAIN()
    for step in range(1, 16):
        gradients = [PROBLEM.gradient(rank, step, params) for rank in range(3)]
        optimizer.step(params, {name: sum(entry[name] for entry in gradients) / 3 for name in params})
    for found in (
        *local_sgd(PROBLEM, 3, 15, PLAIN, every=1),
        *local_sgd(PROBLEM, 3, 15, PLAIN, every=8, start_step=15),
    ):
        assert_close(found, params)


def test_a_start_step_changes_when_replicas_meet() -> None:
    replicas = local_sgd(PROBLEM, 2, 12, INNER, every=4, start_step=4)
    assert_close(replicas[0], replicas[1])
    assert_differ(replicas[0], local_sgd(PROBLEM, 2, 12, INNER, every=4)[0])


@pytest.mark.parametrize("steps", [24, 27])
def test_diloco_without_momentum_is_local_sgd(steps: int) -> None:
    expected = local_sgd(PROBLEM, 3, steps, INNER, every=8)
    for found, params in zip(diloco(PROBLEM, 3, steps, INNER, Sgd(1.0), every=8), expected, strict=True):
        assert_close(found, params)
    assert_differ(diloco(PROBLEM, 3, steps, INNER, Sgd(0.7, 0.9, True), every=8)[0], expected[0])


def test_one_fragment_without_delay_is_diloco() -> None:
    outer = partial(Sgd, 0.7, 0.9, True)
    expected = diloco(PROBLEM, 2, 30, INNER, outer(), every=6)
    streamed = streaming_diloco(PROBLEM, 2, 30, INNER, outer, 6, [NAMES], delay=0, alpha=0.0)
    for found, params in zip(streamed, expected, strict=True):
        assert_close(found, params)


def test_alpha_of_one_leaves_replicas_alone() -> None:
    (alone, _) = local_sgd(PROBLEM, 2, 20, INNER, every=100)
    streamed = streaming_diloco(PROBLEM, 2, 20, INNER, partial(Sgd, 0.7), 6, [NAMES[:2], NAMES[2:]], 2, alpha=1.0)
    assert_close(streamed[0], alone)


def test_sending_all_elements_leaves_no_error() -> None:
    sizes = {name: value.size for name, value in PROBLEM.initial().items()}
    expected = diloco(PROBLEM, 2, 24, INNER, Sgd(0.8), every=6)
    for found, params in zip(sparse_loco(PROBLEM, 2, 24, INNER, 6, 0.8, 0.9, sizes), expected, strict=True):
        assert_close(found, params)


def test_the_largest_elements_are_kept() -> None:
    np.testing.assert_array_equal(top_k(np.array([[3.0, -5.0], [0.5, 4.0]]), 2), [[0.0, -5.0], [0.0, 4.0]])


def at_once(steps: int, every: int, ranks: int) -> list[ShadowRound]:
    return [ShadowRound((step,) * ranks, (step,) * ranks) for step in range(every, steps + 1, every)]


def test_rounds_at_once_are_those_in_step_with_training() -> None:
    rounds = at_once(24, 4, 3)
    averaged, center = shadow_sync(PROBLEM, 3, [24] * 3, INNER, model_averaging(), 1.0, rounds)
    for found, params in zip(averaged, local_sgd(PROBLEM, 3, 24, INNER, every=4), strict=True):
        assert_close(found, params)
        assert_close(found, center)
    filtered, _ = shadow_sync(PROBLEM, 3, [24] * 3, INNER, bmuf(0.9, 0.7, nesterov=True), 1.0, rounds)
    for found, params in zip(filtered, diloco(PROBLEM, 3, 24, INNER, Sgd(0.7, 0.9, True), 4), strict=True):
        assert_close(found, params)


def test_bmuf_without_momentum_is_averaging_and_easgd_at_once_too() -> None:
    rounds = [ShadowRound((3, 2), (5, 3)), ShadowRound((7, 6), (8, 6)), ShadowRound((12, 9), (14, 10))]
    expected, center = shadow_sync(PROBLEM, 2, [16, 11], INNER, model_averaging(), 0.4, rounds)
    for update in (bmuf(0.0, 1.0), easgd(1.0)):
        found, other = shadow_sync(PROBLEM, 2, [16, 11], INNER, update, 0.4, rounds)
        assert_close(other, center)
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs)
    assert_differ(shadow_sync(PROBLEM, 2, [16, 11], INNER, easgd(0.5), 0.4, rounds)[1], center)


def test_easgd_is_its_papers_equation() -> None:
    """Zhang et al.'s equation 5, with the pull to the new center as ShadowSync has it."""
    replicas, center = replicas_of(PROBLEM, 3, PLAIN), PROBLEM.initial()
    moving_rate, pull = 0.3, 0.2
    for _ in range(10):
        for replica in replicas:
            replica.step()
        pulls = {name: sum(replica.params[name] - center[name] for replica in replicas) for name in center}
        center = {name: center[name] + moving_rate * pulls[name] for name in center}
        for replica in replicas:
            replica.params = {name: (1 - pull) * replica.params[name] + pull * center[name] for name in center}
    found, other = shadow_sync(PROBLEM, 3, [10] * 3, PLAIN, easgd(3 * moving_rate), pull, at_once(10, 1, 3))
    assert_close(other, center)
    for mine, replica in zip(found, replicas, strict=True):
        assert_close(mine, replica.params)


def test_a_replica_that_made_no_steps_is_pulled_and_counts_nothing() -> None:
    rounds = [ShadowRound((4, 0), (5, 1))]
    (fast, _), center = shadow_sync(PROBLEM, 2, [4, 1], PLAIN, model_averaging(), 1.0, rounds)
    assert_close(center, fast)
    (_, slow), _ = shadow_sync(PROBLEM, 2, [4, 1], PLAIN, model_averaging(), 0.5, rounds)
    initial, alone = PROBLEM.initial(), replicas_of(PROBLEM, 2, PLAIN)[1]
    alone.step()
    assert_close(slow, {name: alone.params[name] + 0.5 * (center[name] - initial[name]) for name in center})


def test_no_round_without_steps() -> None:
    rounds = [ShadowRound((0, 0), (1, 1))]
    (first, _), center = shadow_sync(PROBLEM, 2, [5, 5], INNER, bmuf(0.9, 1.0), 0.5, rounds)
    assert_close(center, PROBLEM.initial())
    assert_close(first, local_sgd(PROBLEM, 2, 5, INNER, every=9)[0])
