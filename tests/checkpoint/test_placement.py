"""Who holds whose shard, and the probability that a copy is left, against brute force and the published numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import combinations, permutations
from math import comb
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import thinwire.checkpoint
from holders import survives
from thinwire.checkpoint.placement import (
    Holders,
    placement,
    recovery_probability,
    replicas_of_ranks,
    ring_sizes,
    ring_survivals,
    sharing_domains,
)

SIZES = [(machines, replicas) for machines in range(1, 41) for replicas in range(1, 6) if replicas <= machines]


def partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of others, the largest first."""
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        yield from ((first, *rest) for rest in partitions(total - first, first))


def one_domain_is_fatal(holders: Holders, domains: tuple[int, ...]) -> bool:
    return not all(
        survives(holders, [machine for machine, domain in enumerate(domains) if domain == lost]) for lost in domains
    )


def counted_probability(machines: int, replicas: int, failed: int) -> float:
    holders = placement(machines, replicas)
    return sum(survives(holders, lost) for lost in combinations(range(machines), failed)) / comb(machines, failed)


def check_laws(holders: Holders, machines: int, replicas: int) -> None:
    assert [hosts[0] for hosts in holders] == list(range(machines)), "a machine keeps its own shard"
    assert all(len(set(hosts)) == len(hosts) == replicas for hosts in holders)
    assert Counter(host for hosts in holders for host in hosts) == dict.fromkeys(range(machines), replicas)


def test_every_machine_holds_and_sends_as_many() -> None:
    for machines, replicas in SIZES:
        check_laws(placement(machines, replicas), machines, replicas)


def test_hardly_more_sets_of_hosts_than_there_must_be() -> None:
    """Why the placement is near-optimal: each distinct set is one more way to lose a shard (Theorem 1)."""
    for machines, replicas in SIZES:
        host_sets = len({frozenset(hosts) for hosts in placement(machines, replicas)})
        assert host_sets - -(-machines // replicas) <= max(0, 2 * replicas - 3)
        assert (host_sets == machines // replicas) == (machines % replicas == 0)


def test_the_examples_of_the_paper() -> None:
    assert placement(4, 2) == ((0, 1), (1, 0), (2, 3), (3, 2))
    assert placement(5, 2) == ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
    assert placement(7, 3)[3:] == ((3, 4, 5), (4, 5, 6), (5, 6, 3), (6, 3, 4)), "the ring begins after the groups"
    assert placement(3, 3) == ((0, 1, 2), (1, 2, 0), (2, 0, 1)), "one group"
    assert placement(5, 3) == tuple(tuple((a + b) % 5 for b in range(3)) for a in range(5)), "one ring of all"
    assert placement(3, 1) == ((0,), (1,), (2,))
    assert thinwire.checkpoint.placement is placement
    assert thinwire.checkpoint.recovery_probability is recovery_probability


@pytest.mark.parametrize(
    ("machines", "replicas", "says"),
    [
        (2, 3, "replicas=2 or less"),
        (0, 1, "add machines"),
        (0, 2, "replicas=1 or less"),
        (4, 0, "at least one copy"),
        (-1, 1, "add machines"),
    ],
)
def test_what_cannot_be_placed_is_refused(machines: int, replicas: int, says: str) -> None:
    for function in (placement, ring_sizes, partial(recovery_probability, failed=0)):
        with pytest.raises(ValueError, match=says):
            function(machines, replicas)


# Probability


@pytest.mark.parametrize(
    ("machines", "replicas", "failed", "probability"),
    [
        (16, 2, 2, 0.93333), (16, 2, 3, 0.80000), (16, 2, 4, 0.61538),
        (5, 2, 2, 0.60000), (15, 2, 2, 0.91429),
        (7, 3, 3, 0.85714), (8, 3, 3, 0.89286),
        (9, 3, 3, 0.96429), (9, 3, 4, 0.85714),
        (12, 3, 3, 0.98182), (12, 3, 4, 0.92727),
        (16, 4, 4, 0.99780), (16, 4, 8, 0.84662), (64, 4, 8, 0.99824), (128, 4, 8, 0.99979),
        (32, 2, 2, 0.96774), (32, 2, 3, 0.90323), (32, 2, 4, 0.80979), (32, 2, 8, 0.31324),
        (64, 2, 2, 0.98413), (64, 2, 3, 0.95238), (64, 2, 4, 0.90554), (64, 2, 8, 0.60836),
        (128, 2, 2, 0.99213), (128, 2, 3, 0.97638), (128, 2, 4, 0.95294), (128, 2, 8, 0.79254),
        (256, 2, 2, 0.99608), (256, 2, 3, 0.98824), (256, 2, 4, 0.97652), (256, 2, 8, 0.89343),
        (512, 2, 2, 0.99804), (512, 2, 3, 0.99413), (512, 2, 4, 0.98827), (512, 2, 8, 0.94601),
        (1000, 2, 2, 0.99900), (1000, 2, 3, 0.99700), (1000, 2, 4, 0.99400), (1000, 2, 8, 0.97218),
    ],
)  # fmt: skip
def test_the_published_probabilities(machines: int, replicas: int, failed: int, probability: float) -> None:
    assert recovery_probability(machines, replicas, failed) == pytest.approx(probability, abs=5.1e-6)


@pytest.mark.parametrize(("failed", "probability"), [(2, 0.86667), (3, 0.62857), (4, 0.36264)])
def test_one_ring_of_all_would_be_worse(failed: int, probability: float) -> None:
    assert ring_survivals(16, 2, failed) / comb(16, failed) == pytest.approx(probability, abs=5.1e-6)
    assert recovery_probability(16, 2, failed) > probability


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(0, n))))
def test_the_probability_is_what_counting_gives(case: tuple[int, int, int]) -> None:
    assert recovery_probability(*case) == counted_probability(*case)


@pytest.mark.parametrize(("machines", "replicas"), [(13, 2), (14, 4), (11, 4), (12, 3), (13, 5)])
def test_the_probability_of_larger_rings_is_what_counting_gives(machines: int, replicas: int) -> None:
    for failed in range(machines + 1):
        expected = counted_probability(machines, replicas, failed)
        assert recovery_probability(machines, replicas, failed) == pytest.approx(expected, rel=1e-15)


@given(st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size), st.integers(0, size))))
def test_a_ring_survives_as_often_as_counting_says(case: tuple[int, int, int]) -> None:
    size, replicas, failed = case
    holders = tuple(tuple((place + step) % size for step in range(replicas)) for place in range(size))
    expected = sum(survives(holders, lost) for lost in combinations(range(size), failed))
    assert ring_survivals(size, replicas, failed) == expected


@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_the_bound_of_the_paper(groups: int, replicas: int, data: st.DataObject) -> None:
    """Corollary 1: certain below ``replicas`` losses, exact while two groups cannot be lost, below the truth after."""
    machines = groups * replicas
    failed = data.draw(st.integers(0, machines))
    probability = recovery_probability(machines, replicas, failed)
    if failed < replicas:
        assert probability == 1
        return
    lost = machines * comb(machines - replicas, failed - replicas) / (replicas * comb(machines, failed))
    assert probability >= max(0.0, 1 - lost) - 1e-12
    if failed < 2 * replicas:
        assert probability == pytest.approx(1 - lost, abs=1e-12)


def test_how_far_from_the_best_placement() -> None:
    """Theorem 1: at most (2m - 3) / C(N, m) below the upper bound, and nothing where groups come out even."""
    for machines, replicas in SIZES:
        subsets = comb(machines, replicas)
        upper_bound = 1 - -(-machines // replicas) / subsets
        gap = upper_bound - recovery_probability(machines, replicas, replicas)
        assert -1e-12 <= gap <= max(0, 2 * replicas - 3) / subsets + 1e-12
        assert machines % replicas or abs(gap) < 1e-12


def test_the_gap_is_reached() -> None:
    for machines, replicas, upper_bound in ((5, 2, 0.7), (8, 3, 0.94643)):
        gap = upper_bound - recovery_probability(machines, replicas, replicas)
        assert gap == pytest.approx((2 * replicas - 3) / comb(machines, replicas), abs=1e-5)


def test_hundreds_of_losses_of_a_thousand_are_counted_exactly() -> None:
    """In floats the alternating sum would lose every digit."""
    probabilities = [recovery_probability(1000, 3, failed) for failed in (0, 2, 3, 30, 300, 666, 667, 1000)]
    assert probabilities == sorted(probabilities, reverse=True)
    assert probabilities[:2] == [1.0, 1.0]
    assert 0 < probabilities[5] < probabilities[4] < probabilities[3] < probabilities[2] < 1
    assert probabilities[6:] == [0, 0], "two of each of 333 rings is the most that can be lost"


@pytest.mark.parametrize("failed", [-1, 5])
def test_more_losses_than_machines_are_refused(failed: int) -> None:
    with pytest.raises(ValueError, match="cannot be lost"):
        recovery_probability(4, 2, failed)


# Fault domains


@pytest.mark.parametrize(("machines", "replicas"), [(n, m) for n in range(2, 7) for m in range(2, min(n, 4) + 1)])
def test_domains_are_kept_apart_whenever_some_order_does(machines: int, replicas: int) -> None:
    """For every way to put machines in domains: by the placement, and by all orders of the machines."""
    in_order = placement(machines, replicas)
    for sizes in partitions(machines, machines):
        domains = tuple(domain for domain, size in enumerate(sizes) for _ in range(size))
        orders = set(permutations(domains))
        holders = placement(machines, replicas, domains)
        shared = all(sharing_domains(in_order, order) for order in orders)
        assert bool(sharing_domains(holders, domains)) == shared, domains
        fatal = all(one_domain_is_fatal(in_order, order) for order in orders)
        assert one_domain_is_fatal(holders, domains) == fatal, domains


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40), st.integers(1, 5))
def test_any_domains_leave_the_laws_of_placement(domains: list[str], replicas: int) -> None:
    machines, replicas = len(domains), min(replicas, len(domains))
    holders = placement(machines, replicas, domains)
    check_laws(holders, machines, replicas)
    assert holders == placement(machines, replicas, [domain.upper() for domain in domains]), "only equality matters"
    host_sets = len({frozenset(hosts) for hosts in holders})
    assert host_sets == len({frozenset(hosts) for hosts in placement(machines, replicas)}), "the same rings"


def test_a_good_order_is_kept() -> None:
    assert placement(6, 2, domains=list("abcdef")) == placement(6, 2)
    assert placement(4, 2, domains=list("abab")) == placement(4, 2)


def test_racks_of_a_large_cluster_are_never_shared() -> None:
    racks = [machine // 20 for machine in range(1000)]
    holders = placement(1000, 3, racks)
    assert sharing_domains(holders, racks) == ()
    assert sharing_domains(placement(1000, 3), racks) != ()
    assert all(survives(holders, range(first, first + 40)) for first in range(0, 960, 20)), "two racks at once"


def test_one_domain_for_each_machine() -> None:
    with pytest.raises(ValueError, match="3 domains for 4 machines"):
        placement(4, 2, domains=["a", "b", "c"])


# Ranks


@given(st.lists(st.integers(1, 4), min_size=2, max_size=8), st.integers(1, 3), st.randoms(use_true_random=False))
def test_ranks_replicate_to_other_machines(counts: list[int], replicas: int, random: Random) -> None:
    replicas = min(replicas, len(counts))
    ranks = list(range(sum(counts)))
    random.shuffle(ranks)
    machines = [[ranks.pop() for _ in range(count)] for count in counts]
    machine_of = {rank: machine for machine, of_machine in enumerate(machines) for rank in of_machine}
    holders, of_machines = replicas_of_ranks(machines, replicas), placement(len(counts), replicas)
    for rank, beside in enumerate(holders):
        assert beside[0] == rank
        assert tuple(machine_of[peer] for peer in beside) == of_machines[machine_of[rank]]
    if len(set(counts)) == 1:
        assert Counter(peer for beside in holders for peer in beside) == dict.fromkeys(machine_of, replicas)
        local_ranks = {rank: of_machine.index(rank) for of_machine in machines for rank in of_machine}
        assert all(local_ranks[peer] == local_ranks[beside[0]] for beside in holders for peer in beside)


@pytest.mark.parametrize("machines", [[[0, 1], [1]], [[0], [2]], [[0, 1], []], [[-1], [0]]])
def test_ranks_that_are_not_all_there_are_refused(machines: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every rank must be there once"):
        replicas_of_ranks(machines, 1)
