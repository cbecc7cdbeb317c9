"""The timeline of Espresso against a slow one that is told nothing but the rules."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from espresso.engine import (
    BACKWARD,
    COMPUTE,
    CPU,
    INTER,
    INTRA,
    TRACKS,
    Chain,
    Engine,
    events,
    iteration_seconds,
    last_bubbles,
)
from espresso.job import job_of
from espresso.options import DENSE
from espresso.tasks import Pricer
from espresso.testbeds import nvlink_100g
from published.models import MODELS
from thinwire.observe.trace import chrome_trace


def slow_timeline(backward: list[float], chains: list[Chain]) -> tuple[float, set[tuple[int, int, float, float]]]:
    """Clock tick by clock tick: what ends, what became ready, and which of it each idle resource takes.

    All times are whole numbers. Returns the end, and (tensor, stage, start, end) of every task.
    """
    queues: dict[int, list[tuple[float, int, int]]] = {resource: [] for resource in range(len(TRACKS))}
    running: dict[int, tuple[int, int, float, float]] = {}
    done: set[tuple[int, int, float, float]] = set()
    total = len(backward) + sum(map(len, chains))
    queues[COMPUTE].append((0.0, 0, BACKWARD))
    clock = 0.0
    while len(done) < total:
        for resource, task in list(running.items()):
            tensor, stage, _, end = task
            if end == clock:
                done.add(task)
                del running[resource]
                if stage + 1 < len(chains[tensor]):
                    queues[chains[tensor][stage + 1][0]].append((clock, tensor, stage + 1))
                if stage == BACKWARD and tensor + 1 < len(backward):
                    queues[COMPUTE].append((clock, tensor + 1, BACKWARD))
        for resource, queue in queues.items():
            if queue and resource not in running:
                _, tensor, stage = queue.pop(queue.index(min(queue)))
                seconds = backward[tensor] if stage == BACKWARD else chains[tensor][stage][1]
                running[resource] = (tensor, stage, clock, clock + seconds)
        clock += 1.0
    return max(end for *_, end in done), done


def random_chain(random_numbers: random.Random) -> Chain:
    length = random_numbers.randint(0, 6)
    return tuple((random_numbers.randrange(4), float(random_numbers.randint(1, 5))) for _ in range(length))


def random_strategy(seed: int) -> tuple[list[float], list[Chain]]:
    random_numbers = random.Random(seed)
    count = random_numbers.randint(1, 9)
    backward = [float(random_numbers.randint(1, 4)) for _ in range(count)]
    return backward, [random_chain(random_numbers) for _ in range(count)]


@pytest.mark.parametrize("block", range(5))
def test_the_timeline_is_that_of_a_slow_simulator(block: int) -> None:
    for seed in range(60 * block, 60 * block + 60):
        backward, chains = random_strategy(seed)
        engine = Engine(backward, chains)
        seconds, done = slow_timeline(backward, chains)
        assert engine.seconds == seconds == iteration_seconds(backward, chains), seed
        assert {(task.tensor, task.stage, task.start_seconds, task.end_seconds) for task in engine.served} == done, seed


@pytest.mark.parametrize("seed", range(40))
def test_a_trial_is_what_a_new_timeline_says(seed: int) -> None:
    """However many tensors change, before and after changes were made, and whatever limit there is."""
    backward, chains = random_strategy(seed)
    engine, random_numbers = Engine(backward, chains), random.Random(1000 + seed)
    for _ in range(40):
        places = random_numbers.sample(range(len(chains)), random_numbers.randint(0, min(3, len(chains))))
        changes = {place: random_chain(random_numbers) for place in places}
        changed = [changes.get(place, chain) for place, chain in enumerate(chains)]
        expected = Engine(backward, changed)
        assert engine.trial(changes) == expected.seconds
        limit = random_numbers.choice([0.5, 0.9, 1.0, 1.1]) * expected.seconds
        limited = engine.trial(changes, limit)
        assert limited > limit if expected.seconds > limit else limited == expected.seconds
        assert engine.chains == chains
        if random_numbers.random() < 0.3:
            engine.change(changes)
            chains = changed
            assert (engine.seconds, engine.served, engine.chains) == (expected.seconds, expected.served, chains)


@pytest.mark.parametrize("seed", range(20))
def test_a_resource_does_one_thing_at_a_time_and_all_of_it(seed: int) -> None:
    backward, chains = random_strategy(seed)
    engine = Engine(backward, chains)
    for resource in range(len(TRACKS)):
        spans = sorted((t.start_seconds, t.end_seconds) for t in engine.served if t.resource == resource)
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
        work = sum(seconds for chain in chains for which, seconds in chain if which == resource)
        assert sum(end - start for start, end in spans) == work + (sum(backward) if resource == COMPUTE else 0)
        assert engine.seconds >= work
    for tensor, chain in enumerate(chains):
        spans = [(t.start_seconds, t.end_seconds) for t in engine.served if t.tensor == tensor]
        assert len(spans) == len(chain) + 1
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_encoding_delays_what_comes_after_it_on_the_gpu_and_nothing_on_the_processors() -> None:
    send = (INTER, 1.0)
    assert iteration_seconds([2.0, 2.0], [((COMPUTE, 3.0), send), (send,)]) == 2 + 3 + 2 + 1
    assert iteration_seconds([2.0, 2.0], [((CPU, 3.0), send), (send,)]) == 2 + 3 + 1


def test_phases_of_different_tensors_overlap() -> None:
    chain = ((INTRA, 2.0), (INTER, 2.0))
    assert iteration_seconds([0.0, 0.0], [chain, chain]) == 2 + 2 + 2


def test_no_tensors_take_no_time() -> None:
    assert iteration_seconds([], []) == 0


@pytest.mark.parametrize("name", MODELS)
def test_gaps_of_more_than_a_millisecond_stay_as_long_as_they_are(name: str) -> None:
    """The public simulator adds up gaps modulo 1000 us, so that LSTM's backward pass takes 1.45 ms instead of 71.45."""
    model = MODELS[name]()
    job = job_of(model, nvlink_100g())
    assert max(job.backward_seconds) > 1e-3
    pricer = Pricer(job.size_bytes, job.cluster, job.compression)
    chains = [pricer.choice(DENSE, size).chain for size in job.size_bytes]
    served = Engine(job.backward_seconds, chains).served
    ends = [task.end_seconds for task in served if task.stage == BACKWARD]
    assert ends[-1] == pytest.approx(model.backward_total_seconds)
    assert [end - start for start, end in zip([0.0, *ends], ends, strict=False)] == pytest.approx(job.backward_seconds)


def test_a_bubble_is_a_gap_that_computation_causes() -> None:
    served = Engine([1.0, 5.0], [((INTER, 2.0),), ((INTER, 2.0),)]).served
    assert last_bubbles(served) == {INTRA: float("-inf"), INTER: 3.0}
    # No gap: the second waits for the first.
    served = Engine([1.0, 1.0], [((INTER, 2.0),), ((INTER, 2.0),)]).served
    assert last_bubbles(served)[INTER] == float("-inf")


def test_a_gap_behind_other_communication_is_no_bubble() -> None:
    """The last gap between hosts is there because the link inside the host is full: less on it would close the gap."""
    chains = [((INTRA, 4.0), (INTER, 1.0))] * 3
    assert last_bubbles(Engine([1.0, 1.0, 1.0], chains).served) == {INTRA: float("-inf"), INTER: float("-inf")}


def test_a_timeline_can_be_looked_at() -> None:
    engine = Engine([1.0, 1.0], [((INTRA, 1.0), (INTER, 3.0)), ()])
    trace = chrome_trace({"predicted": events(engine.served, ["a", "b"], [["reduce", "send"], []])})
    work = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["args"]["tensor"], event["ts"], event["dur"]) for event in work] == [
        ("backward", "a", 0.0, 1e6),
        ("backward", "b", 1e6, 1e6),
        ("reduce", "a", 1e6, 1e6),
        ("send", "a", 2e6, 3e6),
    ]
