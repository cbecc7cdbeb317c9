"""Closed forms of collectives against the algorithms themselves, run message by message."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from published import collectives
from published.cluster import Cluster, cost_table
from thinwire.plan.profile import Linear

pytestmark = pytest.mark.slow

LATENCY, BANDWIDTH = Linear(1.0, 0.0), Linear(0.0, 1.0)
COLLECTIVES = [
    collectives.parameter_server,
    collectives.ring_all_reduce,
    collectives.tree_all_reduce,
    collectives.recursive_doubling_all_reduce,
    collectives.halving_doubling_all_reduce,
    collectives.all_reduce,
    collectives.ring_reduce_scatter,
    collectives.reduce_scatter,
    collectives.ring_all_gather,
    collectives.all_gather,
    collectives.all_to_all,
    collectives.gather,
    collectives.broadcast,
    collectives.reduce,
]


def ring(ranks: int) -> tuple[int, float]:
    """Rounds, and what the busiest link carries, of a tensor of size 1: sums travel around, then the sum does."""
    held = [{part: {rank} for part in range(ranks)} for rank in range(ranks)]
    sent = [0.0] * ranks
    for step in range(2 * (ranks - 1)):
        moving = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        arriving = [((rank + 1) % ranks, part, set(held[rank][part])) for rank, part in moving]
        sent = [volume + 1 / ranks for volume in sent]
        for rank, part, sources in arriving:
            held[rank][part] = held[rank][part] | sources if step < ranks - 1 else sources
    assert all(parts == {part: set(range(ranks)) for part in range(ranks)} for parts in held)
    return 2 * (ranks - 1), max(sent)


def tree(ranks: int) -> tuple[int, float]:
    """A binomial tree to rank 0 and back; rank 0 has the busiest link, and takes one message after another."""
    held = [{rank} for rank in range(ranks)]
    rounds, distance = 0, 1
    while distance < ranks:
        for rank in range(0, ranks - distance, 2 * distance):
            held[rank] |= held[rank + distance]
        rounds, distance = rounds + 1, 2 * distance
    assert held[0] == set(range(ranks))
    return 2 * rounds, 2.0 * rounds


def recursive_doubling(ranks: int) -> tuple[int, float]:
    power = 2 ** (ranks.bit_length() - 1)
    held = [{rank} for rank in range(ranks)]
    for rank in range(power, ranks):
        held[rank - power] |= held[rank]
    rounds = extra = int(power < ranks)
    distance = 1
    while distance < power:
        held = [held[rank] | held[rank ^ distance] if rank < power else held[rank] for rank in range(ranks)]
        rounds, distance = rounds + 1, 2 * distance
    assert all(sources == set(range(ranks)) for sources in held[:power])
    return rounds + extra, float(rounds + extra)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 12, 16, 17])
@pytest.mark.parametrize(
    ("closed_form", "algorithm"),
    [
        (collectives.ring_all_reduce, ring),
        (collectives.tree_all_reduce, tree),
        (collectives.recursive_doubling_all_reduce, recursive_doubling),
    ],
)
def test_a_closed_form_is_what_the_algorithm_takes(
    ranks: int, closed_form: collectives.Collective, algorithm: Callable[[int], tuple[int, float]]
) -> None:
    rounds, volume = algorithm(ranks)
    assert closed_form(ranks, 1.0, LATENCY) == pytest.approx(rounds)
    assert closed_form(ranks, 1.0, BANDWIDTH) == pytest.approx(volume)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_every_collective_keeps_to(collective: collectives.Collective) -> None:
    link = Linear(2e-5, 3e-9)
    assert collective(1, 1e6, link) == 0
    for ranks in (2, 3, 8, 13):
        sizes = np.array([0.0, 1.0, 1e3, 1e6, 1e9])
        seconds = collective(ranks, sizes, link)
        np.testing.assert_allclose(seconds, [collective(ranks, size, link) for size in sizes.tolist()])
        assert (np.diff(seconds) > 0).all()
        assert collective(ranks, 0.0, link) >= link.alpha
        assert collective(ranks, 1e6, Linear(2 * link.alpha, 2 * link.beta)) == pytest.approx(2 * seconds[3])


@pytest.mark.parametrize(
    "collective",
    [
        collectives.halving_doubling_all_reduce,
        collectives.ring_all_gather,
        collectives.all_gather,
        collectives.all_to_all,
        collectives.gather,
        collectives.broadcast,
        collectives.reduce,
    ],
)
def test_what_no_collective_can_be_is_refused(collective: collectives.Collective) -> None:
    """By those of the lectures alone; the others are priced with numbers of ours."""
    for ranks, size in ((0, 1.0), (2, -1.0), (2, float("nan")), (2.0, 1.0)):
        with pytest.raises(ValueError, match=r"rank or more|bytes or more"):
            collective(ranks, size, Linear(2e-5, 3e-9))  # pyrefly: ignore [bad-argument-type]


@pytest.mark.parametrize("ranks", [2, 3, 8, 13, 64])
def test_laws_between_collectives(ranks: int) -> None:
    link, size = Linear(2e-5, 3e-9), 1e6
    halves = collectives.ring_reduce_scatter(ranks, size, link) + collectives.ring_all_gather(ranks, size / ranks, link)
    assert halves == pytest.approx(collectives.ring_all_reduce(ranks, size, link))
    # Nothing moves less than 2 (p - 1)/p m, and the best one is no worse than any.
    least = 2 * (ranks - 1) / ranks * size
    for algorithm in (collectives.ring_all_reduce, collectives.tree_all_reduce, collectives.all_reduce):
        assert algorithm(ranks, size, BANDWIDTH) >= least * (1 - 1e-12)
        assert collectives.all_reduce(ranks, size, link) <= algorithm(ranks, size, link)


def test_the_cost_table_is_the_lectures() -> None:
    rows = {row.algorithm: row for row in cost_table(8, 1e6, Linear(1e-4, 1e-8))}
    assert list(rows) == ["parameter server", "ring", "tree", "recursive doubling"]
    assert (rows["parameter server"].link_bytes, rows["parameter server"].rounds) == (2 * 8 * 1e6, 2)
    assert (rows["ring"].link_bytes, rows["ring"].rounds) == (2 * 7 / 8 * 1e6, 14)
    assert (rows["recursive doubling"].link_bytes, rows["recursive doubling"].rounds) == (3e6, 3)
    for row in rows.values():
        assert row.seconds == pytest.approx(row.rounds * 1e-4 + row.link_bytes * 1e-8)


FORMULAS: dict[str, Callable[[int, float], float]] = {
    "2 p d": lambda p, d: 2 * p * d,
    "2": lambda p, d: 2,
    "2 (p - 1)/p d": lambda p, d: 2 * (p - 1) / p * d,
    "2 (p - 1)": lambda p, d: 2 * (p - 1),
    "2 ceil(log2 p) d": lambda p, d: 2 * math.ceil(math.log2(p)) * d,
    "2 ceil(log2 p)": lambda p, d: 2 * math.ceil(math.log2(p)),
    "log2 p d": lambda p, d: math.log2(p) * d,
    "log2 p": lambda p, d: math.log2(p),
}


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
def test_the_formulas_of_the_cost_table_are_its_numbers(ranks: int) -> None:
    for row in cost_table(ranks, 100.0, Linear(1e-4, 1e-8)):
        assert FORMULAS[row.bandwidth](ranks, 100.0) == pytest.approx(row.link_bytes)
        assert FORMULAS[row.latency](ranks, 100.0) == pytest.approx(row.rounds)


def test_ranks_of_a_host_share_its_link() -> None:
    cluster = Cluster(8, 4, intra=Linear(1e-5, 1e-10), inter=Linear(5e-5, 1e-9))
    # A quarter each by four ranks at once is the whole by one.
    whole = cluster.seconds("inter", "all_reduce", 1e6, ranks=1)
    assert cluster.seconds("inter", "all_reduce", 2.5e5, ranks=4) == pytest.approx(whole)
    with pytest.raises(KeyError):
        cluster.seconds("inter", "all_shuffle", 1.0)


@pytest.mark.parametrize("routine", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "gather", "broadcast"])
def test_flat_collectives(routine: str) -> None:
    intra, inter = Linear(1e-5, 1e-10), Linear(5e-5, 1e-9)
    alone = Cluster(1, 4, intra, inter)
    assert alone.seconds("flat", routine, 1e6) == alone.seconds("intra", routine, 1e6)
    assert alone.seconds("inter", routine, 1e6) == 0
    single = Cluster(4, 1, intra, inter)
    hierarchical, flat = single.seconds("inter", routine, 1e6), single.seconds("flat", routine, 1e6)
    assert single.seconds("intra", routine, 1e6) == 0
    assert flat >= hierarchical * (1 - 1e-12)  # the same ranks on the same links, by fewer algorithms
    assert Cluster(4, 4, intra, inter).seconds("flat", routine, 1e6) > flat


def test_a_flat_all_to_all_crosses_a_hosts_link_for_each_of_its_ranks() -> None:
    cluster = Cluster(4, 8, intra=Linear(0, 0), inter=Linear(0, 1e-9))
    # 8 ranks, each with 24 of 32 parts for other hosts.
    assert cluster.seconds("flat", "all_to_all", 32e6) == pytest.approx(8 * 24e6 * 1e-9)


@pytest.mark.parametrize("change", [{"hosts": 0}, {"ranks_per_host": 1.5}, {"intra": 1e-9}, {"host_copy": None}])
def test_a_cluster_that_cannot_be_is_refused(change: dict) -> None:
    arguments = {"hosts": 2, "ranks_per_host": 2, "intra": Linear(0, 0), "inter": Linear(0, 0)} | change
    with pytest.raises(ValueError, match=next(iter(change))):
        Cluster(**arguments)
