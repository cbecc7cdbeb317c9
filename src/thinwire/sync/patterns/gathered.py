"""Centralization without merging on the way: the rows of all ranks reach every rank, which adds them up itself."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel
from thinwire.sync.partition import Whole
from thinwire.sync.patterns import pieces
from thinwire.sync.stages import Stage, Stages, all_gather
from thinwire.wire import Choice, Kind


def all_reduce(
    rows: SparseRows, choice: Choice, channel: Channel, scale: float, schedule: Sequence[Stage]
) -> SparseRows:
    """Collect the rows of all ranks along a schedule, and add them up in rank order; after `Channel.open`."""
    whole = Whole(rows.num_rows)
    limit = pieces.limit(whole, rows.width, rows)
    messages = all_gather(
        Stages(channel),
        schedule,
        Kind.GATHER,
        lambda: pieces.draft(choice, whole, rows, rows.ids, rows.values),
        limit,
    )
    return SparseRows.trusted(*pieces.total(messages, whole, rows.width, rows, channel, scale), rows.num_rows)
