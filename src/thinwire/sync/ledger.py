"""Bytes between every two ranks, also in two levels.

Bytes between each two ranks, of every scheme, before anything is sent.

`thinwire.sync.cost` says what a rank sends; here it is known to whom. Tests hold both equal to what is counted.

What two levels cost, and what crosses hosts, by one level or two; see `thinwire.sync.cost` for what a rank sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.comm.hosts import Hosts, host_of_ranks
from thinwire.comm.parcels import parcel_bytes
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.partition import Partition, Whole
from thinwire.sync import cost, staged, union_shares
from thinwire.sync.cost import Pricing
from thinwire.sync.schedules import Stage, gathering
from thinwire.sync.scheme import Aggregation, Communication, Ownership, Scheme, Unit, unit_ids, unit_shape
from thinwire.sync.staged import GATHER_SCHEDULES, REDUCE_SCHEDULES
from thinwire.sync.two_level import CHOICE, TwoLevel, flat, shares
from thinwire.wire import Header


def pair_bytes(
    scheme: Scheme | TwoLevel, ids_per_rank: Sequence[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> list[list[int]]:
    """Exact bytes that each rank (row) sends to each (column); arguments as for `thinwire.sync.cost.sent_bytes`.

    Raises:
        ValueError: a scheme of two levels without hosts, or with hosts of other ranks.
    """
    if isinstance(scheme, TwoLevel):
        if scheme.hosts is None:
            raise ValueError("which ranks are on one host is not known here: use scheme.placed(host_of_rank)")
        scheme = scheme.placed(range(len(ids_per_rank)))
    if scheme.unit is not Unit.ROWS:
        ids_per_rank = [unit_ids(ids, width, scheme.unit) for ids in ids_per_rank]
        num_rows, width = unit_shape(num_rows, width, scheme.unit)
    flow = _Flow(ids_per_rank, num_rows, width, dtype.itemsize)
    flow.run(scheme)
    return flow.pairs


@dataclass
class _Flow:
    """Follows the ids of all ranks through a synchronization of rows (or units)."""

    ids: Sequence[Tensor]
    num_rows: int
    width: int
    itemsize: int
    pairs: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.pairs = [[0] * self.world_size for _ in range(self.world_size)]

    @property
    def world_size(self) -> int:
        return len(self.ids)

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize

    def run(self, scheme: Scheme | TwoLevel) -> Tensor:
        """Fills ``pairs``; returns the ids of the sum."""
        if isinstance(scheme, TwoLevel):
            single = flat(scheme)
            return self._two_level(scheme) if single is None else self.run(single)
        scheme.num_owners(self.world_size)
        if self.world_size == 1:
            return self.ids[0]
        if cost.begins_with_opening(scheme):
            self._open()
        if scheme.is_dense:
            return self._native()
        if scheme.knows_ids:
            return self._known_ids(scheme)
        if scheme.is_parallel:
            return self._by_owners(scheme)
        if scheme.aggregation is Aggregation.INCREMENTAL and scheme.communication is Communication.HIERARCHY:
            return self._doubling(scheme)
        return self._gathered(scheme)

    def _send_to_all(self, source: int, num_bytes: int) -> None:
        for target in range(self.world_size):
            if target != source:
                self.pairs[source][target] += num_bytes

    def _open(self) -> None:
        for rank in range(self.world_size):
            self._send_to_all(rank, Header.NUM_BYTES)

    def _native(self) -> Tensor:
        """As if by a ring, which is what is counted; which rows are not zero is not known here."""
        moved = ring_all_reduce_bytes(self.num_rows * self.row_bytes, self.world_size)
        for rank in range(self.world_size):
            self.pairs[rank][(rank + 1) % self.world_size] += moved
        return _union(self.ids)

    def _known_ids(self, scheme: Scheme) -> Tensor:
        held = tuple(ids.numel() for ids in self.ids)
        by_columns = scheme.ownership is Ownership.COLUMNS
        plan = union_shares.UnionPlan(held, self.num_rows, self.width, self.itemsize, scheme.push_format, by_columns)
        union = plan.union(self.ids)
        for rank in range(self.world_size):
            self._send_to_all(rank, 0 if plan.ids_lead else parcel_bytes(plan.ids_bytes(rank)))
            for owner in range(self.world_size):
                for number, share in enumerate(plan.shares(owner)):
                    if owner == rank:
                        self._send_to_all(rank, parcel_bytes(plan.values_bytes(union.num_rows(share), share)))
                    else:
                        pushed = union.pushed(share, rank)[0].numel()
                        lead = plan.lead_bytes(rank, number)
                        self.pairs[rank][owner] += parcel_bytes(lead + plan.values_bytes(pushed, share))
        return union.ids

    def _gathered(self, scheme: Scheme) -> Tensor:
        price, whole = Pricing(scheme.push_choice, self.row_bytes), Whole(self.num_rows)
        self._all_gather(scheme.communication, [price.message_bytes(ids.numel(), whole) for ids in self.ids])
        return _union([price.arriving(ids, whole) for ids in self.ids])

    def _all_gather(self, communication: Communication, messages: Sequence[int]) -> None:
        """A message of each of the first ranks, of so many bytes, travels to all."""
        if communication is Communication.POINT_TO_POINT:
            for rank, num_bytes in enumerate(messages):
                self._send_to_all(rank, num_bytes)
            return
        for rank in range(self.world_size):
            schedule = GATHER_SCHEDULES[communication](rank, self.world_size)
            for stage in gathering(schedule, rank, len(messages)):
                if stage.target is not None:
                    self.pairs[rank][stage.target] += sum(messages[origin] for origin in stage.sends)

    def _doubling(self, scheme: Scheme) -> Tensor:
        price, whole, held = Pricing(scheme.push_choice, self.row_bytes), Whole(self.num_rows), list(self.ids)
        for stages in _in_step(staged.doubling_schedule, self.world_size):
            held = [price.arriving(ids, whole) for ids in held]
            for rank, stage in enumerate(stages):
                if stage.target is not None:
                    self.pairs[rank][stage.target] += price.message_bytes(held[rank].numel(), whole)
            held = [
                ids if stage.source is None else _union([ids, held[stage.source]])
                for ids, stage in zip(held, stages, strict=True)
            ]
        return held[0]

    def _by_owners(self, scheme: Scheme) -> Tensor:
        partition = scheme.rows_partition(self.num_rows, self.world_size)
        push, pull = Pricing(scheme.push_choice, self.row_bytes), Pricing(scheme.pull_choice, self.row_bytes)
        if scheme.communication is Communication.POINT_TO_POINT:
            held = self._push_directly(push, partition)
        else:
            held = self._push_in_stages(push, partition, scheme.communication)
        direct = scheme.pull_by is Communication.POINT_TO_POINT
        senders = list(zip(held, partition.parts, strict=True))
        if not direct:
            senders = senders[: scheme.num_owners(self.world_size)]
        self._all_gather(scheme.pull_by, [pull.message_bytes(ids.numel(), part) for ids, part in senders])
        return _union([pull.arriving(ids, part) for ids, part in senders])

    def _push_directly(self, price: Pricing, partition: Partition) -> list[Tensor]:
        """The ids of the sum of each part."""
        arriving: list[list[Tensor]] = [[] for _ in partition.parts]
        for rank, ids in enumerate(self.ids):
            for owner, (share, part) in enumerate(zip(_dealt(ids, partition), partition.parts, strict=True)):
                arriving[owner].append(price.arriving(share, part))
                if owner != rank:
                    self.pairs[rank][owner] += price.message_bytes(share.numel(), part)
        return [_union(pieces) for pieces in arriving]

    def _push_in_stages(self, price: Pricing, partition: Partition, communication: Communication) -> list[Tensor]:
        """The ids of the sum of each part."""
        parts = partition.parts
        held = [_dealt(ids, partition) for ids in self.ids]
        for stages in _in_step(REDUCE_SCHEDULES[communication], self.world_size):
            sent = [{part: held[rank][part] for part in stage.sends} for rank, stage in enumerate(stages)]
            for rank, stage in enumerate(stages):
                if stage.target is not None:
                    self.pairs[rank][stage.target] += sum(
                        price.message_bytes(ids.numel(), parts[part]) for part, ids in sent[rank].items()
                    )
                for part in stage.receives:
                    assert stage.source is not None
                    arriving = price.arriving(sent[stage.source][part], parts[part])
                    held[rank][part] = _union([held[rank][part], arriving])
        return [held[owner][owner] for owner in range(self.world_size)]

    def _two_level(self, scheme: TwoLevel) -> Tensor:
        """Inside hosts, between the ranks of one place, and back."""
        hosts, price = scheme.hosts, Pricing(CHOICE, self.row_bytes)
        assert hosts is not None
        self._open()
        partitions = [shares(scheme, self.num_rows, len(ranks)) for ranks in hosts]
        reduced = []
        for ranks, partition in zip(hosts, partitions, strict=True):
            inside = self._among([self.ids[rank] for rank in ranks], self.num_rows)
            reduced.append(inside._push_directly(price, partition))
            self._add(inside, ranks)
        summed = []
        for place in range(min(map(len, hosts))):
            part, ranks = partitions[0].parts[place], [ranks[place] for ranks in hosts]
            partners = self._among([part.positions(held[place]) for held in reduced], part.size)
            summed.append(part.ids(partners.run(replace(scheme.between, unit=Unit.ROWS))))
            self._add(partners, ranks)
        for ranks, partition in zip(hosts, partitions, strict=True):
            owned = [*summed, *[summed[0].new_empty(0)] * (len(ranks) - len(summed))]
            inside = self._among([self.ids[rank] for rank in ranks], self.num_rows)
            sizes = [price.message_bytes(ids.numel(), part) for ids, part in zip(owned, partition.parts, strict=True)]
            inside._all_gather(Communication.POINT_TO_POINT, sizes)
            self._add(inside, ranks)
        return _union(summed)

    def _among(self, ids: Sequence[Tensor], num_rows: int) -> _Flow:
        return _Flow(ids, num_rows, self.width, self.itemsize)

    def _add(self, inner: _Flow, ranks: Sequence[int]) -> None:
        for source, row in zip(ranks, inner.pairs, strict=True):
            for target, num_bytes in zip(ranks, row, strict=True):
                self.pairs[source][target] += num_bytes


def _in_step(schedule: Callable[[int, int], list[Stage]], world_size: int) -> Iterator[tuple[Stage, ...]]:
    """Of each stage what all ranks do in it."""
    return zip(*(schedule(rank, world_size) for rank in range(world_size)), strict=True)


def _dealt(ids: Tensor, partition: Partition) -> list[Tensor]:
    """The ids of each part, sorted."""
    return [ids.index_select(0, places) for _, places in partition.split(ids)]


def _union(ids: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(ids)).unique()


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
