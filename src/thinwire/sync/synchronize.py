"""Run a scheme: the one entrance to exact synchronization."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from thinwire.kernels import nonzero_rows
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel
from thinwire.sync.choose import choose
from thinwire.sync.named import resolve
from thinwire.sync.patterns import columns, hierarchy, point_to_point, ring
from thinwire.sync.scheme import Aggregation, Communication, Ownership, Partitioning, Scheme
from thinwire.sync.units import from_units, to_units


def agree(prepare: Callable[[], SparseRows], scheme: str | Scheme, channel: Channel) -> tuple[SparseRows, Scheme]:
    """This rank's rows, and the scheme that all ranks will run on them.

    Args:
        prepare: makes this rank's rows. If it raises, every rank raises, none waits.
        scheme: a Scheme, its name, or "auto" for the cheapest by the numbers of rows that the ranks hold.

    Raises:
        MismatchError, PeerError: see `Channel.open`; whatever ``prepare`` raises, on this rank.
    """
    rows, point = channel.attempt(lambda: (prepare(), resolve(scheme)))
    if point is None or point.is_dense:
        counts = channel.open(rows.ids.numel())
        point = point or choose(counts, rows.num_rows, rows.width, rows.values.element_size())
    return rows, point


def synchronize(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float = 1.0) -> SparseRows:
    """Sum rows over all ranks of a channel, times ``scale``; after `agree`. The same bits on every rank.

    Raises:
        PeerError, CorruptMessageError: see `Channel.swap`.
    """
    if channel.world_size == 1:
        return SparseRows.trusted(rows.ids, rows.values * scale, rows.num_rows)
    if scheme.is_dense:
        return _through_dense(rows, channel, scale)
    units = channel.attempt(lambda: to_units(rows, scheme.unit))
    if scheme.communication is Communication.POINT_TO_POINT:
        total = _directly(units, scheme, channel, scale)
    else:
        channel.open(units.ids.numel())  # in a stage only two ranks hear of each other: settle the rest before
        total = _in_stages(units, scheme, channel, scale)
    return from_units(total, rows, scheme.unit)


def _in_stages(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float) -> SparseRows:
    in_ring = scheme.communication is Communication.RING
    if scheme.aggregation is Aggregation.ONE_SHOT:
        pattern = ring if in_ring else hierarchy
        return pattern.all_reduce_at_once(rows, scheme.push_format, channel, scale)
    if not in_ring:
        return hierarchy.all_reduce(rows, scheme.push_format, channel, scale)
    partition = scheme.rows_partition(rows.num_rows, channel.world_size)
    return ring.all_reduce(rows, partition, scheme.push_format, scheme.pull_format, channel, scale)


def _directly(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float) -> SparseRows:
    if scheme.partition is Partitioning.CENTRALIZATION:
        return point_to_point.all_reduce(rows, scheme.push_format, channel, scale)
    if scheme.ownership is Ownership.COLUMNS:
        return columns.all_reduce(rows, scheme.push_format, channel, scale)
    partition = scheme.rows_partition(rows.num_rows, channel.world_size)
    total = point_to_point.reduce_scatter(rows, partition, scheme.push_format, channel, scale)
    return point_to_point.all_gather(rows, total, partition, scheme.pull_format, channel)


def dense_all_reduce(tensor: Tensor, channel: Channel, scale: float = 1.0) -> None:
    """Sum a dense tensor over the ranks in place, by the group's own algorithm; after `Channel.open`.

    It is scaled before it is summed, as DDP does, because the group adds sixteen-bit values in sixteen bits.
    """
    if scale != 1.0:
        tensor.mul_(scale)
    channel.all_reduce(tensor)


def _through_dense(rows: SparseRows, channel: Channel, scale: float) -> SparseRows:
    dense = rows.to_dense()
    dense_all_reduce(dense, channel, scale)
    ids = nonzero_rows(dense)
    return SparseRows.trusted(ids, dense.index_select(0, ids), rows.num_rows)
