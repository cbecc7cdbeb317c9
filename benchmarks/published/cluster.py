"""Description of a cluster: hosts of several ranks each, a link inside a host and a link between hosts.

Three kinds of collectives run on it (Espresso, EuroSys'23, section 2.1): inside each host ("intra"), between hosts
("inter": equal local ranks of all hosts together, side by side on the host's one link), and over all ranks ("flat").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from published import collectives
from thinwire.lab.collectives import Collective, CostRow, Numbers, cost_table
from thinwire.plan.profile import Linear

__all__ = ["FLAT", "INTER", "INTRA", "Cluster", "CostRow", "cost_table"]

INTRA, INTER, FLAT = "intra", "inter", "flat"

_COLLECTIVES: dict[str, Collective] = {
    "all_reduce": collectives.all_reduce,
    "reduce_scatter": collectives.reduce_scatter,
    "all_gather": collectives.all_gather,
    "all_to_all": collectives.all_to_all,
    "gather": collectives.gather,
    "broadcast": collectives.broadcast,
    "reduce": collectives.reduce,
}


def _flat_all_reduce(world_size: int, size_bytes: Numbers, link: Linear) -> Numbers:
    ring = collectives.ring_all_reduce(world_size, size_bytes, link)
    return np.minimum(ring, collectives.tree_all_reduce(world_size, size_bytes, link))


# Rings and trees of neighbours cross a host's link once for all its ranks; the swaps at a distance do not.
_FLAT_COLLECTIVES = _COLLECTIVES | {
    "all_reduce": _flat_all_reduce,
    "reduce_scatter": collectives.ring_reduce_scatter,
    "all_gather": collectives.ring_all_gather,
}


_FREE = Linear(0.0, 0.0)


@dataclass(frozen=True)
class Cluster:
    """A cluster of hosts with the same number of ranks each.

    Args:
        hosts: number of hosts, 1 or more.
        ranks_per_host: ranks of each host, 1 or more; one accelerator each.
        intra: cost of one rank's link to the others of its host.
        inter: cost of one host's link to the others, which its ranks share.
        host_copy: cost of moving a tensor between accelerator and host memory, for compression by processors.
        name: name for tables.

    Raises:
        ValueError: numbers below 1, or costs that are no Linear.

    Example:
        >>> cluster = Cluster(8, 4, intra=Linear(1e-5, 1e-10), inter=Linear(5e-5, 8e-10))
        >>> cluster.world_size, cluster.seconds("inter", "all_gather", 1000, ranks=4) > 0
        (32, True)
    """

    hosts: int
    ranks_per_host: int
    intra: Linear
    inter: Linear
    host_copy: Linear = _FREE
    name: str = ""

    def __post_init__(self) -> None:
        for what in ("hosts", "ranks_per_host"):
            value = getattr(self, what)
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{what} is {value!r}: a cluster has 1 or more")
        for what in ("intra", "inter", "host_copy"):
            if not isinstance(getattr(self, what), Linear):
                raise ValueError(f"{what} is {getattr(self, what)!r}: give a Linear(alpha, beta)")

    @cached_property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    def participants(self, level: str) -> int:
        """Return the number of ranks in one collective."""
        return {INTRA: self.ranks_per_host, INTER: self.hosts, FLAT: self.world_size}[level]

    def link(self, level: str) -> str:
        """Return the link that a collective of this level keeps busy: "intra" or "inter"."""
        return INTRA if level == INTRA or self.hosts == 1 else INTER

    def seconds(self, level: str, routine: str, size_bytes: Numbers, ranks: int = 1) -> Numbers:
        """Return the seconds of one collective.

        Args:
            level: "intra", "inter" or "flat".
            routine: "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "gather", "broadcast" or "reduce".
            size_bytes: input of one rank, or an array of inputs; of all_gather and gather its piece.
            ranks: for level "inter": number of ranks of a host that do the same at once, on one link.

        Raises:
            KeyError: another level or routine.
        """
        crossing = level == FLAT and self.hosts > 1
        collective = (_FLAT_COLLECTIVES if crossing else _COLLECTIVES)[routine]
        if self.link(level) == INTRA:
            return collective(self.participants(level), size_bytes, self.intra)
        share = self._crossing(routine) if crossing else ranks
        return collective(self.participants(level), size_bytes, _shared(self.inter, share))

    def _crossing(self, routine: str) -> float:
        """Bytes on a host's link over bytes on a rank's link in a flat collective, ranks numbered host by host."""
        away = self.world_size - self.ranks_per_host
        if routine == "all_to_all":  # each rank of the host sends to each rank of the others
            return self.ranks_per_host * away / (self.world_size - 1)
        return away / (self.world_size - 1) if routine == "gather" else 1.0


@cache
def _shared(link: Linear, ranks: float) -> Linear:
    """The share of each of ``ranks`` ranks in a link."""
    return Linear(link.alpha, link.beta * ranks)
