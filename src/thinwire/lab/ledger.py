"""The ledger: exact bytes that each rank sends to each other, of every scheme, before anything is sent.

It follows the ids of all ranks through a synchronization, message by message. What a rank sends in all is the sum of
its row, what leaves a host a sum over ranks elsewhere. Tests hold it equal to what is counted, to the byte. It is for
those who compare and analyze: no training enters it. Where only numbers of rows are known, `thinwire.sums.cost` has
closed forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.comm.hosts import Hosts
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.rows.formats import Header, Part, Whole
from thinwire.rows.partition import Partition
from thinwire.sums import union_shares
from thinwire.sums.cost import Pricing, is_doubling
from thinwire.sums.schedules import GATHER_SCHEDULES, REDUCE_SCHEDULES, Stage, doubling_schedule, gathering
from thinwire.sums.scheme import BLOCK_ELEMENTS, Communication, Scheme, Unit, begins_with_opening, unit_shape
from thinwire.sums.two_level import WITHIN, TwoLevel, flat, shares

Sum = Callable[[], Tensor]
"""The ids of a sum, for who asks: bytes between hosts depend on what is summed inside them."""


def pair_bytes(
    scheme: Scheme | TwoLevel, ids_per_rank: Sequence[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> list[list[int]]:
    """Return the exact bytes that each rank (row) sends to each (column) in one synchronization, headers included.

    Args:
        scheme: a scheme; what "auto" chooses costs `thinwire.comm.channel.opening_bytes` more, unless it chose before.
        ids_per_rank: for each rank its sorted unique row ids, int64. For units other than rows every element
            of these rows is taken to be not zero.

    Raises:
        ValueError: a scheme of two levels without hosts, or with hosts of other ranks; more servers than ranks.
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


def sent_bytes(
    scheme: Scheme | TwoLevel, ids_per_rank: Sequence[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> list[int]:
    """Return the exact bytes that each rank sends, by which its ``Traffic.sent_bytes`` grows; see `pair_bytes`."""
    return [sum(row) for row in pair_bytes(scheme, ids_per_rank, num_rows, width, dtype)]


def host_of_ranks(hosts: Hosts) -> list[int]:
    """Return the host number of each rank, the inverse of `ranks_of_hosts`.

    Example:
        >>> host_of_ranks(((0, 1, 3), (2, 4)))
        [0, 0, 1, 0, 1]
    """
    return [host for _, host in sorted((rank, host) for host, ranks in enumerate(hosts) for rank in ranks)]


def unit_ids(ids: Tensor, width: int, unit: Unit) -> Tensor:
    """Return the units of the rows ``ids`` (sorted, int64), as if no value of these rows were zero."""
    if unit is Unit.ROWS:
        return ids
    elements = (ids[:, None] * width + torch.arange(width)).flatten()
    if unit is Unit.ELEMENTS:
        return elements
    return torch.div(elements, BLOCK_ELEMENTS, rounding_mode="floor").unique_consecutive()


def value_lower_bound_bytes(ids_per_rank: Sequence[Tensor], row_bytes: int) -> float:
    """Return the fewest value bytes that any scheme must send, mean over ranks.

    A row that m of n ranks hold needs m - 1 messages to bring its parts together, and each of the other
    n - 1 ranks must receive the sum: at least n + m - 2 rows travel, so a rank sends on average
    (1/n) sum over the union of (n + m_i - 2) rows. Ids are not counted; network coding is outside the bound.
    """
    world_size = len(ids_per_rank)
    if world_size == 1:
        return 0.0
    _, holders = torch.cat(list(ids_per_rank)).unique(return_counts=True)
    return float((holders + world_size - 2).sum()) * row_bytes / world_size


@dataclass
class _Flow:
    """Follows the ids of all ranks through a synchronization of rows (or units), and writes down each message."""

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

    def run(self, scheme: Scheme | TwoLevel) -> Sum:
        """Fill ``pairs``, and return the sum."""
        if isinstance(scheme, TwoLevel):
            single = flat(scheme)
            return self._two_level(scheme) if single is None else self.run(single)
        scheme.num_owners(self.world_size)
        if self.world_size == 1:
            return lambda: self.ids[0]
        if begins_with_opening(scheme):
            self._open()
        if scheme.is_dense:
            return self._native()
        if scheme.knows_ids:
            return self._known_ids(scheme)
        if scheme.is_parallel:
            return self._by_owners(scheme)
        return self._doubling(scheme) if is_doubling(scheme) else self._gathered(scheme)

    def _send_to_all(self, source: int, num_bytes: int) -> None:
        row = self.pairs[source]
        row[:source] = [sent + num_bytes for sent in row[:source]]
        row[source + 1 :] = [sent + num_bytes for sent in row[source + 1 :]]

    def _open(self) -> None:
        for rank in range(self.world_size):
            self._send_to_all(rank, Header.NUM_BYTES)

    def _native(self) -> Sum:
        """Write down the native all-reduce as a ring, as it is counted; which rows are not zero is not known here."""
        moved = ring_all_reduce_bytes(self.num_rows * self.row_bytes, self.world_size)
        for rank in range(self.world_size):
            self.pairs[rank][(rank + 1) % self.world_size] += moved
        return lambda: _union(self.ids)

    def _known_ids(self, scheme: Scheme) -> Sum:
        held = tuple(ids.numel() for ids in self.ids)
        plan = union_shares.UnionPlan(held, self.num_rows, self.width, self.itemsize, scheme)
        union = plan.union(self.ids)
        for rank in range(self.world_size):
            self._send_to_all(rank, plan.swapped_ids_bytes(rank))
        for owner in range(self.world_size):
            for number, share in enumerate(plan.shares(owner)):
                self._send_to_all(owner, plan.pull_bytes(share, union.num_rows(share)))
                for rank in range(self.world_size):
                    if rank != owner:
                        count = union.pushed(share, rank)[0].numel()
                        self.pairs[rank][owner] += plan.push_bytes(share, rank, number, count)
        return lambda: union.ids

    def _gathered(self, scheme: Scheme) -> Sum:
        price, whole = Pricing(scheme.push_choice, self.row_bytes), Whole(self.num_rows)
        self._all_gather(scheme.communication, [price.message_bytes(ids.numel(), whole) for ids in self.ids])
        return lambda: _union([_arriving(price, ids, whole) for ids in self.ids])

    def _all_gather(self, communication: Communication, messages: Sequence[int]) -> None:
        """Write down how the messages of the first ranks, of so many bytes, travel to all."""
        if communication is Communication.POINT_TO_POINT:
            for rank, num_bytes in enumerate(messages):
                self._send_to_all(rank, num_bytes)
            return
        for rank in range(self.world_size):
            schedule = GATHER_SCHEDULES[communication](rank, self.world_size)
            for stage in gathering(schedule, rank, len(messages)):
                if stage.target is not None:
                    self.pairs[rank][stage.target] += sum(messages[origin] for origin in stage.sends)

    def _doubling(self, scheme: Scheme) -> Sum:
        price, whole, held = Pricing(scheme.push_choice, self.row_bytes), Whole(self.num_rows), list(self.ids)
        for stages in _in_step(doubling_schedule, self.world_size):
            sent = [_arriving(price, ids, whole) for ids in held]
            held = list(sent)
            for rank, stage in enumerate(stages):
                if stage.target is not None:
                    self.pairs[rank][stage.target] += price.message_bytes(sent[rank].numel(), whole)
                if stage.source is not None:
                    is_merged = stage.source == stage.target and stage.source < rank  # partners get the same
                    held[rank] = held[stage.source] if is_merged else _union([sent[rank], sent[stage.source]])
        return lambda: held[0]

    def _by_owners(self, scheme: Scheme) -> Sum:
        partition = scheme.rows_partition(self.num_rows, self.world_size)
        push, pull = Pricing(scheme.push_choice, self.row_bytes), Pricing(scheme.pull_choice, self.row_bytes)
        if scheme.communication is Communication.POINT_TO_POINT:
            held = self._push_directly(push, partition)
        else:
            held = self._push_in_stages(push, partition, scheme.communication)
        senders = list(zip(held, partition.parts, strict=True))
        if scheme.pull_by is not Communication.POINT_TO_POINT:
            senders = senders[: scheme.num_owners(self.world_size)]
        self._all_gather(scheme.pull_by, [pull.message_bytes(ids.numel(), part) for ids, part in senders])
        return lambda: _union([_arriving(pull, ids, part) for ids, part in senders])

    def _push_directly(self, price: Pricing, partition: Partition) -> list[Tensor]:
        """Write down what owners are sent of their parts, and return the ids of the sum of each part."""
        parts, summed = partition.parts, _dealt(_union(self.ids), partition)
        for rank, ids in enumerate(self.ids):
            counts = torch.bincount(partition.owners(ids), minlength=len(parts)).tolist()
            for owner, (count, part) in enumerate(zip(counts, parts, strict=True)):
                if summed[owner].numel() < part.size and price.is_dense(count, part):
                    summed[owner] = part.ids(torch.arange(part.size))
                if owner != rank:
                    self.pairs[rank][owner] += price.message_bytes(count, part)
        return summed

    def _push_in_stages(self, price: Pricing, partition: Partition, communication: Communication) -> list[Tensor]:
        """Write down how parts travel to their owners, and return the ids of the sum of each part."""
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
                    arriving = _arriving(price, sent[stage.source][part], parts[part])
                    held[rank][part] = _union([held[rank][part], arriving])
        return [held[owner][owner] for owner in range(self.world_size)]

    def _two_level(self, scheme: TwoLevel) -> Sum:
        """Write down what is sent inside hosts, then between the ranks of one index, and back inside hosts."""
        hosts, price = scheme.hosts, Pricing(WITHIN.push_choice, self.row_bytes)
        assert hosts is not None
        self._open()
        partitions = [shares(scheme, self.num_rows, len(ranks)) for ranks in hosts]
        reduced = []
        for ranks, partition in zip(hosts, partitions, strict=True):
            inside = self._among([self.ids[rank] for rank in ranks], self.num_rows)
            reduced.append(inside._push_directly(price, partition))
            self._add(inside, ranks)
        summed = []
        for index in range(min(map(len, hosts))):
            part, ranks = partitions[0].parts[index], [ranks[index] for ranks in hosts]
            partners = self._among([part.positions(held[index]) for held in reduced], part.size)
            total = partners.run(replace(scheme.between, unit=Unit.ROWS))
            summed.append(part.ids(total()))
            self._add(partners, ranks)
        for ranks, partition in zip(hosts, partitions, strict=True):
            owned = [*summed, *[summed[0].new_empty(0)] * (len(ranks) - len(summed))]
            inside = self._among([self.ids[rank] for rank in ranks], self.num_rows)
            sizes = [price.message_bytes(ids.numel(), part) for ids, part in zip(owned, partition.parts, strict=True)]
            inside._all_gather(Communication.POINT_TO_POINT, sizes)
            self._add(inside, ranks)
        return lambda: _union(summed)

    def _among(self, ids: Sequence[Tensor], num_rows: int) -> _Flow:
        return _Flow(ids, num_rows, self.width, self.itemsize)

    def _add(self, inner: _Flow, ranks: Sequence[int]) -> None:
        for source, row in zip(ranks, inner.pairs, strict=True):
            for target, num_bytes in zip(ranks, row, strict=True):
                self.pairs[source][target] += num_bytes


def _in_step(schedule: Callable[[int, int], list[Stage]], world_size: int) -> Iterator[tuple[Stage, ...]]:
    """Yield for each stage what all ranks do in it."""
    return zip(*(schedule(rank, world_size) for rank in range(world_size)), strict=True)


def _arriving(price: Pricing, ids: Tensor, part: Part) -> Tensor:
    """Return which rows of a part arrive where ``ids`` are sent."""
    return part.ids(torch.arange(part.size)) if price.is_dense(ids.numel(), part) else ids


def _dealt(ids: Tensor, partition: Partition) -> list[Tensor]:
    """Return the ids of each part, sorted."""
    owners = partition.owners(ids)
    counts = torch.bincount(owners, minlength=len(partition.parts)).tolist()
    return list(ids[torch.argsort(owners, stable=True)].split(counts))


def _union(ids: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(ids)).unique()
