"""Algorithm 2: every byte once, chunks that fit, timespans that are not overrun; and the profile that feeds it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from references.transfer_schedule import Budget, Chunk, TransferPlan, partition, spread
from thinwire.checkpoint.pacing.gaps import GAMMA, profile

BUDGETS = st.builds(
    Budget,
    bytes_per_second=st.floats(1, 1e4),
    alpha_seconds=st.sampled_from([0.0, 0.01, 0.3]),
    gamma=st.floats(0.1, 1),
    buffer_bytes=st.integers(200, 4000),
    sub_buffers=st.integers(1, 7),
)
SPANS = st.lists(st.floats(0, 2), min_size=1, max_size=6)
PAYLOADS = st.integers(0, 3000)
REPLICAS = st.integers(1, 4)


def check_laws(plan: TransferPlan, spans: list[float], payload_bytes: int, replicas: int, budget: Budget) -> None:
    chunks = [chunk for of_span in plan.spans for chunk in of_span]
    covered: dict[int, int] = dict.fromkeys(range(1, replicas), 0)
    for chunk in chunks:
        assert 0 < chunk.length <= budget.chunk_bytes
        assert chunk.offset == covered[chunk.replica], "every byte once, in order"
        covered[chunk.replica] += chunk.length
    assert set(covered.values()) <= {payload_bytes}
    assert [chunk.replica for chunk in chunks] == sorted(chunk.replica for chunk in chunks)
    assert plan.num_bytes == (replicas - 1) * payload_bytes
    assert len(plan.spans) == plan.iterations * len(spans)


@given(SPANS, PAYLOADS, REPLICAS, BUDGETS)
def test_one_iteration_sends_every_byte_once(
    spans: list[float], payload_bytes: int, replicas: int, budget: Budget
) -> None:
    plan = partition(spans, payload_bytes, replicas, budget)
    check_laws(plan, spans, payload_bytes, replicas, budget)
    assert plan.iterations == 1
    for seconds, span in zip(plan.seconds(budget)[:-1], spans[:-1], strict=True):
        assert seconds <= budget.gamma * span * (1 + 1e-9)
    assert plan == partition(spans, payload_bytes, replicas, budget)


@given(SPANS, PAYLOADS, REPLICAS, BUDGETS)
def test_spreading_overruns_no_timespan(spans: list[float], payload_bytes: int, replicas: int, budget: Budget) -> None:
    in_one_iteration = sum(max(0.0, budget.gamma * span - budget.alpha_seconds) for span in spans)
    if in_one_iteration * budget.bytes_per_second < 10:
        return  # a thousand iterations, or none: below
    plan = spread(spans, payload_bytes, replicas, budget)
    check_laws(plan, spans, payload_bytes, replicas, budget)
    for seconds, span in zip(plan.seconds(budget), spans * plan.iterations, strict=True):
        assert seconds <= budget.gamma * span * (1 + 1e-9)
    assert plan == spread(spans, payload_bytes, replicas, budget)
    last = plan.spans[-len(spans) :]
    assert any(last) or plan.iterations == 1, "no iteration more than it takes"
    at_most = sum(budget.gamma * span for span in spans) * budget.bytes_per_second * (1 + 1e-9)
    assert plan.iterations >= plan.num_bytes / at_most


@given(SPANS, PAYLOADS, REPLICAS, BUDGETS)
def test_what_fits_into_one_iteration_is_not_spread(
    spans: list[float], payload_bytes: int, replicas: int, budget: Budget
) -> None:
    """The two plans differ only where the last timespan would run over."""
    plan = partition(spans, payload_bytes, replicas, budget)
    if plan.seconds(budget)[-1] <= budget.gamma * spans[-1] * (1 - 1e-9):
        assert spread(spans, payload_bytes, replicas, budget) == plan


def published(spans: list[int], payload_bytes: int, replicas: int, alpha: int, largest: int) -> list[tuple[int, ...]]:
    """Algorithm 2 as the paper writes it, for a link of one byte a second and gamma = 1: sizes of each timespan."""
    partitions: list[tuple[int, ...]] = []
    remaining, checkpoint = payload_bytes, 1
    for remaining_span in [*spans[:-1], math.inf]:
        sizes: list[int] = []
        while checkpoint < replicas and remaining_span > alpha:
            size = largest if remaining_span > alpha + largest else int(remaining_span - alpha)
            size = min(size, remaining)
            remaining, remaining_span = remaining - size, remaining_span - (alpha + size)
            sizes.append(size)
            if remaining == 0:
                checkpoint, remaining = checkpoint + 1, payload_bytes
        partitions.append(tuple(sizes))
    return partitions


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.integers(1, 200),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 20),
)
def test_the_published_algorithm_gives_the_same(
    spans: list[int], payload_bytes: int, replicas: int, alpha: int, largest: int
) -> None:
    budget = Budget(1.0, alpha, gamma=1.0, buffer_bytes=4 * largest, sub_buffers=4)
    plan = partition(spans, payload_bytes, replicas, budget)
    sizes = [tuple(chunk.length for chunk in chunks) for chunks in plan.spans]
    assert sizes == published(spans, payload_bytes, replicas, alpha, largest)


def test_a_plan_by_hand() -> None:
    """A second holds 90 bytes less 10 for each chunk; a chunk of replica 2 shares the last timespan with replica 1."""
    budget = Budget(100.0, alpha_seconds=0.1, gamma=0.9, buffer_bytes=120, sub_buffers=2)
    plan = spread([1.0, 0.1], 100, 3, budget)
    assert plan.spans == (
        (Chunk(1, 0, 60), Chunk(1, 60, 10)),
        (),
        (Chunk(1, 70, 30), Chunk(2, 0, 40)),
        (),
        (Chunk(2, 40, 60),),
        (),
    )
    assert plan.iterations == 3
    assert plan.seconds(budget) == pytest.approx((0.9, 0, 0.9, 0, 0.7, 0))
    in_one = partition([1.0, 0.1], 100, 3, budget)
    assert in_one.spans[1] == (Chunk(1, 70, 30), Chunk(2, 0, 60), Chunk(2, 60, 40)), "the last timespan takes the rest"


# The profile


def test_medians_ignore_iterations_that_are_unlike_the_others() -> None:
    usual = [[(0.0, 1.0), (2.0, 0.5)], [(0.1, 1.02), (2.1, 0.5)], [(0.05, 0.98), (2.2, 0.5)]] * 6
    found = profile([*usual, [(0.0, 9.0)], []])
    assert found.spans == (1.0, 0.5)
    assert [start for start, _ in found.timespans] == [0.05, 2.1]
    assert found.agreement == 0.9
    assert found.variation == pytest.approx(0.016330 / 1.5, rel=1e-4), "pstdev of the lengths, over the medians' sum"
    assert not found.steady, "one in ten was unlike the others"
    assert found.gamma == pytest.approx(GAMMA * 0.9)
    assert profile(usual).steady
    assert profile(usual).gamma == GAMMA


def test_what_varies_is_used_less() -> None:
    gammas = []
    for swing in (0.0, 0.05, 0.2, 0.5, 2.0):
        found = profile([[(0.0, 1.0 - swing / 2)], [(0.0, 1.0)], [(0.0, 1.0 + swing / 2)]] * 7)
        assert found.variation == pytest.approx(swing / math.sqrt(6))
        assert found.steady == (swing <= 0.2)
        gammas.append(found.gamma)
        assert 0.1 <= found.gamma <= GAMMA
    assert gammas[0] == gammas[1] == gammas[2] == GAMMA
    assert GAMMA > gammas[3] > gammas[4]
    assert profile([[(0.0, 0.0)], [(0.0, 0.0)]]).gamma == pytest.approx(0.1), "no time at all"


@given(st.lists(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=3), max_size=8))
def test_any_record_gives_a_gamma_that_a_budget_takes(record: list[list[tuple[float, float]]]) -> None:
    if not any(record):
        with pytest.raises(ValueError, match="none had a network-idle timespan"):
            profile(record)
        return
    found = profile(record)
    budget = Budget(1000.0, gamma=found.gamma)
    check_laws(partition(found.spans, 500, 2, budget), list(found.spans), 500, 2, budget)
