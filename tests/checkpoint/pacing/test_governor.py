"""How often versions are made follows from what they cost, whatever else the machine does."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.checkpoint.pacing.governor import Governor

BASE = 0.2


def train(
    governors: list[Governor],
    steps: int,
    cost: float,
    span: int = 1,
    noise: float = 0.0,
    first: int = 1,
    base: float = BASE,
) -> tuple[list[int], float]:
    """Steps with a version, and the mean iteration; each version makes ``span`` iterations longer, ``cost`` in all."""
    draw, made, left, lengths = random.Random(0), [], 0, []
    for step in range(first, first + steps):
        if governors[0].is_due(step):
            stride = max(governor.stride for governor in governors)
            for governor in governors:
                governor.agree(step, stride)
                governor.note_begun()
            made.append(step)
            left = span
        lengths.append(base + (cost / span if left else 0.0))
        left = max(0, left - 1)
        pause = draw.choice([0.0] * 19 + [1.0]) if noise else 0.0
        for governor in governors:
            if not left:
                governor.note_sent()
            governor.note_iteration(lengths[-1] + pause + draw.gauss(0.0, noise))
    return made, fmean(lengths)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.001, 2.0), st.integers(1, 4), st.sampled_from([0.02, 0.05, 0.2]), st.integers(1, 3))
def test_the_cost_stays_below_the_share(cost: float, span: int, share: float, every: int) -> None:
    governor = Governor(share, every)
    made, _ = train([governor], 3000, cost, span)
    made, mean = train([governor], 3000, cost, span, first=3001)
    needed = max(1.0, cost / (share * BASE * every))
    assert 3000 * (mean - BASE) <= 3000 * BASE * share * 1.001 + cost, "one more may fall into the window"
    assert all(step % every == 0 for step in made)
    assert (len(made) + 1) * every * needed > 0.5 * 3000 / (1 + span), "and no rarer than it must be"
    assert governor.overhead <= share * 1.001


def test_the_first_versions_are_made_at_every_step() -> None:
    made, _ = train([Governor(0.05)], 20, cost=1.0)
    assert made == list(range(1, 21))


def test_small_states_are_kept_at_nearly_every_step_of_fast_iterations() -> None:
    """8 ms for a version of 5 ms iterations: a share of 5 % would leave 38 steps unprotected."""
    made, _ = train([Governor("auto")], 1000, cost=0.008, base=0.005)
    assert max(later - earlier for earlier, later in pairwise(made)) <= 2
    assert len(made) > 800
    made, _ = train([Governor(0.05)], 1000, cost=0.008, base=0.005)
    assert len(made) < 100
    with pytest.raises(ValueError, match="max_overhead='never': a share"):
        Governor("never")


def test_without_a_limit_every_step_has_one() -> None:
    made, _ = train([Governor(None)], 200, cost=1.0)
    assert made == list(range(1, 201))


def test_cheap_versions_leave_one_step_in_ten_without() -> None:
    """Which is how it is noticed when they become expensive."""
    governor = Governor(0.05)
    train([governor], 400, cost=0.001)
    made, _ = train([governor], 400, cost=0.001, first=401)
    assert len(made) > 360
    _, mean = train([governor], 400, cost=0.1, first=801)
    _, mean = train([governor], 400, cost=0.1, first=1201)
    assert mean <= BASE * 1.05


def test_where_little_is_sent_one_step_in_a_hundred_has_no_version() -> None:
    """What ranks have in common costs a copy beside the training, but it is still measured, and bounded."""
    governor = Governor("auto")
    governor.sends_little = True
    train([governor], 40, cost=0.001)
    made, _ = train([governor], 1000, cost=0.001, first=41)
    assert len(made) >= 985
    assert max(later - earlier for earlier, later in pairwise(made)) == 2
    train([governor], 3000, cost=0.1, first=1041)
    _, mean = train([governor], 400, cost=0.1, first=4041)
    assert mean <= BASE * 1.06


def test_versions_that_become_cheap_are_made_more_often() -> None:
    governor = Governor(0.05)
    train([governor], 1000, cost=0.2)
    assert governor.every >= 20
    train([governor], 1000, cost=0.001, first=1001)
    assert governor.every <= 2


@pytest.mark.parametrize("noise", [0.01, 0.04])
def test_a_noisy_machine_moves_the_interval_little(noise: float) -> None:
    """One iteration in 20 takes 1 s longer, and all others vary; 5 versions' worth of iterations are the truth."""
    governor = Governor(0.05)
    train([governor], 2000, cost=0.05, noise=noise)
    seen = []
    for start in range(2001, 4001, 20):
        train([governor], 20, cost=0.05, noise=noise, first=start)
        seen.append(governor.every)
    assert 3 <= sorted(seen)[len(seen) // 2] <= 9


def test_ranks_that_measure_differently_agree_on_the_greatest() -> None:
    slow, fast = Governor(0.05), Governor(None)
    made, _ = train([fast, slow], 600, cost=0.1)
    assert slow.every == fast.every >= 10
    assert slow.next_step == fast.next_step
    assert len(made) < 150


def test_no_more_steps_than_allowed_lie_between_two() -> None:
    governor = Governor(0.01, every=2, most_steps=10)
    made, _ = train([governor], 600, cost=5.0)
    assert max(b - a for a, b in pairwise(made)) == 10


def test_versions_that_may_be_one_step_old_are_made_at_every_step() -> None:
    """Half of ``max_age_steps=1`` is no step: the interval had no limit, and `Checkpointer.step` raised after 22."""
    made, _ = train([Governor(0.01, every=1, most_steps=1 // 2)], 60, cost=5.0)
    assert made == list(range(1, 61))


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_overhead=0: a share"):
        Governor(0)
