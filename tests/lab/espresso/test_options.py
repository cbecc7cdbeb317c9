"""The decision tree: its rules, its size, and that every path of it sums the gradients of all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from espresso.options import (
    DENSE,
    FOLLOWS,
    KINDS,
    PAIRS,
    PAPER_OPTIONS,
    PATTERNS,
    STEPS,
    Option,
    between_hosts,
    count_by_pattern,
    options,
    over_all_ranks,
)
from espresso.tasks import Pricer
from published.cluster import FLAT, INTER, INTRA, Cluster
from published.costs import CompressionCosts
from thinwire.plan.profile import Linear


def test_the_tree_has_as_many_options_as_the_paper_says() -> None:
    assert len(KINDS) == 8
    assert len(options()) == len(set(options())) == PAPER_OPTIONS == 4341


@pytest.mark.parametrize("devices", [1, 2])
def test_a_count_by_hand_agrees(devices: int) -> None:
    """Between two communications a tensor stays as it is, or is encoded, decoded, or decoded and encoded again.

    So the number of ways is a product of matrices over (uncompressed, compressed), times the pairs of collectives.
    """
    between = np.array([[1, devices], [devices, 1 + devices**2]])
    start, end = np.array([1, devices]), np.array([1, devices])
    expected = {
        pattern: int(start @ np.linalg.matrix_power(between, len(steps) - 1) @ end)
        * 2 ** sum(step == "first" for _, step in steps)
        for pattern, steps in PATTERNS.items()
    }
    assert count_by_pattern(("gpu", "cpu")[:devices]) == expected


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_path_keeps_the_rules(pattern: str) -> None:
    for option in options(patterns=(pattern,)):
        kinds = [task.kind for task in option.tasks]
        assert all(second in FOLLOWS[first] for first, second in zip(["start", *kinds], [*kinds, "end"], strict=True))
        moves = [task for task in option.tasks if task.level]
        assert [(task.level, STEPS[task.kind]) for task in moves] == list(PATTERNS[pattern])
        for level in (FLAT, INTRA, INTER):
            pair = [task.routine for task in moves if task.level == level]
            assert len(pair) != 2 or PAIRS[pair[0]] == pair[1]


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_every_path_ends_with_the_sum_of_all_ranks_on_every_rank(hosts: int, ranks_per_host: int) -> None:
    """Nothing is lost or counted twice: the whole tensor, one payload of it, uncompressed."""
    link = Linear(1e-5, 1e-9)
    pricer = Pricer([1200.0, 0.0], Cluster(hosts, ranks_per_host, link, link), _compression(ratio=0.1))
    for option in options(devices=("gpu",)):  # devices change nothing in what is held
        _, held = pricer.after(option.tasks)
        np.testing.assert_allclose(held.region, [0.0, 1200.0])
        assert (held.payloads, held.compressed) == (1, False)


def test_users_may_restrict_the_tree() -> None:
    assert {option.compressions for option in options(max_compressions=1)} == {0, 1}
    assert all(option.compressed_levels <= {INTER} for option in options(compressed_levels=frozenset({INTER})))
    assert all(option.devices <= {"cpu"} for option in options(devices=("cpu",)))
    assert all(not option.compressions for option in options(devices=()))
    assert set(options(patterns=("flat divisible",))) < set(options())


@pytest.mark.parametrize(
    "restriction",
    [
        {"devices": ("tpu",)},
        {"patterns": ("star",)},
        {"max_compressions": -1},
        {"compressed_levels": frozenset({"rack"})},
    ],
)
def test_a_restriction_that_the_tree_does_not_know_is_refused(restriction: dict) -> None:
    with pytest.raises(ValueError, match=r"tree has no|allows none"):
        options(**restriction)


@pytest.mark.parametrize(
    "option",
    [DENSE, over_all_ranks("gpu"), over_all_ranks("cpu"), between_hosts("gpu"), between_hosts("cpu", divisible=True)],
)
def test_named_options_are_paths_of_the_tree(option: Option) -> None:
    assert option in options()


def test_an_option_moves_to_another_device_and_back() -> None:
    on_gpu = set(options(devices=("gpu",)))
    for option in on_gpu:
        moved = option.on("cpu")
        assert moved in set(options(devices=("cpu",)))
        assert moved.on("gpu") == option


def test_compressed_to_the_same_size_a_divisible_scheme_moves_what_a_dense_one_does() -> None:
    """All-to-all and all-gather of codes are reduce-scatter and all-gather of sums."""
    cluster = Cluster(8, 4, intra=Linear(0, 1e-9), inter=Linear(0, 1e-8))
    pricer = Pricer([1e6], cluster, _compression(ratio=1.0))
    totals = pricer.totals([DENSE, between_hosts("gpu", divisible=True), between_hosts("gpu")])[:, 0]
    np.testing.assert_allclose(totals[0, 2:], totals[1, 2:])
    # Indivisible, each rank gets the whole shard of every other: (p - 1) m instead of 2 (p - 1)/p m.
    assert totals[2, 3] == pytest.approx(totals[0, 3] * 8 / 2)


def test_an_option_says_what_it_does() -> None:
    assert str(over_all_ranks("cpu")) == "encode on cpu, flat all_gather, decode on cpu"


def _compression(ratio: float) -> CompressionCosts:
    cost = Linear(1e-5, 1e-10)
    return CompressionCosts("test", ratio, cost, cost, cost, cost)
