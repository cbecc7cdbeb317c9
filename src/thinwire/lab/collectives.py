"""Costs of collectives in the alpha-beta model: closed forms, each with its formula and source.

p is ``world_size``, m ``size_bytes``, alpha and beta the costs of ``link``: seconds a message, and seconds a byte
through the link of one rank. Links are full duplex, ranks are alike, and the summing itself is left out, as in the
sources:

- Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 2005.
- Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
- Bruck et al.: Efficient algorithms for all-to-all communications in multiport systems, IEEE TPDS 1997.
- Wang: Communication Primitives for Distributed Training Algorithms, lecture of ECE 826.

A message's size is the input of one rank, before the collective: of an all-gather and a gather the piece of one rank,
of all others the whole tensor. One rank alone costs 0 seconds. ``size_bytes`` may be an array of sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from thinwire.plan.profile import Linear

Numbers = float | np.ndarray
"""Bytes or seconds of one message, or of many that are priced at once."""

Collective = Callable[[int, Numbers, Linear], Numbers]
"""Function of (world_size, size_bytes, link) that returns seconds."""


def parameter_server(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return 2 alpha + 2 p m beta: one server gathers p gradients and broadcasts to p ranks (the lecture's table)."""
    return 2 * (world_size > 1) * (link.alpha + world_size * size_bytes * link.beta)


def ring_all_reduce(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return 2 (p - 1) alpha + 2 (p - 1)/p m beta (Patarasuk and Yuan; the lecture's table)."""
    return 2 * (world_size - 1) * (link.alpha + size_bytes / world_size * link.beta)


def tree_all_reduce(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return 2 ceil(log2 p) (alpha + m beta): a binomial tree up and then down (Thakur et al., 3.2 and 3.5)."""
    return 2 * count_rounds(world_size) * (link.alpha + size_bytes * link.beta)


def recursive_doubling_all_reduce(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    """Return log2 p (alpha + m beta): whole tensors swapped with a partner twice as far each time (Thakur et al., 3.6).

    If p is no power of two, the ranks beyond one hand over their tensors before and get the sum after: two more steps.
    """
    return (count_halvings(world_size) + 2 * is_odd(world_size)) * (link.alpha + size_bytes * link.beta)


def count_rounds(world_size: int) -> int:
    """ceil(log2 p): of a binomial tree, and of Bruck's algorithms."""
    return (world_size - 1).bit_length()


def count_halvings(world_size: int) -> int:
    """log2 of the largest power of two in p."""
    return world_size.bit_length() - 1


def is_odd(world_size: int) -> bool:
    """Whether p is no power of two, so that ranks are left over."""
    return world_size & (world_size - 1) != 0


@dataclass(frozen=True)
class CostRow:
    """One all-reduce algorithm of the cost table: seconds = rounds * alpha + link_bytes * beta.

    Attributes:
        bandwidth, latency: the factors of beta and alpha, as formulas of p and d (bytes of the tensor).
        link_bytes, rounds: the same in numbers.
    """

    algorithm: str
    bandwidth: str
    latency: str
    link_bytes: float
    rounds: float
    seconds: float


_TABLE: tuple[tuple[str, Collective, str, str], ...] = (
    ("parameter server", parameter_server, "2 p d", "2"),
    ("ring", ring_all_reduce, "2 (p - 1)/p d", "2 (p - 1)"),
    ("tree", tree_all_reduce, "2 ceil(log2 p) d", "2 ceil(log2 p)"),
    ("recursive doubling", recursive_doubling_all_reduce, "log2 p d", "log2 p"),
)


def cost_table(world_size: int, size_bytes: float, link: Linear) -> tuple[CostRow, ...]:
    """Return the lecture's table for a link: parameter server, ring, tree and recursive doubling.

    The formula of recursive doubling is that of powers of two; its numbers are right for any ``world_size``.

    Example:
        >>> [row.seconds for row in cost_table(4, 1000, Linear(alpha=1, beta=0.001))]
        [10.0, 7.5, 8.0, 4.0]
    """
    return tuple(
        CostRow(
            name,
            bandwidth,
            latency,
            link_bytes=float(algorithm(world_size, size_bytes, Linear(0.0, 1.0))),
            rounds=float(algorithm(world_size, size_bytes, Linear(1.0, 0.0))),
            seconds=float(algorithm(world_size, size_bytes, link)),
        )
        for name, algorithm, bandwidth, latency in _TABLE
    )
