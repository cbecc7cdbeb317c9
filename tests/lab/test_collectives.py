"""Closed forms of collectives against their algorithms, played message by message, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab.collectives import (
    Collective,
    cost_table,
    count_halvings,
    count_rounds,
    is_odd,
    parameter_server,
    recursive_doubling_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from thinwire.plan.profile import Linear

ALL = (parameter_server, ring_all_reduce, tree_all_reduce, recursive_doubling_all_reduce)
LINK = Linear(0.5, 0.25)
worlds = st.integers(1, 40)
sizes = st.integers(0, 10_000)


def near(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


def played_ring(world_size: int, size: float) -> float:
    """Reduce-scatter and all-gather: in each step every rank passes a piece to the next, all at once."""
    seconds = 0.0
    pieces = [[{rank} for _ in range(world_size)] for rank in range(world_size)]
    for step in range(world_size - 1):
        sent = [(rank, (rank - step) % world_size) for rank in range(world_size)]
        arriving = [((rank + 1) % world_size, piece, set(pieces[rank][piece])) for rank, piece in sent]
        for rank, piece, shares in arriving:
            pieces[rank][piece] |= shares
        seconds += LINK(size / world_size)
    for step in range(world_size - 1):
        sent = [(rank, (rank + 1 - step) % world_size) for rank in range(world_size)]
        arriving = [((rank + 1) % world_size, piece, set(pieces[rank][piece])) for rank, piece in sent]
        for rank, piece, shares in arriving:
            pieces[rank][piece] |= shares
        seconds += LINK(size / world_size)
    assert all(len(shares) == world_size for of_rank in pieces for shares in of_rank), "everybody has the whole sum"
    return seconds


def played_doubling(world_size: int, size: float) -> float:
    """Whole tensors swapped with partners; ranks beyond a power of two hand over before, and get the sum after."""
    core, seconds = 1, 0.0
    while 2 * core <= world_size:
        core *= 2
    shares = [{rank} for rank in range(world_size)]
    for rank in range(core, world_size):
        shares[rank - core] |= shares[rank]
    seconds += LINK(size) * (world_size > core)
    distance = 1
    while distance < core:
        shares[:core] = [shares[rank] | shares[rank ^ distance] for rank in range(core)]
        seconds += LINK(size)
        distance *= 2
    for rank in range(core, world_size):
        shares[rank] = shares[rank - core]
    seconds += LINK(size) * (world_size > core)
    assert all(len(of_rank) == world_size for of_rank in shares)
    return seconds


def played_tree(world_size: int, size: float) -> float:
    """A binomial tree: in each round everybody who knows tells one other; and the same back."""
    knowing, rounds = 1, 0
    while knowing < world_size:
        knowing, rounds = min(world_size, 2 * knowing), rounds + 1
    return 2 * rounds * LINK(size)


@given(worlds, sizes)
def test_formulas_are_what_the_algorithms_take(world_size: int, size: int) -> None:
    assert ring_all_reduce(world_size, size, LINK) == near(played_ring(world_size, size))
    assert recursive_doubling_all_reduce(world_size, size, LINK) == near(played_doubling(world_size, size))
    assert tree_all_reduce(world_size, size, LINK) == near(played_tree(world_size, size))
    server = 0.0 if world_size == 1 else 2 * LINK(world_size * size)
    assert parameter_server(world_size, size, LINK) == near(server)


@given(worlds)
def test_rounds_and_halvings_are_logarithms(world_size: int) -> None:
    assert 2 ** (count_rounds(world_size) - 1) < world_size <= 2 ** count_rounds(world_size)
    assert 2 ** count_halvings(world_size) <= world_size < 2 ** (count_halvings(world_size) + 1)
    assert is_odd(world_size) == (count_rounds(world_size) != count_halvings(world_size))


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.__name__)
def test_many_sizes_are_priced_at_once_and_one_rank_costs_nothing(form: Collective) -> None:
    many = np.array([0.0, 10.0, 1e6])
    priced = form(6, many, LINK)
    assert isinstance(priced, np.ndarray)
    assert priced.tolist() == [form(6, size, LINK) for size in many.tolist()]
    assert not np.any(form(1, many, LINK))


@given(st.integers(1, 64), sizes)
def test_a_row_of_the_table_adds_up(world_size: int, size: int) -> None:
    rows = {row.algorithm: row for row in cost_table(world_size, size, LINK)}
    assert list(rows) == ["parameter server", "ring", "tree", "recursive doubling"]
    for row in rows.values():
        assert row.seconds == near(row.rounds * LINK.alpha + row.link_bytes * LINK.beta)
    assert rows["ring"].link_bytes <= min(row.link_bytes for row in rows.values()), "no algorithm sends less"
