"""What two levels cost, and what crosses hosts, by one level or two; see `thinwire.sync.cost` for what a rank sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.sync import cost
from thinwire.sync.cost_exact import Pricing
from thinwire.sync.cost_pairs import pair_bytes
from thinwire.sync.hosts import Hosts, host_of_ranks
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import CHOICE, TwoLevel, flat, shares
from thinwire.sync.units import Unit, unit_shape
from thinwire.wire import Header


def sent_bytes(
    scheme: Scheme | TwoLevel, ids_per_rank: Sequence[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> list[int]:
    """Exact bytes that each rank sends; as `thinwire.sync.cost.sent_bytes`, for schemes of two levels too."""
    if isinstance(scheme, Scheme):
        return cost.sent_bytes(scheme, ids_per_rank, num_rows, width, dtype)
    return [sum(row) for row in pair_bytes(scheme, ids_per_rank, num_rows, width, dtype)]


def expected_bytes(
    scheme: Scheme | TwoLevel,
    world_size: int,
    num_rows: int,
    row_bytes: int,
    count: float,
    union: float,
    itemsize: int = 4,
) -> float:
    """Bytes that the busiest rank sends when rows are dealt evenly; as `thinwire.sync.cost.expected_bytes`."""
    single = flat(scheme) if isinstance(scheme, TwoLevel) else scheme
    if single is not None:
        return cost.expected_bytes(single, world_size, num_rows, row_bytes, count, union, itemsize)
    assert isinstance(scheme, TwoLevel)
    assert scheme.hosts is not None
    num_units, unit_width = unit_shape(num_rows, row_bytes // itemsize, scheme.unit)
    unit_bytes = unit_width * itemsize
    held, total = (min(float(num_units), rows * row_bytes / unit_bytes) for rows in (count, union))
    most, linked = max(map(len, scheme.hosts)), min(map(len, scheme.hosts))
    of_host = held * (total / held) ** (math.log(most) / math.log(world_size)) if held else 0.0
    part = shares(scheme, num_units, most).parts[0]
    price = Pricing(CHOICE, unit_bytes)
    push = (linked - 1) * price.message_bytes(round(held / linked), part) + (most - linked) * Header.NUM_BYTES
    pull = (most - 1) * price.message_bytes(round(total / linked), part)
    between = cost.expected_bytes(
        replace(scheme.between, unit=Unit.ROWS),
        len(scheme.hosts),
        part.size,
        unit_bytes,
        of_host / linked,
        total / linked,
        itemsize,
    )
    return cost.opening_bytes(world_size) + push + between + pull


def between_hosts_bytes(
    scheme: Scheme | TwoLevel,
    hosts: Hosts,
    ids_per_rank: Sequence[Tensor],
    num_rows: int,
    width: int,
    dtype: torch.dtype,
) -> list[int]:
    """Exact bytes that the ranks of each host send to other hosts, in one synchronization of the given rows.

    It equals what ``Traffic.sent_between_hosts_bytes`` of the ranks of a host grows by. Arguments as for
    `thinwire.sync.cost.sent_bytes`; ``hosts`` are the ranks of each host.
    """
    if isinstance(scheme, TwoLevel):
        scheme = scheme.placed(host_of_ranks(hosts))
    pairs = pair_bytes(scheme, ids_per_rank, num_rows, width, dtype)
    host = host_of_ranks(hosts)
    totals = [0] * len(hosts)
    for source, row in enumerate(pairs):
        totals[host[source]] += sum(sent for target, sent in enumerate(row) if host[target] != host[source])
    return totals
