"""More collectives in the alpha-beta model, beside those of `thinwire.lab.collectives`, whose conventions hold here."""

from __future__ import annotations

import numpy as np

from thinwire.lab.collectives import (
    Collective,
    Numbers,
    count_halvings,
    count_rounds,
    is_odd,
    parameter_server,
    recursive_doubling_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from thinwire.plan.profile import Linear

__all__ = ["Collective", "Numbers", "parameter_server"]


def check_size(world_size: int, size_bytes: Numbers) -> None:
    if not (isinstance(world_size, int) and world_size >= 1):
        raise ValueError(f"a collective has 1 rank or more, not {world_size!r}")
    if not (np.greater_equal(size_bytes, 0) & np.isfinite(size_bytes)).all():
        raise ValueError(f"a message has 0 bytes or more, not {size_bytes!r}")


def halving_doubling_all_reduce(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return 2 log2 p alpha + 2 (p - 1)/p m beta: recursive halving, then doubling (Rabenseifner; Thakur et al., 3.6).

    If p is no power of two, the cost is that of the largest one below, and two more whole messages.
    """
    return 2 * halving_reduce_scatter(world_size, size_bytes, link)


def all_reduce(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return the best of ring, tree, recursive doubling and halving-doubling, as a tuned library chooses."""
    algorithms = (tree_all_reduce, recursive_doubling_all_reduce, halving_doubling_all_reduce)
    least = ring_all_reduce(world_size, size_bytes, link)
    for algorithm in algorithms:
        least = np.minimum(least, algorithm(world_size, size_bytes, link))
    return least


def ring_reduce_scatter(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return (p - 1) alpha + (p - 1)/p m beta: half a ring all-reduce (Patarasuk and Yuan)."""
    return ring_all_reduce(world_size, size_bytes, link) / 2


def halving_reduce_scatter(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return log2 p alpha + (p - 1)/p m beta: recursive halving (Thakur et al., 3.4).

    If p is no power of two, the cost is that of the largest one below, and one more whole message.
    """
    check_size(world_size, size_bytes)
    steps, share = count_halvings(world_size), 1 - 0.5 ** count_halvings(world_size)
    return (steps + is_odd(world_size)) * link.alpha + (share + is_odd(world_size)) * size_bytes * link.beta


def reduce_scatter(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return the better of a ring and recursive halving."""
    ring = ring_reduce_scatter(world_size, size_bytes, link)
    return np.minimum(ring, halving_reduce_scatter(world_size, size_bytes, link))


def ring_all_gather(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return (p - 1) (alpha + m beta) for pieces of m bytes (Thakur et al., 3.1)."""
    check_size(world_size, size_bytes)
    return (world_size - 1) * (link.alpha + size_bytes * link.beta)


def all_gather(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return ceil(log2 p) alpha + (p - 1) m beta for pieces of m bytes (Bruck et al.; Thakur et al., 3.1)."""
    check_size(world_size, size_bytes)
    return count_rounds(world_size) * link.alpha + (world_size - 1) * size_bytes * link.beta


def all_to_all(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return the better of pairwise exchange and Bruck's algorithm (Thakur et al., 3.3).

    (p - 1) alpha + (p - 1)/p m beta, or ceil(log2 p) (alpha + m/2 beta), for m bytes on each rank.
    """
    check_size(world_size, size_bytes)
    pairwise = (world_size - 1) * (link.alpha + size_bytes / world_size * link.beta)
    return np.minimum(pairwise, count_rounds(world_size) * (link.alpha + size_bytes / 2 * link.beta))


def gather(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return ceil(log2 p) alpha + (p - 1) m beta: a binomial tree, for pieces of m bytes (Thakur et al., 3.2)."""
    return all_gather(world_size, size_bytes, link)


def broadcast(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return the better of a binomial tree, and scatter then all-gather (Thakur et al., 3.2).

    ceil(log2 p) (alpha + m beta), or 2 ceil(log2 p) alpha + 2 (p - 1)/p m beta.
    """
    check_size(world_size, size_bytes)
    rounds, share = count_rounds(world_size), 2 * (world_size - 1) / world_size
    tree = rounds * (link.alpha + size_bytes * link.beta)
    return np.minimum(tree, 2 * rounds * link.alpha + share * size_bytes * link.beta)


def reduce(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return the better of a binomial tree, and reduce-scatter then gather: as a broadcast (Thakur et al., 3.5)."""
    return broadcast(world_size, size_bytes, link)
