"""What "auto" learns from real steps, and what that costs, simulated: steps take what was expected times an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, repeat

import pytest

from thinwire.comm.machine import Machine
from thinwire.sync.choose import TORCHS, Demand, Point, Price, Rehearsal, choose
from thinwire.sync.experience import Experience
from thinwire.sync.named import name_of, resolve
from thinwire.sync.scheme import Communication, Scheme

FAST = Machine(7e-4, 3e-4, 8.4e-9, 8.4e-9, 7e-5, 1.5e-8, 3e-10, 2.5e-8, 4.6e-10, 4e-8, 1e-9)
NUM_ROWS, WIDTH, WORLD_SIZE, STEPS = 200_000, 32, 4, 100
WINDOW, ERROR = 50, 1.5
NAMES = ("zen", "column_split", "union_split", "agsparse_coded", "sparcml_coded", "dense")


def _uniform(chance: random.Random) -> Iterator[int]:
    while True:
        yield chance.randint(500, 8000)


def _long_tailed(chance: random.Random) -> Iterator[int]:
    while True:
        yield min(20_000, int(1000 * chance.paretovariate(1.5)))


BATCHES = {
    "constant": lambda chance: repeat(3000),
    "alternating": lambda chance: cycle([9000, 2000]),
    "uniform": _uniform,
    "long-tailed": _long_tailed,
}


def _demand(held: int) -> Demand:
    union = NUM_ROWS * (1.0 - (1.0 - held / NUM_ROWS) ** WORLD_SIZE)
    return Demand(WORLD_SIZE, NUM_ROWS, WIDTH, 4, held, union)


def _simulated(batches: Iterator[int], factors: dict[str, float], steps: int = STEPS) -> list[dict[str, float]]:
    """Seconds of each step: under "auto", and of each candidate that adds in the same order."""
    learned, seconds = Experience(), []
    learned.know(FAST, ())
    point = None
    for _, held in zip(range(steps), batches, strict=False):
        demand = _demand(held)
        offers = learned._estimated(learned._size(demand))
        true = {name_of(offer.scheme): offer.seconds * factors.get(name_of(offer.scheme), 1.0) for offer in offers}
        point = (learned.take(held) if learned.is_timed else learned.choice) or offers[0].scheme
        if learned.is_told:
            learned.learn(point, demand, true[name_of(point)])
        learned.observe(demand)
        points = learned.hopeful(demand)
        if points:
            learned.begin(Rehearsal(points, demand.held))
        rivals = {name_of(one.scheme) for one in offers if _adds_in_rank_order(one.scheme)}
        seconds.append({"auto": true[name_of(point)], **{name: true[name] for name in rivals}})
    return seconds


def _adds_in_rank_order(point: object) -> bool:
    return isinstance(point, Scheme) and point.communication is Communication.POINT_TO_POINT and not point.is_dense


def _overhead(seconds: list[dict[str, float]]) -> float:
    """Of "auto" over the best fixed scheme."""
    total = {name: sum(step[name] for step in seconds) for name in seconds[0]}
    return total.pop("auto") / min(total.values())


def _overheads(batches: str) -> tuple[list[float], list[float]]:
    """Of the first 50 steps, and of the worst 50 after the first ones, for many sets of errors; in ascending order."""
    first, later = [], []
    for seed in range(25):
        chance = random.Random(seed)
        factors = {name: ERROR ** chance.uniform(-1.0, 1.0) for name in NAMES}
        steps = _simulated(BATCHES[batches](chance), factors)
        first.append(_overhead(steps[:WINDOW]))
        later.append(max(_overhead(steps[begin : begin + WINDOW]) for begin in range(10, STEPS - WINDOW + 1)))
    return sorted(first), sorted(later)


@pytest.mark.parametrize("batches", BATCHES)
def test_auto_takes_hardly_longer_than_the_best_fixed_scheme(batches: str) -> None:
    first, later = _overheads(batches)
    nine_of_ten = int(0.9 * len(first))
    assert first[len(first) // 2] <= 1.05
    assert first[nine_of_ten] <= 1.11
    assert first[-1] <= 1.17
    assert later[nine_of_ten] <= 1.05
    assert later[-1] <= 1.12


def test_what_comes_into_question_late_is_still_tried() -> None:
    """Where all that were tried take longer than expected, one that was not worth a trial may be the fastest."""
    factors = dict.fromkeys(NAMES, 1.5) | {"zen": 0.8}
    steps = _simulated(repeat(3000), factors)
    assert _overhead(steps[-WINDOW:]) <= 1.001


@pytest.mark.parametrize("batches", BATCHES)
def test_estimates_that_hold_cost_at_most_a_twentieth(batches: str) -> None:
    assert _overhead(_simulated(BATCHES[batches](random.Random(0)), {})[:WINDOW]) <= 1.05


def test_what_trials_take_longer_is_bounded_and_then_they_wait() -> None:
    learned = Experience()
    learned.know(FAST, ())
    learned.observe(_demand(3000))
    learned.learn(learned.choice, _demand(3000), 0.01)
    learned.observe(_demand(3000))
    learned.begin(Rehearsal([resolve("zen"), resolve("column_split")], 3000))
    assert learned.is_timed
    tried = learned.take(3000)
    assert tried is not None
    learned.learn(tried, _demand(3000), 0.03)
    learned.observe(_demand(3000))
    assert not learned.is_timed, "that took two steps longer, which are a whole window's"


WORDS = Demand(4, 60_000, 128, 4, 2200.0, 2750.0, is_torchs=True)


def _steps(demand: Demand, machine: Machine, truth: Callable[[Price], float], steps: int = 8) -> tuple[list[str], int]:
    """Schemes of the first steps, and the first step after which a table is left to torch, or the number of steps."""
    learned, names = Experience(), []
    point: Point = choose([demand.held] * 4, demand.num_rows, demand.width, 4, demand.union, machine)
    for step in range(steps):
        learned.know(machine, ())
        point = (learned.take(demand.held) if learned.is_timed else learned.choice) or point
        names.append(name_of(point))
        offer = learned.estimate(point, demand)
        if learned.is_told and offer is not None:
            learned.learn(point, demand, truth(offer))
        learned.observe(demand)
        points = learned.hopeful(demand)
        if learned.is_torchs:
            return names, step
        if points:
            learned.begin(Rehearsal(points, demand.held))
    return names, steps


def _on_a_wire(mbit: float, work_seconds: float) -> Callable[[Price], float]:
    """Work of the lane takes several times what torch needs, and bytes take their time."""

    def seconds(offer: Price) -> float:
        work = work_seconds if offer.scheme == TORCHS else 3 * work_seconds
        return work + offer.sent_bytes * 8e-6 / mbit

    return seconds


@pytest.mark.parametrize("probed", [500, 5000])
def test_where_bytes_cost_nothing_a_table_is_left_to_torch_after_two_steps(probed: float) -> None:
    """Whatever a probe takes the link for: ranks that share processors probe it ten times too slow."""
    machine = replace(FAST, byte_seconds=8e-6 / probed, reduced_byte_seconds=8e-6 / probed)
    names, left = _steps(WORDS, machine, _on_a_wire(40_000, 0.006))
    assert names[1:] == [name_of(TORCHS)]
    assert left == 1


def test_a_slow_link_never_sees_the_bytes_of_torch() -> None:
    machine = replace(FAST, byte_seconds=8e-8, reduced_byte_seconds=8e-8)
    names, left = _steps(WORDS, machine, _on_a_wire(100, 0.002), steps=40)
    assert left == 40
    assert name_of(TORCHS) not in names


def test_a_burst_that_a_probe_took_for_the_link_costs_one_step() -> None:
    machine = replace(FAST, byte_seconds=1.6e-9, reduced_byte_seconds=1.6e-9)
    names, left = _steps(WORDS, machine, _on_a_wire(100, 0.002), steps=40)
    assert left == 40
    assert names.count(name_of(TORCHS)) <= 1


def test_dense_is_left_at_once_when_a_step_shows_that_its_estimate_was_wrong() -> None:
    """Up to a few times the fewest bytes it is taken on an estimate; steps of it say nothing about the others."""
    demand = Demand(4, 20_000, 64, 4, 6000.0, 14_000.0)
    machine = replace(FAST, byte_seconds=3e-8, reduced_byte_seconds=5e-10)
    names, _ = _steps(demand, machine, lambda offer: offer.sent_bytes * 2e-8, steps=8)
    assert names[0] == "dense"
    assert "dense" not in names[3:]


def test_a_window_of_a_run_that_torch_could_not_sum_is_not_mixed_with_one_that_it_can() -> None:
    """As after a restart on another device."""
    learned = Experience()
    learned.recall(resolve("zen"), [replace(WORDS, is_torchs=False, held=held) for held in (500.0, 2200.0)])
    learned.know(FAST, ())
    learned.observe(WORDS)
    assert [demand.is_torchs for demand in learned.demands] == [True]


def test_all_that_was_tried_is_learned_and_then_no_step_is_timed() -> None:
    learned = _rehearsing("zen", "column_split")
    for _ in range(2):
        tried = learned.take(3000)
        assert learned.is_told
        learned.learn(tried, _demand(3000), 0.01)
        learned.observe(_demand(3000))
        assert not learned.is_told
    assert set(learned._samples) >= {"zen", "column_split"}
    assert not learned.is_timed


def test_a_step_in_which_kernels_were_compiled_is_tried_again_later_each_time() -> None:
    learned = _rehearsing("zen", "column_split")
    before, timed = len(learned._samples), []
    for step in range(40):
        if learned.is_timed:
            assert learned.take(3000) == resolve("zen")
            learned.put_off()
            timed.append(step)
        learned.observe(_demand(3000))
        learned.hopeful(_demand(3000))
    assert timed == [0, 1, 3, 7, 15, 31]
    assert len(learned._samples) == before
    assert learned.rehearsal is not None


def _rehearsing(*names: str) -> Experience:
    learned = Experience()
    learned.know(FAST, ())
    for _ in range(2):
        learned.observe(_demand(3000))
    learned.begin(Rehearsal([resolve(name) for name in names], 3000))
    return learned


def test_nothing_is_tried_where_there_are_hardly_any_zeros() -> None:
    learned = Experience()
    learned.know(FAST, ())
    demand = _demand(NUM_ROWS)
    assert learned.observe(demand).is_dense
    assert learned.hopeful(demand) == []
