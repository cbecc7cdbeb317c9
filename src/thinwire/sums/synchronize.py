"""The entry point of exact synchronization: agree on a scheme, and run it."""

from collections.abc import Callable

from torch import Tensor

from thinwire.comm.channel import Channel
from thinwire.kernels import nonzero_rows
from thinwire.rows.sparse import SparseRows
from thinwire.sums import direct, known_ids, staged, two_level
from thinwire.sums.named import resolve
from thinwire.sums.schedules import Stages
from thinwire.sums.scheme import Aggregation, Communication, Scheme, Unit, begins_with_opening, from_units, to_units
from thinwire.sums.two_level import TwoLevel


def agree(
    prepare: Callable[[], SparseRows],
    scheme: str | Scheme | TwoLevel,
    channel: Channel,
    choose: Callable[[SparseRows, Channel], Scheme | TwoLevel],
) -> tuple[SparseRows, Scheme | TwoLevel]:
    """Return this rank's rows, and the scheme that all ranks will run on them.

    Args:
        prepare: makes this rank's rows. If it raises, every rank raises, and none waits.
        scheme: a Scheme, its name, or "auto" for the choice of ``choose`` from the numbers of rows of all ranks.
        choose: chooses the scheme, the same one on all ranks, after `Channel.open`.

    Raises:
        MismatchError, PeerError: see `Channel.open`; this rank raises what ``prepare`` raises.
    """
    rows, point = channel.attempt(lambda: (prepare(), _resolved(scheme, channel)))
    channel.max_held = rows.num_rows
    if point is None or point.is_dense:
        channel.open(rows.ids.numel())
        point = point or choose(rows, channel)
    return rows, point


def placed(point: Scheme | TwoLevel, channel: Channel) -> Scheme | TwoLevel:
    """Return the scheme with the hosts of these ranks, unless it names hosts itself."""
    return point.placed(channel.exchange.hosts) if isinstance(point, TwoLevel) else point


def _resolved(scheme: str | Scheme | TwoLevel, channel: Channel) -> Scheme | TwoLevel | None:
    point = scheme if isinstance(scheme, (Scheme, TwoLevel)) else resolve(scheme)
    return None if point is None else placed(point, channel)


def synchronize(rows: SparseRows, scheme: Scheme | TwoLevel, channel: Channel, scale: float = 1.0) -> SparseRows:
    """Sum rows over all ranks of a channel, times ``scale``, to the same bits on every rank; after `agree`.

    Raises:
        PeerError, CorruptMessageError: see `Channel.swap`.
        ValueError: the scheme has more servers than there are ranks.
    """
    if channel.codes_values and scale != 1.0 and not scheme.is_dense and rows.values.element_size() > 2:
        # A mean has few zero bits, unless n is a power of two. (Narrower values are scaled before they are rounded.)
        total = synchronize(rows, scheme, channel)
        return SparseRows.trusted(total.ids, total.values.mul_(scale), total.num_rows)
    if isinstance(scheme, TwoLevel):
        return two_level.all_reduce(rows, scheme, channel, scale, synchronize)
    channel.attempt(lambda: scheme.num_owners(channel.world_size))
    if channel.world_size == 1:
        return SparseRows.trusted(rows.ids, rows.values * scale, rows.num_rows)
    if scheme.is_dense:
        return _through_dense(rows, channel, scale)
    units = channel.attempt(lambda: to_units(rows, scheme.unit))
    channel.max_held = units.num_rows
    if begins_with_opening(scheme) and (scheme.unit is not Unit.ROWS or not channel.held):
        channel.open(units.ids.numel())  # columns need the sizes; and in a stage only two ranks communicate
    return from_units(_summed(units, scheme, channel, scale), rows, scheme.unit)


def _summed(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float) -> SparseRows:
    if scheme.knows_ids:
        return known_ids.all_reduce(rows, scheme, channel, scale)
    if scheme.is_parallel:
        return _by_owners(rows, scheme, channel, scale)
    if scheme.communication is Communication.HIERARCHY and scheme.aggregation is Aggregation.INCREMENTAL:
        return staged.recursive_doubling(rows, scheme.push_choice, channel, scale)
    return direct.all_reduce(rows, scheme, channel, scale)


def _by_owners(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float) -> SparseRows:
    partition, stages = scheme.rows_partition(rows.num_rows, channel.world_size), None
    if scheme.communication is Communication.POINT_TO_POINT:
        total = direct.reduce_scatter(rows, partition, scheme, channel, scale)
    else:
        stages = Stages(channel)
        total = staged.reduce_scatter(rows, partition, scheme, stages, scale)
    return direct.all_gather(rows, total, partition, scheme, channel, stages)


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
