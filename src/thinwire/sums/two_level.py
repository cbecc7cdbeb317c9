"""Schemes of two levels: ranks of one host reduce first, then hosts synchronize, so no row leaves a host twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm.channel import Channel
from thinwire.comm.hosts import Hosts, ranks_of_hosts
from thinwire.errors import deferred
from thinwire.rows.partition import FirstRanks, Partition, Permutation
from thinwire.rows.sparse import SparseRows
from thinwire.sums import direct
from thinwire.sums.direct import Piece
from thinwire.sums.scheme import Aggregation, Balance, Communication, Partitioning, Scheme, Unit, from_units, to_units

TWO_LEVEL_PREFIX = "two_level:"
WITHIN: Final = Scheme(
    Communication.POINT_TO_POINT, Aggregation.INCREMENTAL, Partitioning.PARALLELISM, Balance.BALANCED
)
"""The scheme inside a host, where each message has the format of fewest bytes; the partition is that of `shares`."""
_SEED_OFFSET = 0x2C1B3C6D
"""Offset of the seed inside a host: dealt by the same hash as between hosts, a rank's rows of one residue would all
have one owner."""

Synchronize = Callable[[SparseRows, Scheme, Channel, float], SparseRows]


@dataclass(frozen=True)
class TwoLevel:
    """A scheme between hosts, around a reduction inside each of them.

    The rows of a host are dealt evenly to its ranks, which add them up; each rank synchronizes its share with the
    ranks of the same index on the other hosts, and shares the result with its host. So all ranks of a host use its
    link, and a row crosses it as often as if the host were one rank. Hosts may differ in their numbers of ranks; then
    those beyond the smallest number only send rows and receive sums. With one rank a host this is ``between`` alone.

    Addition is in the order of the ranks inside a host, then in that of ``between`` over the hosts. Sums of a host
    travel in the dtype of the rows: sixteen-bit values are rounded there, and once more by ``between``; they can
    overflow where their mean does not.

    Args:
        between: the scheme among hosts.
        hosts: the ranks of each host, in the process group; None to discover them (`thinwire.comm.hosts`).

    Raises:
        ValueError: the scheme cannot run among some of the ranks; or a rank is on two hosts, or on none.

    Example:
        >>> TwoLevel(ZEN, hosts=((0, 1), (2, 3)))                     # doctest: +SKIP
        >>> thinwire.sparse_all_reduce(gradient, "two_level:zen")     # doctest: +SKIP
    """

    between: Scheme
    hosts: Hosts | None = None

    def __post_init__(self) -> None:
        if self.between.is_dense:
            raise ValueError(
                "the native all-reduce is of the whole process group, not of one rank of each host: use dense_ring"
                " between hosts, which sends as many bytes"
            )
        if self.hosts is not None:
            object.__setattr__(self, "hosts", tuple(tuple(ranks) for ranks in self.hosts))
            self._check_hosts(self.hosts)

    @classmethod
    def of_mesh(cls, between: Scheme, mesh: DeviceMesh) -> TwoLevel:
        """Return the scheme on a mesh of two dimensions, whose rows are hosts and whose columns the ranks of a host.

        The process group must have exactly the ranks of the mesh.

        Raises:
            ValueError: the mesh has another number of dimensions.
        """
        if mesh.ndim != 2:
            raise ValueError(
                f"the DeviceMesh has {mesh.ndim} dimensions; two levels need two: hosts, and the ranks of a host"
            )
        group_rank = {rank: group_rank for group_rank, rank in enumerate(sorted(mesh.mesh.flatten().tolist()))}
        return cls(between, tuple(tuple(group_rank[rank] for rank in ranks) for ranks in mesh.mesh.tolist()))

    def placed(self, host_of_rank: Sequence[int]) -> TwoLevel:
        """Return the scheme with its own hosts, or else with the hosts of ``host_of_rank`` (`Exchange.hosts`).

        Raises:
            ValueError: its own hosts do not have exactly the ranks of the group.
        """
        if self.hosts is None:
            return replace(self, hosts=ranks_of_hosts(host_of_rank))
        named = sum(map(len, self.hosts))
        if named != len(host_of_rank):
            raise ValueError(
                f"the hosts have {named} ranks, the process group {len(host_of_rank)}: name every rank of the group"
                " once, or leave hosts out and have them discovered"
            )
        return self

    def within(self) -> Scheme:
        """Return the scheme of one level that remains if all ranks are on one host."""
        return replace(WITHIN, seed=self.between.seed, unit=self.between.unit)

    @property
    def unit(self) -> Unit:
        """Meaning of one index, on both levels."""
        return self.between.unit

    @property
    def is_dense(self) -> bool:
        """Whether the scheme is dense, as `Scheme.is_dense`: never."""
        return False

    def describe(self) -> str:
        """Return a line that identifies the scheme, the same in every process."""
        hosts = "discovered" if self.hosts is None else " | ".join(" ".join(map(str, ranks)) for ranks in self.hosts)
        return f"two_level, hosts={hosts}, between=({self.between.describe()})"

    @staticmethod
    def _check_hosts(hosts: Hosts) -> None:
        ranks = sorted(rank for members in hosts for rank in members)
        if not hosts or not all(hosts) or ranks != list(range(len(ranks))):
            raise ValueError(
                f"hosts {hosts} must name the ranks 0 to {max(len(ranks) - 1, 0)} once each, and every host some:"
                " ranks are ranks of the process group"
            )


def flat(scheme: TwoLevel) -> Scheme | None:
    """Return the scheme of one level that is equal to a placed one (one rank a host, or one host), or None."""
    assert scheme.hosts is not None, "a scheme is placed before it runs"
    if len(scheme.hosts) == 1:
        return scheme.within()
    return scheme.between if all(len(ranks) == 1 for ranks in scheme.hosts) else None


@lru_cache(maxsize=16)
def shares(scheme: TwoLevel, num_rows: int, world_size: int) -> Partition:
    """Return the partition of ``num_rows`` rows (or units) among the ``world_size`` ranks of a host."""
    assert scheme.hosts is not None, "a scheme is placed before it runs"
    owned = Permutation(num_rows, min(map(len, scheme.hosts)), scheme.between.seed + _SEED_OFFSET)
    return owned if owned.world_size == world_size else FirstRanks(num_rows, world_size, owned)


def all_reduce(
    rows: SparseRows, scheme: TwoLevel, channel: Channel, scale: float, synchronize: Synchronize
) -> SparseRows:
    """Sum rows over all ranks, times ``scale``; ``synchronize`` runs a scheme of one level.

    All ranks first agree on the subject, because after that a rank communicates only with some of the others.

    Raises:
        ValueError: the hosts have other ranks than the group.
        PeerError, CorruptMessageError: see `Channel.swap`.
    """
    placed = channel.attempt(lambda: scheme.placed(channel.exchange.hosts))
    single = flat(placed)
    if single is not None:
        return synchronize(rows, single, channel, scale)
    units = channel.attempt(lambda: to_units(rows, scheme.unit))
    channel.max_held = units.num_rows
    if not channel.held:
        channel.open(units.ids.numel())
    return from_units(_Run(placed, channel, synchronize).sum(units, scale), rows, scheme.unit)


class _Run:
    """One run of a placed scheme that has two levels.

    A failure does not stop a rank: it takes part to the end, sends the reason in place of its messages, and raises
    then. So the reason reaches the rank's host, its partners on the other hosts, and by them theirs. Only a rank
    that cannot send it any more, because a peer or the thread of a conversation is lost, or an exchange failed in the
    middle, raises at once. Hosts may end apart, so the lane of a rank that raises hangs up.
    """

    def __init__(self, scheme: TwoLevel, channel: Channel, synchronize: Synchronize) -> None:
        assert scheme.hosts is not None, "a scheme is placed before it runs"
        self._scheme, self._channel, self._synchronize = scheme, channel, synchronize
        self._host = next(ranks for ranks in scheme.hosts if channel.rank in ranks)
        local_rank = self._host.index(channel.rank)
        linked = local_rank < min(map(len, scheme.hosts))
        self._inside = channel.among(self._host)
        self._partners = channel.among([ranks[local_rank] for ranks in scheme.hosts]) if linked else None

    def sum(self, rows: SparseRows, scale: float) -> SparseRows:
        partition = shares(self._scheme, rows.num_rows, len(self._host))
        size = partition.parts[self._inside.rank].size
        reduced = deferred(lambda: direct.reduce_scatter(rows, partition, WITHIN, self._inside, 1.0))
        total = deferred(lambda: self._between_hosts(lambda: SparseRows.trusted(*reduced()(), size), scale))
        summed = direct.all_gather(rows, total, partition, WITHIN, self._inside)
        for channel in (self._inside, self._partners):
            self._channel.saved_bytes += channel.saved_bytes if channel else 0
            for kind, formats in (channel.formats_sent if channel else {}).items():
                self._channel.formats_sent.setdefault(kind, set()).update(formats)
        return summed

    def _between_hosts(self, reduced: Callable[[], SparseRows], scale: float) -> Piece:
        """Sum this rank's share over all hosts, given its sum over this host."""
        if self._partners is None:
            rows = reduced()
        else:
            between = replace(self._scheme.between, unit=Unit.ROWS)
            rows = self._synchronize(self._partners.attempt(reduced), between, self._partners, scale)
        return rows.ids, rows.values
