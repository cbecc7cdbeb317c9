"""Laws of `thinwire.tune.trial`: ranks agree, regret is bounded, the best arm wins, a changed world is noticed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.tune.trial import (
    CHECK_STEPS,
    DECISIVE,
    ERROR,
    FIRST_REGRET,
    FIRST_STEPS,
    LOOK_STEPS,
    REGRET_SHARE,
    RENT,
    Gambler,
    Trial,
)

STOCK, ROWS, CODED = "stock", "rows", "coded"
World = Callable[[int, str], float]


def arms(*names: str) -> list[str]:
    return [STOCK, *(names or (ROWS,))]


def play(trial: Trial, steps: int, world: World, waited: float = 0.0) -> list[str]:
    """Return the arm of each step; a step takes as long as ``world`` says."""
    played = []
    for step in range(steps):
        played.append(trial.arm)
        numbers = trial.note(world(step, trial.arm), waited)
        if numbers is not None:
            trial.learn([numbers])
    return played


def noisy(seed: int, noise: float, ranks: int = 1, **seconds: float) -> World:
    """Steps of the given mean on the slowest of some ranks, times noise of long tails; some are very long."""
    dice = random.Random(seed)

    def world(step: int, arm: str) -> float:
        each = [dice.lognormvariate(0.0, noise) * (5.0 if dice.random() < 0.03 else 1.0) for _ in range(ranks)]
        return seconds[arm] * max(each)

    return world


SECONDS = st.floats(1e-4, 10.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.booleans()), min_size=50, max_size=200), st.booleans())
def test_ranks_that_are_given_the_same_numbers_play_the_same_arms(
    steps: list[tuple[float, float, float, bool]], watches: bool
) -> None:
    """Each has a clock of its own, and numbers come in the order of ranks."""
    ranks = [Trial(arms(ROWS, CODED), setup_seconds=float(watches)) for _ in range(3)]
    for *seconds, is_typical in steps:
        assert len({trial.arm for trial in ranks}) == 1
        gathered = [trial.note(mine, 0.5 * mine, is_typical) for trial, mine in zip(ranks, seconds, strict=True)]
        assert len({numbers is None for numbers in gathered}) == 1
        for trial in ranks:
            if gathered[0] is not None:
                trial.learn(gathered)
        assert len({trial.explain() for trial in ranks}) == 1


@given(st.lists(st.tuples(SECONDS, st.booleans()), min_size=50, max_size=600))
def test_regret_stays_within_its_bound_whatever_steps_take(steps: list[tuple[float, bool]]) -> None:
    trial = Trial(arms(ROWS, CODED))
    spent = 0.0
    for seconds, is_typical in steps:
        numbers = trial.note(seconds, 0.0, is_typical)
        if numbers is not None:
            before = trial.regret
            trial.learn([numbers])
            assert before <= FIRST_REGRET + REGRET_SHARE * trial.steps + spent, "only the last block may exceed it"
            spent = trial.regret - before


def test_an_arm_that_is_far_slower_costs_few_steps() -> None:
    """Four times slower: a few pairs, until two in a row show a factor of three."""
    trial = Trial(arms())
    played = play(trial, 900, noisy(0, 0.05, stock=1.0, rows=4.0))
    assert trial.arm == STOCK
    assert Counter(played)[ROWS] <= 5
    assert trial.regret <= FIRST_REGRET + REGRET_SHARE * 900 + 3 * 3.5


@pytest.mark.few(1)
@pytest.mark.parametrize(("noise", "ranks", "rows"), [(0.02, 1, 0.97), (0.3, 1, 0.97), (0.1, 4, 1.0), (0.3, 4, 1.2)])
def test_an_arm_that_is_not_faster_seldom_wins(noise: float, ranks: int, rows: float) -> None:
    """At most in `ERROR` of all lives, each with several looks; 200 of them may have a few more by chance."""
    has_won = 0
    for seed in range(200):
        trial = Trial(arms())
        world = noisy(seed, noise, ranks, stock=1.0, rows=rows)
        has_won += any(play(trial, 100, world) and trial.standing for _ in range(2 * LOOK_STEPS // 100))
    assert has_won <= 3 * ERROR * 200


def test_steps_that_are_very_long_now_and_then_do_not_drop_what_is_faster() -> None:
    """An arm that is 1.4 times faster: a long step of it is as long as stock is slow in a test that is decided."""
    dropped = 0
    for seed in range(100):
        trial = Trial(arms())
        world = noisy(seed, 0.1, 4, stock=1.4, rows=1.0)
        stands = [bool(play(trial, 20, world) and trial.standing) for _ in range(4 * LOOK_STEPS // 20)]
        assert any(stands)
        dropped += not all(stands[stands.index(True) :])
    assert dropped <= 3


EVALUATION = 4000.0


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("rows", [0.8, 1.25])
def test_an_evaluation_inside_of_a_pair_delays_a_test_by_a_few_steps(when: int, rows: float) -> None:
    """Wherever it falls, in a trial that has watched some steps of stock before."""
    trial = Trial(arms(), setup_seconds=2.0)
    worlds = {STOCK: 1.0, ROWS: rows}
    play(trial, 4 + when, lambda step, arm: worlds[arm], 1.0)
    play(trial, 1, lambda step, arm: EVALUATION)
    play(trial, 300 - when, lambda step, arm: worlds[arm])
    assert trial.is_settled
    assert trial.arm == (ROWS if rows < 1.0 else STOCK)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_an_evaluation_inside_of_a_check_delays_the_next_one_by_a_few_steps(is_resumed: bool) -> None:
    """Also where nothing is known yet of how long steps of stock take, as in a run that is resumed."""
    trial = Trial(arms())
    worlds = {STOCK: 1.0, ROWS: 0.5}
    play(trial, 100, lambda step, arm: worlds[arm])
    assert trial.arm == ROWS
    if is_resumed:
        state, trial = trial.state_dict(), Trial(arms())
        trial.load_state_dict(state)
    while trial.arm != STOCK:
        play(trial, 1, lambda step, arm: worlds[arm])
    play(trial, 1, lambda step, arm: EVALUATION)
    assert play(trial, 2 * CHECK_STEPS, lambda step, arm: worlds[arm]).count(STOCK) in (1, 2)
    assert trial.arm == ROWS or trial.is_timed


def test_a_challenger_that_lost_is_no_evidence_against_the_arm_that_stands() -> None:
    """Two checks in which the standing arm is disturbed do not drop it, however slow the one was that lost."""
    trial = Trial(arms(ROWS, CODED))
    seconds = {STOCK: 1.0, ROWS: 0.5, CODED: 3.5}
    play(trial, 60, lambda step, arm: seconds[arm])
    assert trial.is_settled
    for _ in range(2):
        while trial.arm != STOCK and not trial.is_timed:
            play(trial, 1, lambda step, arm: seconds[arm])
        numbers: list[float] | None = None
        while numbers is None:
            numbers = trial.note(1.0 if trial.arm == STOCK else 4.0)
        trial.learn([[abs(one) for one in numbers]])
    assert trial.arm == ROWS


def test_loading_kernels_is_not_charged_to_pairs() -> None:
    """What it costs was weighed before: the first step of rows has it, and is no sign of later ones."""
    trial = Trial(arms(), setup_seconds=1.5)
    while trial.arm != ROWS:
        play(trial, 1, lambda step, arm: 0.015, 0.015)
    for step in range(60):
        numbers = trial.note(1.5 if step == 0 else 0.01 if trial.arm == ROWS else 0.015, is_typical=step > 0)
        if numbers is not None:
            trial.learn([numbers])
    assert trial.arm == ROWS


@pytest.mark.parametrize(("noise", "faster"), [(0.02, 0.9), (0.1, 0.75), (0.3, 0.5)])
def test_an_arm_that_is_faster_wins_soon(noise: float, faster: float) -> None:
    lives = [Trial(arms()) for _ in range(100)]
    for seed, trial in enumerate(lives):
        play(trial, 250, noisy(seed, noise, stock=1.0, rows=faster))
    assert sum(trial.arm == ROWS for trial in lives) >= 80


def test_the_best_of_three_wins() -> None:
    trial = Trial(arms(ROWS, CODED))
    play(trial, 400, noisy(1, 0.02, stock=1.0, rows=0.8, coded=0.5))
    assert trial.arm == CODED
    assert "won" in trial.explain()
    assert "coded" in trial.explain()


def test_what_is_decisive_takes_three_pairs() -> None:
    trial = Trial(arms())
    assert play(trial, 9, lambda step, arm: 1.0 if arm == STOCK else 0.1).count(STOCK) <= 3


def test_an_arm_that_becomes_slower_is_noticed() -> None:
    trial = Trial(arms())
    play(trial, 400, noisy(2, 0.05, stock=1.0, rows=0.7))
    assert trial.arm == ROWS
    changed = play(trial, 3 * CHECK_STEPS, noisy(3, 0.05, stock=1.0, rows=1.3))
    assert trial.standing == 0
    assert changed.index(STOCK) <= CHECK_STEPS
    assert "slower" in trial.explain()


def test_an_arm_that_becomes_faster_is_noticed() -> None:
    trial = Trial(arms())
    play(trial, 400, noisy(4, 0.05, stock=1.0, rows=1.3))
    assert trial.arm == STOCK
    play(trial, 3 * LOOK_STEPS, noisy(5, 0.05, stock=1.0, rows=0.7))
    assert trial.arm == ROWS


def test_what_stands_is_not_measured_but_seldom() -> None:
    trial = Trial(arms())
    play(trial, 400, noisy(6, 0.05, stock=1.0, rows=1.3))
    assert play(trial, LOOK_STEPS - 400, noisy(7, 0.05, stock=1.0, rows=1.3)).count(ROWS) == 0
    looks = [play(trial, LOOK_STEPS, noisy(8, 0.05, stock=1.0, rows=1.3)).count(ROWS) > 0 for _ in range(12)]
    assert sum(looks) <= 4, "after 1000 steps, 2000 more, 4000 more, ..."


def test_what_prices_decline_is_asked_for_again_as_often_as_what_lost() -> None:
    """After 1000 steps, then 2000, and so on."""
    trial, asked = Trial(arms(), setup_seconds=1.5), list[int]()
    for step in range(17_000):
        if trial.arm == ROWS:
            asked.append(step)
            trial.decline("no price pays")
        play(trial, 1, lambda step, arm: 1.0, 1.0)
    assert [later - sooner for sooner, later in pairwise(asked)] == pytest.approx([1000, 2000, 4000, 8000], abs=2)


def test_arms_of_equal_speed_do_not_alternate() -> None:
    changes = 0
    for seed in range(20):
        trial, standing = Trial(arms()), 0
        for _ in range(20):
            play(trial, 300, noisy(seed, 0.2, stock=1.0, rows=1.0))
            changes, standing = changes + (trial.standing != standing), trial.standing
    assert changes <= 2


@given(st.lists(st.tuples(SECONDS, st.booleans()), max_size=300), st.booleans())
def test_what_was_learned_is_saved_and_restored(steps: list[tuple[float, bool]], watches: bool) -> None:
    trial, restored = (Trial(arms(ROWS, CODED), setup_seconds=float(watches)) for _ in range(2))
    for seconds, is_typical in steps:
        numbers = trial.note(seconds, seconds, is_typical)
        if numbers is not None:
            trial.learn([numbers])
    restored.load_state_dict(json.loads(json.dumps(trial.state_dict())))
    assert (restored.standing, restored.explain()) == (trial.standing, trial.explain())
    assert (restored.steps, restored.regret) == (trial.steps, trial.regret)
    assert restored.tests - trial.tests in (0, 1), "a test that begins again is another one"
    if not trial.is_timed and trial.state_dict()["left"]:
        assert restored.state_dict() == trial.state_dict()


def test_nothing_is_tried_before_stock_has_waited_for_what_a_trial_costs() -> None:
    setup_seconds = 1.5
    for waited in (0.0, 0.01, 0.04, 0.3, 1.0):
        trial = Trial(arms(), setup_seconds)
        steps = play(trial, 400, lambda step, arm: 1.0, waited)
        before = steps.index(ROWS) if ROWS in steps else 400
        total = waited * before
        assert ROWS in steps if waited >= 0.05 else ROWS not in steps, "5 % cannot be gained where less is waited"
        if ROWS in steps:
            assert RENT * total >= setup_seconds
            assert RENT * (total / 2 - waited) <= setup_seconds, "it is asked when the number of steps has doubled"


def test_ranks_of_short_steps_do_not_meet_in_the_first_ones() -> None:
    trial, meetings = Trial(arms(), setup_seconds=1.5), list[int]()
    for step in range(2 * FIRST_STEPS):
        numbers = trial.note(0.005, 0.004)
        if numbers is not None:
            trial.learn([numbers])
            meetings.append(step + 1)
    assert meetings == [1, FIRST_STEPS, 2 * FIRST_STEPS]


@given(st.floats(1e-3, 5.0), st.floats(0.0, 1.0), st.floats(0.5, DECISIVE))
def test_the_first_steps_take_at_most_a_twentieth_longer_than_those_of_stock(
    stock: float, waits: float, slower: float
) -> None:
    trial, setup_seconds, spent = Trial(arms(), setup_seconds=1.5), 1.5, 0.0
    for _ in range(FIRST_STEPS):
        if trial.arm == ROWS:
            spent += setup_seconds + (slower - 1.0) * stock
            setup_seconds = 0.0
        play(trial, 1, lambda step, arm: stock if arm == STOCK else slower * stock, waits * stock)
    assert spent <= 0.05 * FIRST_STEPS * stock + 1e-9


def test_a_rank_that_waits_for_a_slow_one_is_no_proof_of_a_slow_network() -> None:
    trial = Trial(arms(), setup_seconds=1.0)
    for _ in range(100):
        mine = trial.note(1.0, 0.9)
        if mine is not None:
            trial.learn([mine, [0.0, *mine[1:]]])
    assert trial.is_watching
    assert trial.explain() == "stock: steps wait 0.0% of their time for the network"


def test_steps_in_which_kernels_are_compiled_decide_nothing() -> None:
    trial = Trial(arms())
    for _ in range(300):
        numbers = trial.note(0.1 if trial.arm == ROWS else 1.0, is_typical=False)
        if numbers is not None:
            trial.learn([numbers])
    assert trial.standing == 0
    assert trial.tests == 1
    play(trial, CHECK_STEPS + 10, lambda step, arm: 1.0 if arm == STOCK else 0.1)
    assert trial.arm == ROWS


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    """On each rank by itself rows halve the mean step, but in each step one of the two is slow."""
    trial = Trial(arms())
    for step in range(200):
        is_rows = trial.arm == ROWS
        numbers = trial.note(1.0 if step % 4 < 2 and is_rows else 0.5)
        if numbers is not None:
            trial.learn([numbers, [1.5 - one for one in numbers]])
    assert trial.arm == STOCK


def test_neither_arm_always_goes_first() -> None:
    """In the order of Thue and Morse a drift, linear or quadratic, favours neither."""
    trial, played = Trial(arms()), ""
    for step in range(24):
        played += trial.arm[0]
        numbers = trial.note(1.0 if trial.arm == STOCK or step % 4 < 2 else 0.7)
        if numbers is not None:
            trial.learn([numbers])
    firsts = Counter(played[2:22:2])
    assert abs(firsts["s"] - firsts["r"]) <= 2
    assert "srsrsrsr" not in played[2:]


def test_further_challengers_can_be_offered() -> None:
    trial = Trial(arms())
    world = noisy(9, 0.02, stock=1.0, rows=0.7, coded=0.4)
    play(trial, 300, world)
    trial.offer([CODED])
    play(trial, 300, world)
    assert trial.arm == CODED


def test_bets_at_fair_odds_leave_the_mean_capital_as_it_was() -> None:
    """Over all sequences of outcomes; so a capital of c is reached in at most 1 of c of them."""
    ends = []
    for number in range(256):
        gambler = Gambler()
        for bit in range(8):
            gambler.bet(bool(number >> bit & 1))
        ends.append(gambler.capital)
    assert sum(ends) / 256 == pytest.approx(1.0)
