"""Communication costs of schemes as stated in papers: bytes on the link of the busiest rank.

Time is bytes over bandwidth per rank and direction; phases follow one another. As in ZEN (OSDI'25, section 2.3 and
appendix B.1) elements are 4 bytes, an index in COO is 4 bytes too, headers, padding and latency are left out, ranks
are alike and links are full duplex. `thinwire.lab.ledger` gives the bytes that thinwire really sends.

Throughout, n is ``world_size``, M ``num_bytes`` of the dense tensor, d ``density`` of one rank's elements, and gamma
``densification``: the density of several ranks' elements together over d, from 1 to their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Densification = Callable[[int], float]
"""Function from a number of ranks to the density of their sum over that of one: 1 for one rank."""


def independent_densification(overlap: float) -> Densification:
    """Return the densification of ranks with independent uniform sets of elements.

    ``overlap`` in (0, 1] is the overlap ratio of any two of them, which is their density d, so that k ranks hold
    (1 - (1 - d)^k) / d times the elements of one.

    Example:
        >>> independent_densification(0.5)(2)
        1.5
    """
    return lambda ranks: (1 - (1 - overlap) ** ranks) / overlap


def balanced_parallelism(world_size: int, num_bytes: float, density: float, densification: float) -> float:
    """Return (n - 1) / n (gamma + 1) 2 M d: ZEN, equation 1. ``densification`` is that of all ranks."""
    return sparse_ps(world_size, num_bytes, density, densification, skewness=1.0)


def hierarchical_centralization(
    world_size: int, num_bytes: float, density: float, densification: Densification
) -> float:
    """Return the sum over i = 1 .. log2 n of gamma(2^(i - 1)) 2 M d: ZEN, equation 2.

    Raises:
        ValueError: ``world_size`` is not a power of two.
    """
    if world_size < 1 or world_size & (world_size - 1):
        raise ValueError(
            f"equation 2 of ZEN is for powers of two, not {world_size} ranks: use thinwire.sums.cost for other numbers"
        )
    stages = world_size.bit_length() - 1
    return 2 * num_bytes * density * sum(densification(2**stage) for stage in range(stages))


def sparse_ps(world_size: int, num_bytes: float, density: float, densification: float, skewness: float) -> float:
    """Return 2 (n - 1) (d + d_n) s M / n: ZEN, appendix B.1. A server on each rank has an equal range of the elements.

    Args:
        densification: densification of all ranks.
        skewness: s, the density of the densest range over that of the whole tensor, from 1 to n.
    """
    summed = densification * density
    return 2 * (world_size - 1) / world_size * (density + summed) * skewness * num_bytes


def sparse_ps_broadcast(
    world_size: int,
    num_bytes: float,
    density: float,
    densification: float,
    skewness: float,
    scatter_allgather: bool = False,
) -> float:
    """Return 2 (n - 1) s d M / n + 2 r d_n M: Sparse PS whose servers broadcast their sums (ZEN, appendix B.1).

    r is ceil(log2 n) for binomial trees, and 2 (n - 1) / n for scatter and all-gather.
    """
    push = sparse_ps(world_size, num_bytes, density, 0.0, skewness)
    rounds = 2 * (world_size - 1) / world_size if scatter_allgather else math.ceil(math.log2(world_size))
    return push + 2 * rounds * densification * density * num_bytes


def agsparse(world_size: int, num_bytes: float, density: float) -> float:
    """Return (n - 1) 2 d M: every rank receives all others' elements. From n = 1 / d on, more than a dense ring."""
    return (world_size - 1) * 2 * density * num_bytes


def dense_ring(world_size: int, num_bytes: float) -> float:
    """Return 2 (n - 1) / n M: also halving and doubling, and a dense parameter server on the ranks themselves."""
    return 2 * (world_size - 1) / world_size * num_bytes


def omnireduce(
    world_size: int,
    num_bytes: float,
    block_density: float,
    block_densification: float,
    skewness: float = 1.0,
    summed_skewness: float = 1.0,
    block_bytes: int = 1024,
) -> float:
    """Return (n - 1) / n (s d + s_n d_n) M (1 + 4 / block bytes): OmniReduce with an aggregator on each rank.

    The paper has no closed form. Densities and skewness are of blocks that are not zero, before and after the sum;
    each block has an index of 4 bytes.
    """
    summed = block_densification * block_density
    share = skewness * block_density + summed_skewness * summed
    return (world_size - 1) / world_size * share * num_bytes * (1 + 4 / block_bytes)


def zen_published(
    world_size: int, num_bytes: float, density: float, densification: float, value_bits: int = 32
) -> float:
    """Return (n - 1) / n ((1 + 32 / b) d + gamma d + 1 / b) M for values of b bits: COO in the push, hash bitmaps in
    the pull.

    See ZEN, sections 2.3 and 3.3: 2 d and 1/32 for FP32, 3 d and 1/16 for 16-bit values, where M is half.
    """
    push = (1 + 32 / value_bits) * density
    pull = densification * density + 1 / value_bits
    return (world_size - 1) / world_size * (push + pull) * num_bytes


def ring_incremental_parallelism_push(
    world_size: int, num_bytes: float, density: float, densification: Densification
) -> float:
    """Return 2 M / n times the sum over i = 1 .. n - 1 of d_i, the density of i ranks' elements (ZEN, appendix B.1).

    Only the push is included; the pull is that of `balanced_parallelism`.
    """
    merged = sum(densification(ranks) for ranks in range(1, world_size))
    return 2 * density * merged * num_bytes / world_size


def byteps(world_size: int, num_bytes: float, servers: int) -> float:
    """Return max(M, n M / k): a dense parameter server on k machines of their own, as BytePS prices it (OSDI'20,
    section 2).

    A worker sends M and receives M, a server n M / k each way. Pushes and pulls of different parts overlap, so each
    direction of a link counts once.

    Raises:
        ValueError: no servers.
    """
    if servers < 1:
        raise ValueError(f"{servers} servers cannot sum: give 1 or more, or use dense_ring for servers on the ranks")
    return max(num_bytes, world_size * num_bytes / servers)
