"""Assignment of shards to the machines that hold their copies, and the probability that a copy survives.

GEMINI (Wang et al., SOSP'23), section 4 and Algorithm 1, the mixed strategy: groups of ``replicas`` machines that keep
each other's shards, and one ring of the remaining machines. A group is a ring too, of ``replicas``
machines: in every ring a machine keeps its own shard and sends it to the next ``replicas - 1``.
"""

from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import comb

Holders = tuple[tuple[int, ...], ...]


def placement(machines: int, replicas: int, domains: Sequence[Hashable] | None = None) -> Holders:
    """Return the holders of each machine's shard: the machine itself first, then those to which it sends.

    Every machine holds exactly ``replicas`` shards, sends ``replicas - 1`` and receives ``replicas - 1``.

    Args:
        machines: number of machines, at least ``replicas``.
        replicas: copies of each shard, including the machine's own. 1 sends nothing.
        domains: the failure domain of each machine (a rack, a switch, a power supply): one label a machine. Machines
            that keep each other's shards are in different domains if some order of the machines allows that for all of
            them, and else dealt out so evenly that the loss of one domain leaves a copy of every shard if some order
            allows that. `sharing_domains` lists the remaining risks. The same labels give the same placement on every
            rank; the order of the machines is kept where it is good already.

    Raises:
        ValueError: less than one replica, more replicas than machines, or not one domain for each machine.

    Example:
        >>> placement(5, 2)
        ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))
        >>> placement(4, 2, domains=["rack a", "rack a", "rack b", "rack b"])
        ((0, 2), (1, 3), (2, 0), (3, 1))
    """
    sizes = ring_sizes(machines, replicas)
    bounds = [0, *accumulate(sizes)]
    in_order = _holders([range(first, last) for first, last in pairwise(bounds)], replicas)
    if domains is None:
        return in_order
    if len(domains) != machines:
        raise ValueError(f"{len(domains)} domains for {machines} machines: name one for each machine")
    if not sharing_domains(in_order, domains):
        return in_order
    return _holders(_spread_rings(sizes, domains), replicas)


def ring_sizes(machines: int, replicas: int) -> tuple[int, ...]:
    """Return the number of machines in each ring: groups of ``replicas``, the last one with the remainder.

    Raises:
        ValueError: less than one replica, or more replicas than machines.

    Example:
        >>> ring_sizes(7, 2)
        (2, 2, 3)
    """
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: a shard has at least one copy, the one of its own machine")
    if machines < replicas:
        raise ValueError(
            f"{replicas} replicas need {replicas} machines and there are {machines}:"
            f" pass replicas={max(1, machines)} or less, or add machines"
        )
    groups, remainder = divmod(machines, replicas)
    return (replicas,) * (groups - 1) + (replicas + remainder,)


def replicas_of_ranks(
    ranks_of_machines: Sequence[Sequence[int]], replicas: int, domains: Sequence[Hashable] | None = None
) -> Holders:
    """Return for each rank the ranks beside whose state its shard is held: itself first.

    The j-th rank of a machine goes to the j-th ranks of other machines, so that all network interfaces work, and the
    loss of a machine costs one copy of a shard, never two. To a machine with fewer ranks, j wraps around.

    Args:
        ranks_of_machines: the ranks on each machine, in the order of their local ranks.

    Raises:
        ValueError: the ranks are not 0 to world_size - 1, each once, a machine has none, or `placement` refuses.

    Example:
        >>> replicas_of_ranks([[0, 1], [2, 3]], replicas=2)
        ((0, 2), (1, 3), (2, 0), (3, 1))
    """
    ranks = sorted(rank for of_machine in ranks_of_machines for rank in of_machine)
    if ranks != list(range(len(ranks))) or not all(ranks_of_machines):
        raise ValueError(f"ranks of machines {ranks_of_machines}: every rank must be there once, and no machine empty")
    holders: list[tuple[int, ...]] = [()] * len(ranks)
    for hosts in placement(len(ranks_of_machines), replicas, domains):
        for local_rank, rank in enumerate(ranks_of_machines[hosts[0]]):
            peers = (ranks_of_machines[host] for host in hosts[1:])
            holders[rank] = (rank, *(peer[local_rank % len(peer)] for peer in peers))
    return tuple(holders)


def sharing_domains(holders: Holders, domains: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the machines whose shards have two copies in one domain, so that one loss costs both.

    Example:
        >>> sharing_domains(placement(4, 2), ["rack a", "rack a", "rack b", "rack c"])
        (0, 1)
    """
    return tuple(
        machine for machine, hosts in enumerate(holders) if len({domains[host] for host in hosts}) < len(hosts)
    )


def recovery_probability(machines: int, replicas: int, failed: int) -> float:
    """Return the probability that every shard has a copy left if any ``failed`` of the machines are lost at once.

    It is exact for the result of `placement`, with any domains: integers up to the last division. It equals the bound
    of the paper (Corollary 1) where ``replicas`` divides ``machines`` and less than two groups can be lost; elsewhere
    that is a lower bound.

    Raises:
        ValueError: `placement` refuses, or not 0 <= failed <= machines.

    Example:
        >>> round(recovery_probability(16, 2, 2), 5)
        0.93333
    """
    *groups, ring = ring_sizes(machines, replicas)
    if not 0 <= failed <= machines:
        raise ValueError(f"{failed} of {machines} machines cannot be lost")
    good = sum(
        ring_survivals(ring, replicas, in_ring) * _group_survivals(len(groups), replicas, failed - in_ring)
        for in_ring in range(min(ring, failed) + 1)
    )
    return float(Fraction(good, comb(machines, failed)))


def ring_survivals(size: int, replicas: int, failed: int) -> int:
    """Return the number of ways to lose ``failed`` machines of one ring such that every shard has a copy left.

    That is, no ``replicas`` neighbours are lost. Cut at a machine that is left, the ring is a sequence of runs of lost
    machines, one after each machine that is left, all shorter than ``replicas``. Such sequences at all cuts meet
    every set once for each machine that is left.
    """
    left = size - failed
    if left == 0:
        return 0
    runs = sum(
        (-1) ** long * comb(left, long) * comb(failed - long * replicas + left - 1, left - 1)
        for long in range(min(left, failed // replicas) + 1)
    )
    return size * runs // left


def _group_survivals(groups: int, replicas: int, failed: int) -> int:
    """The same for groups: none of them is lost whole, by inclusion and exclusion of those that are."""
    machines = groups * replicas
    return sum(
        (-1) ** whole * comb(groups, whole) * comb(machines - whole * replicas, failed - whole * replicas)
        for whole in range(min(groups, failed // replicas) + 1)
    )


def _holders(rings: Sequence[Sequence[int]], replicas: int) -> Holders:
    holders: list[tuple[int, ...]] = [()] * sum(len(ring) for ring in rings)
    for ring in rings:
        for index, machine in enumerate(ring):
            holders[machine] = tuple(ring[(index + step) % len(ring)] for step in range(replicas))
    return tuple(holders)


def _spread_rings(sizes: Sequence[int], domains: Sequence[Hashable]) -> list[list[int]]:
    """Machines dealt to rings, domain after domain, the largest first.

    Each goes to a ring that does not have its domain yet, the one with most room, which separates all of them wherever
    that is possible (Gale and Ryser); else to the one with most room.
    """
    room = list(sizes)
    rings: list[list[int]] = [[] for _ in sizes]
    for domain in sorted(_by_domain(range(len(domains)), domains), key=len, reverse=True):
        without = [True] * len(sizes)
        for machine in domain:
            ring = max((ring for ring in range(len(sizes)) if room[ring]), key=lambda ring: (without[ring], room[ring]))
            rings[ring].append(machine)
            without[ring] = False
            room[ring] -= 1
    return [_spread_evenly(ring, domains) for ring in rings]


def _by_domain(machines: Iterable[int], domains: Sequence[Hashable]) -> list[list[int]]:
    """The machines of each domain, in their order."""
    members: dict[Hashable, list[int]] = {}
    for machine in machines:
        members.setdefault(domains[machine], []).append(machine)
    return list(members.values())


def _spread_evenly(ring: list[int], domains: Sequence[Hashable]) -> list[int]:
    """Machines of one domain at even distances in the ring: one domain after the other, the largest last."""
    spread: list[int] = []
    for domain in sorted(_by_domain(ring, domains), key=len):
        positions = [
            ((index + 0.5) / len(part), machine) for part in (domain, spread) for index, machine in enumerate(part)
        ]
        spread = [machine for _, machine in sorted(positions, key=lambda index: index[0])]
    return spread
