"""Exact sums of sparse gradients on their device, by collectives of the model's own process group.

All tables of a step share each message. Those with rows of the same width and dtype are stacked, one below the other:
they are dealt, coded and summed as one matrix, because each operation that is launched costs the host some 6 us. The
host waits twice:

1. Each rank finds its non-zero rows, into as much memory as the last step suggests, and deals them to owners.
2. A record of counts goes to each rank; the host waits for it. It also carries a digest of what is summed and of the
   number of the step, and whether a rank failed or holds ids that no table has. All ranks know who ran out of memory.
3. An all-to-all of exact sizes takes rows to their owners, coded as both ends expect from the counts (`sync.pieces`).
4. Owners add up in rank order: the same bits as `thinwire.sums.synchronize.synchronize`.
5. The numbers of rows in the sums go to all ranks; the host waits for them. Then an all-gather of the sums.

Under centralization the gather is in step 3, and nothing is left for step 5 but to agree that it arrived whole.

With two levels (`thinwire.sums.two_level`) the owners of steps 1 to 4 are the ranks of a host, and the last gather is
inside it. In between, each rank takes its share through steps 1 to 4 again, with the ranks of the same index on the
other hosts: `_Share`. So the host waits three times. All messages of a phase are one all-to-all of the whole group, in
which ranks that have nothing for each other send nothing; so all ranks learn of a failure at the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import first_difference
from thinwire.comm.collectives import Collectives, Numbers, gathered_bytes
from thinwire.comm.hosts import Hosts
from thinwire.comm.process_group import check_fits, ring_all_reduce_bytes
from thinwire.errors import CorruptHeaderError, CorruptMessageError, MismatchError, PeerError, in_exchange, told
from thinwire.rows.formats import FormatChoice, digest64
from thinwire.rows.partition import Partition
from thinwire.rows.sparse import Layout, SparseRows, check_dtype
from thinwire.sums.named import NAMED
from thinwire.sums.pieces import FORMATS, CodedPiece, Coding
from thinwire.sums.schedules import Attempts
from thinwire.sums.scheme import Aggregation, Communication, Ownership, Scheme, Unit
from thinwire.sums.two_level import TwoLevel, flat, shares

TABLES_OF_A_RECORD = 64
"""Records have room for a multiple of this many tables. Before it changes, a record of the old size goes out, so that
ranks that sum other tables can tell each other so."""
_CHECK, _DIGEST, _NOTE, _CORRUPT, _FIXED = range(5)
SLACK_ROWS = 256
STARTS_KEPT = 64
_NEEDS_HOST = (Ownership.HIERARCHICAL_HASH, Ownership.COLUMNS, Ownership.UNION)

T = TypeVar("T")
Pieces = Sequence[Sequence[CodedPiece]]
"""For each stack of tables, the piece of each rank, or for each rank."""


@dataclass(frozen=True, eq=False)
class NamedGradient:
    """A gradient to sum: its name, which is the same on all ranks, and the tensor.

    The tensor is dense, contiguous, [num_rows, ...], and its sum is written in place; or it is COO, and not changed.
    """

    name: str
    gradient: Tensor

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.gradient)


@dataclass(frozen=True)
class Counts:
    """Rows of a table in a step: those that each rank held, and those in the sum; all of them where it went dense.

    With two levels also those of each rank's share after the sum inside of its host.
    """

    held: tuple[int, ...]
    union: int
    shares: tuple[int, ...] = ()


def refusal(scheme: Scheme | TwoLevel) -> str:
    """Return why a scheme does not run on the collectives of a process group, or "" if it does.

    Example:
        >>> from thinwire import schemes
        >>> refusal(schemes.ZEN), refusal(schemes.SPARCML)
        ('', 'it sends in stages, between pairs of ranks')
    """
    if isinstance(scheme, TwoLevel):
        is_uneven = len(set(map(len, scheme.hosts or ()))) > 1
        return "its hosts have different numbers of ranks" if is_uneven else refusal(scheme.between)
    if scheme.is_dense:
        return ""
    direct, ids = Communication.POINT_TO_POINT, FORMATS[:-1]
    is_staged = not scheme.communication is scheme.pull_by is direct
    if not scheme.is_parallel:  # a ring is what the group's own all-gather may be
        is_staged = scheme.aggregation is not Aggregation.ONE_SHOT or scheme.communication is Communication.HIERARCHY
    reasons = {
        f"it indexes {scheme.unit}, and only rows are found without a copy of the tensor": scheme.unit is not Unit.ROWS,
        "it sends in stages, between pairs of ranks": is_staged,
        f"{scheme.ownership} ownership needs tables on the host": scheme.ownership in _NEEDS_HOST,
        "it switches to dense messages": scheme.dense_switch,
        f"a device codes only {' and '.join(ids)} for ids": any(
            set(ids).isdisjoint(formats) for formats in (scheme.push_format, scheme.pull_format)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class TablePlan:
    """What is the same in every step about one table: see `plan`.

    Args:
        sizes: rows of each part: that of each owner, or under centralization that of all ranks' one part.
        push, pull: how pieces are coded on the way to their owner (or to all) and back.
        groups: the ranks among whom rows are dealt and summed, if not all together: those of each host, or those of
            the same index on all hosts.
    """

    scheme: Scheme | TwoLevel
    num_rows: int
    partition: Partition | None
    sizes: tuple[int, ...]
    push: Coding
    pull: Coding
    groups: Hosts = ()

    def ranks(self, rank: int, world_size: int) -> Sequence[int]:
        """Return the ranks among whom this rank's rows are dealt and summed, in the order of addition."""
        return next((ranks for ranks in self.groups if rank in ranks), range(world_size))

    def between(self, index: int) -> TablePlan:
        """Return the plan between hosts of the share of the rank of this index on each of them."""
        assert isinstance(self.scheme, TwoLevel)
        below = plan(self.scheme.between, self.sizes[index], self.push.width, self.push.dtype, len(self.groups))
        return replace(below, groups=tuple(zip(*self.groups, strict=True)))


@lru_cache(maxsize=4096)
def plan(scheme: Scheme | TwoLevel, num_rows: int, width: int, dtype: torch.dtype, world_size: int) -> TablePlan:
    """Return the plan of a table [num_rows, width], or of a stack of tables, of all of its rows.

    Raises:
        ValueError: the scheme does not run here; or it has more servers than there are ranks.
    """
    reason = refusal(scheme)
    if reason:
        runs = ", ".join(name for name, point in NAMED.items() if not refusal(point))
        raise ValueError(f"{scheme!r} does not run on the collectives of a process group, because {reason}: use {runs}")
    check_dtype(dtype)
    single = flat(scheme) if isinstance(scheme, TwoLevel) else scheme
    if single is None:
        assert isinstance(scheme, TwoLevel)
        assert scheme.hosts is not None
        within = shares(scheme, num_rows, len(scheme.hosts[0]))
        coding = Coding(FormatChoice(FORMATS), width, dtype)
        sizes = tuple(part.size for part in within.parts)
        return TablePlan(scheme, num_rows, within, sizes, coding, coding, scheme.hosts)
    scheme = single
    partition = scheme.rows_partition(num_rows, world_size) if scheme.is_parallel else None
    sizes = (num_rows,) if partition is None else tuple(part.size for part in partition.parts)
    push, pull = (
        Coding(FormatChoice(tuple(format for format in formats if format in FORMATS)), width, dtype)
        for formats in (scheme.push_format, scheme.pull_format)
    )
    return TablePlan(scheme, num_rows, partition, sizes, push, pull)


def sent_bytes(
    plans: Sequence[TablePlan], pushed: Sequence[Sequence[Sequence[int]]], unions: Sequence[Sequence[int]], rank: int,
    num_tables: int | None = None,
) -> int:  # fmt: skip
    """Return the exact bytes that a rank sends for all tables of a step.

    Args:
        plans: of each stack of tables: see `stacks`. With two levels one for each.
        pushed: for each plan, for each rank, the rows that it has for each of its ranks (under centralization: for
            each those that it holds). Not used where a table goes dense.
        unions: for each plan, the rows of the sum of each owner's part. Only used under parallelism.
        num_tables: of the step; None: each stack has one.
    """
    world_size = len(pushed[0]) if pushed else 1
    room, has_levels = _room(num_tables or len(plans)), any(table.groups for table in plans)
    total = (world_size - 1) * 8 * (2 * _FIXED + 3 * room + has_levels * (_FIXED + 2 * room))
    whole, sums = [0] * world_size, [0] * world_size
    for table, rows, union in zip(plans, pushed, unions, strict=True):
        ranks = table.ranks(rank, world_size)
        index, peers = ranks.index(rank), len(ranks) - 1
        if table.scheme.is_dense:
            total += ring_all_reduce_bytes(table.num_rows * table.push.row_bytes, world_size)
        elif table.partition is None and table.groups:
            total += peers * table.push.piece(rows[rank][0], table.num_rows).num_bytes
        elif table.partition is None:
            pieces = _pieces(table.push, [counts[0] for counts in rows], [table.num_rows] * world_size)
            whole = [mine + piece.num_bytes for mine, piece in zip(whole, pieces, strict=True)]
        else:
            pieces = _pieces(table.push, rows[rank], table.sizes)
            total += sum(piece.num_bytes for peer, piece in enumerate(pieces) if peer != index)
            pieces = _pieces(table.pull, union, table.sizes)
            if table.groups:
                total += peers * pieces[index].num_bytes
            else:
                sums = [mine + piece.num_bytes for mine, piece in zip(sums, pieces, strict=True)]
    return total + sum(gathered_bytes(sizes, rank) for sizes in (whole, sums) if any(sizes))


def stacks(tables: Iterable[tuple[Scheme | TwoLevel, int, torch.dtype, bool]]) -> list[list[int]]:
    """Return which tables of a step are summed as one matrix, as indices.

    Args:
        tables: the scheme of each, the width of its rows, their dtype, and whether it is sparse.

    Example:
        >>> from thinwire import schemes
        >>> words = schemes.ZEN, 8, torch.float32, False
        >>> stacks([words, (schemes.DENSE, 8, torch.float32, False), words])
        [[0, 2], [1]]
    """
    groups: dict[object, list[int]] = {}
    for index, table in enumerate(tables):
        is_dense = isinstance(table[0], Scheme) and table[0].is_dense
        groups.setdefault(index if is_dense else table, []).append(index)
    return list(groups.values())


class _Job:
    """The tables of one stack in one step, on their way through the phases of `_Call`.

    Attributes:
        starts: the first row of each table in the stack; ids are ids of the stack.
        ranks, index: the ranks among whom the rows are dealt and summed, and this rank's index among them.
        share: with two levels, what follows between the hosts.
        ids: int64: the rows of this rank, in the order in which they are sent.
        held: the number of rows of each table, int64 [tables], on the device. -1 where ids are out of range. More than
            ``capacity`` in total where not all fit, and then ``ids`` and ``dealt`` lack some.
        dealt: how many of them go to each of ``ranks``, int64 [len(ranks)].
        union, total, size: ids (or positions) of the sum of this rank's part, its rows, and their number, int64 [1].
        sizes: the number for each table, int64 [tables].
        wrong: which ids that arrived last are corrupt, bool.
    """

    def __init__(self, tables: Sequence[NamedGradient], scheme: Scheme | TwoLevel, call: _Call) -> None:
        self.tables, self.world_size, self.made, self.zero = tables, call.world_size, call.sums._starts, call.zero
        self.share: _Share | None = None
        self.gradients = [table.gradient.detach() for table in tables]
        layouts = [table.layout for table in tables]
        *self.starts, num_rows = kernels.stack_starts([layout.num_rows for layout in layouts])
        self.follow(plan(scheme, num_rows, layouts[0].width, self.gradients[0].dtype, self.world_size), call.rank)
        self.is_sparse = self.gradients[0].is_sparse
        for table in tables:
            if not (self.is_sparse or table.gradient.is_contiguous()):
                raise ValueError(
                    f"{table.name}: the gradient has strides {table.gradient.stride()}: make it contiguous"
                )
        self.is_native = self.plan.scheme.is_dense or (self.world_size == 1 and not self.is_sparse)
        self.is_owned = self.plan.partition is not None and not self.is_native
        known = call.sums._capacities
        rows = sum(known.get(table.name, layout.num_rows) for table, layout in zip(tables, layouts, strict=True))
        self.capacity = min(num_rows, rows)
        self.size = self.zero
        self.sizes = self.held = self.zero.expand(len(tables))
        self.find()

    def follow(self, plan: TablePlan, rank: int) -> None:
        """Take a plan."""
        self.plan, self.rank, self.ranks = plan, rank, plan.ranks(rank, self.world_size)
        self.index = self.ranks.index(rank)
        self.wrong = self.zero[:0].bool()

    def find(self) -> None:
        """Find the rows that are not zero, and deal them to ranks."""
        count = self.zero
        if self.is_sparse:
            count, is_outside = self._coalesce()
            self.held = self._by_table(self.ids, count).masked_fill(is_outside, -1)
        elif not self.is_native:
            matrix, *below = [self.dense(index) for index in range(len(self.tables))]
            self.ids, count = kernels.find_rows(matrix, self.capacity, below)
            self.held = self._by_table(self.ids, count)
        self.deal(count)

    def deal(self, count: Tensor) -> None:
        """Deal the rows to their owners, or all of them to all ranks."""
        self.dealt = count.expand(len(self.ranks))
        if self.is_owned:
            assert self.plan.partition is not None
            self.ids, self.indices, self.dealt = self.plan.partition.deal(self.ids)

    def spread(self, items: Sequence[T], nothing: T) -> list[T]:
        """Return for each rank of the process group its item, or nothing if it is not one of ``ranks``."""
        items_of = dict(zip(self.ranks, items, strict=True))
        return [items_of.get(rank, nothing) for rank in range(self.world_size)]

    def misses(self, rows: Sequence[int]) -> bool:
        """Return whether a rank has more rows than all ranks gave themselves memory for."""
        return not (self.is_sparse or self.is_native) and max(rows) > self.capacity

    def find_again(self, rows: int) -> None:
        """Find all rows if some did not fit."""
        if self.misses([rows]):
            self.capacity = rows
            self.find()

    def _coalesce(self) -> tuple[Tensor, Tensor]:
        """Add up rows of equal id in their order, as `SparseRows.from_pairs`; return how many, and if ids are wrong."""
        ids, given, bounded = [], [], []
        for table, gradient, start in zip(self.tables, self.gradients, self.starts, strict=True):
            indices, sizes = gradient._indices(), table.layout.shape
            if indices.numel() and not table.layout.num_rows:
                raise ValueError(f"{table.name}: a row id is out of range, of 0 rows")
            of_table = None
            for index, size in zip(indices, sizes, strict=False):
                given.append(index)
                bounded.append(index.clamp(0, max(0, size - 1)))
                of_table = bounded[-1] if of_table is None else of_table * size + bounded[-1]
            assert of_table is not None
            ids.append(of_table + start if start else of_table)
        self.ids, is_outside = _joined(ids), (_joined(given) != _joined(bounded)).any()
        self.capacity = self.ids.numel()
        values = [gradient._values() for gradient in self.gradients]
        self.source = _joined([each.reshape(each.shape[0], self.plan.push.width) for each in values])
        count = self.zero + self.capacity
        if not all(gradient.is_coalesced() for gradient in self.gradients):
            merged = kernels.merge_rows(self.ids, self.source, self.plan.num_rows, self.capacity)
            self.ids, self.source, count = merged
        return count, is_outside

    def _by_table(self, ids: Tensor, count: Tensor) -> Tensor:
        """Return how many of the increasing ``ids`` each table has, of ``count`` in all, those that do not fit last."""
        if len(self.tables) == 1:
            return count
        starts = self.starts_on_device()
        return torch.cat([torch.minimum(torch.searchsorted(ids, starts), count), count]).diff()

    def starts_on_device(self) -> Tensor:
        """Return ``starts``, int64 [tables], which is copied nowhere: the host would wait."""
        key = (self.zero.device, *self.starts)
        if key not in self.made:
            if len(self.made) >= STARTS_KEPT:
                self.made.clear()
            self.made[key] = torch.cat([self.zero + start for start in self.starts])
        return self.made[key]

    def know_counts(
        self, sent: Sequence[int], received: Sequence[int], held: Sequence[Sequence[int]], counts: Tensor
    ) -> None:
        """Take the numbers of rows for and from each rank, which also ``counts`` has, and of each table and rank."""
        size = self.plan.sizes[self.index if self.is_owned else 0]
        rows = [sum(of_rank) for of_rank in zip(*held, strict=True)]
        for table, of_table in zip(self.tables, held, strict=True):
            if max(of_table) > table.layout.num_rows:
                raise CorruptHeaderError(f"{max(of_table)} rows of {table.name} are announced")
        for rank, (count, most) in enumerate(zip(received, rows, strict=True)):
            most = most if rank in self.ranks else 0
            if not (0 if self.is_owned else most) <= count <= min(size, most):
                raise CorruptHeaderError(f"{count} of {most} rows of {self.names} are announced, of {size}")
        self.held_by, self.rows_by, self.counts = held, rows, _of_ranks(counts, self.ranks)
        counts_of = [sent[rank] for rank in self.ranks[: len(self.plan.sizes)]]
        self.outgoing = _pieces(self.plan.push, counts_of, self.plan.sizes)
        arriving = [received[rank] for rank in self.ranks]
        self.arriving = _pieces(self.plan.push, arriving, [size] * len(arriving))

    @property
    def names(self) -> str:
        return ", ".join(table.name for table in self.tables)

    def encoded(self) -> list[list[Tensor]]:
        """Return the bytes of this rank's pieces: one for each owner, or under centralization one for all ranks."""
        total = sum(piece.count for piece in self.outgoing)
        ids = self.ids[:total]
        if self.is_sparse:
            values = kernels.gather_rows(self.source, self.indices[:total]) if self.is_owned else self.source[:total]
        elif len(self.tables) == 1:
            values = kernels.gather_rows(self.dense(0), ids)
        else:
            values = self.gradients[0].new_empty(total, self.plan.push.width)
            for index, start in enumerate(self.starts):
                kernels.take_rows(self.dense(index), ids - start if start else ids, values)
        if self.plan.partition is not None:
            ids = self.plan.partition.positions(ids)
        return self.plan.push.encode(ids, values, self.outgoing, self.dealt[: len(self.outgoing)])

    def add(self, payloads: Sequence[Tensor], scale: float) -> None:
        """Add up the pieces of all ranks."""
        positions, values, self.wrong = self.plan.push.decode(payloads, self.arriving, self.counts)
        if len(self.ranks) == 1:
            self.union, self.total, self.size = positions, values * scale, self.counts
        else:
            size = self.arriving[0].size
            self.union, self.total, self.size = kernels.merge_rows(positions, values, size, positions.numel(), scale)
        self.sizes = self.size if len(self.tables) == 1 else self._by_table(self.summed_ids(), self.size)

    def summed_ids(self) -> Tensor:
        """Return the ids in the stack of the rows that this rank has summed."""
        partition = self.plan.partition
        return self.union if partition is None else partition.parts[self.index].ids(self.union)

    def dense(self, index: int) -> Tensor:
        """Return a gradient as a dense matrix [num_rows, width]: its own memory, or a copy of a sparse one."""
        if not self.is_sparse:
            return self.gradients[index].view(self.tables[index].layout.num_rows, self.plan.push.width)
        return kernels.put_rows(self.source.new_zeros(self.plan.num_rows, self.plan.push.width), self.ids, self.source)

    def take_dense(self, total: Tensor) -> None:
        """Note the sum of `dense`."""
        if self.is_sparse:
            self.total = total
            self.union, self.size = kernels.find_rows(total, min(self.plan.num_rows, sum(self.rows_by)))
            self.sizes = self.size

    def take_sizes(self, sizes: Sequence[Sequence[int]], on_device: Tensor) -> None:
        """Take the numbers of rows of the sums, [tables][world_size] and on the device [world_size, tables]."""
        own = [[of_table[rank] for rank in self.ranks] for of_table in sizes]
        self.know_sizes(own, _of_ranks(on_device, self.ranks))

    def know_sizes(self, sizes: Sequence[Sequence[int]], on_device: Tensor) -> None:
        """Take the numbers of rows of the sums, [tables][len(ranks)] and on the device [len(ranks), tables]."""
        self.sizes_by = sizes
        self.part_sizes = [sum(of_rank) for of_rank in zip(*sizes, strict=True)]
        if min(map(min, sizes)) < 0:
            raise CorruptHeaderError(f"sums of {sizes} rows of {self.names} are announced")
        if self.is_owned:
            if any(size > part for size, part in zip(self.part_sizes, self.plan.sizes, strict=True)):
                raise CorruptHeaderError(f"sums of {self.part_sizes} rows of {self.names} are announced")
            self.sums = _pieces(self.plan.pull, self.part_sizes, self.plan.sizes)
            self.sizes_on_device = on_device
            self.part_sizes_on_device = on_device.sum(1)

    def encoded_sum(self) -> list[list[Tensor]]:
        """Return the bytes of the sum of this rank's part."""
        size, own = self.part_sizes[self.index], slice(self.index, self.index + 1)
        return self.plan.pull.encode(
            self.union[:size], self.total[:size], self.sums[own], self.part_sizes_on_device[own]
        )

    def joined(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients' sums from the sums of all parts; if one is corrupt, there are nan in each."""
        partition = self.plan.partition
        assert partition is not None
        positions, values, wrong = self.plan.pull.decode(payloads, self.sums, self.part_sizes_on_device)
        ids = partition.join(positions.split([piece.count for piece in self.sums]))
        wrong = wrong | (ids >= self.plan.num_rows)
        if self.is_sparse:
            ids, order = ids.sort()
            values = kernels.gather_rows(values, order)
            if len(self.starts) > 1:
                starts = torch.searchsorted(ids, self.starts_on_device())
                ends = self.sizes_on_device.sum(0).cumsum(0)
                wrong = torch.cat([wrong, starts[1:] != ends[:-1]])
        self.wrong = wrong.any()
        is_right = ~self.wrong
        return self._stored(ids * is_right, values.masked_fill(self.wrong, torch.nan), is_right)

    def whole(self) -> list[Tensor]:
        """Return the gradients' sums where this rank has all of them."""
        if self.is_native and not self.is_sparse:
            return [table.gradient for table in self.tables]
        size = self.part_sizes[self.index]
        ids = self.union[:size]
        return self._stored(ids, kernels.gather_rows(self.total, ids) if self.is_native else self.total[:size])

    def _stored(self, ids: Tensor, values: Tensor, is_right: Tensor | None = None) -> list[Tensor]:
        """Store rows of the stack in their tables: each has its part, or where ids are not right, all, in row 0."""
        stored, first = [], 0
        for index, (table, start) in enumerate(zip(self.tables, self.starts, strict=True)):
            mine = slice(None)
            if self.is_sparse and len(self.tables) > 1:
                mine = slice(first, first := first + self.unions[index])
            local, rows = ids[mine], values[mine]
            if start:
                local = local - start if is_right is None else torch.add(local, is_right, alpha=-start)
            if self.is_sparse:
                total = SparseRows.trusted(local, rows, table.layout.num_rows)
                stored.append(table.layout.tensor(total))
            else:
                kernels.put_rows(self.dense(index), local, rows)
                stored.append(table.gradient)
        return stored

    @property
    def unions(self) -> list[int]:
        """The rows of each table in the sum."""
        return [sum(sizes) if self.is_owned else sizes[self.index] for sizes in self.sizes_by]

    def counted(self) -> list[Counts]:
        """Return the rows of each table."""
        if self.is_native and not self.is_sparse:
            rows = [table.layout.num_rows for table in self.tables]
            return [Counts((num_rows,) * self.world_size, num_rows) for num_rows in rows]
        counted = [Counts(tuple(held), union) for held, union in zip(self.held_by, self.unions, strict=True)]
        if self.share is None:
            return counted
        return [replace(one, shares=tuple(held)) for one, held in zip(counted, self.share.held_by, strict=True)]


class _Share(_Job):
    """The rows of one rank's share of a stack that its host holds, on their way through the sum over all hosts."""

    def __init__(self, inside: _Job) -> None:
        self.inside, self.tables, self.world_size = inside, inside.tables, inside.world_size
        inside.share = self
        self.zero, self.gradients, self.starts = inside.zero, inside.gradients, [0]
        self.follow(inside.plan.between(inside.index), inside.rank)
        self.is_sparse, self.is_native, self.is_owned = True, False, self.plan.partition is not None
        self.ids, self.source, self.held = inside.union, inside.total, inside.sizes
        self.deal(inside.size)

    def summed_ids(self) -> Tensor:
        assert self.inside.plan.partition is not None
        return self.inside.plan.partition.parts[self.inside.index].ids(super().summed_ids())

    def _by_table(self, ids: Tensor, count: Tensor) -> Tensor:
        return self.inside._by_table(ids, count)

    def take_sizes(self, sizes: Sequence[Sequence[int]], on_device: Tensor) -> None:
        """Take the numbers of rows of the sums, and let the job inside of the host know how many its ranks have."""
        super().take_sizes(sizes, on_device)
        hosts, ranks = self.inside.plan.groups, self.inside.ranks
        added = hosts if self.is_owned else (tuple(ranks),)
        known = [[sum(of_table[host[index]] for host in added) for index in range(len(ranks))] for of_table in sizes]
        self.inside.know_sizes(known, torch.stack([_of_ranks(on_device, host) for host in added]).sum(0))

    def _stored(self, ids: Tensor, values: Tensor, is_right: Tensor | None = None) -> list[Tensor]:
        self.inside.union, self.inside.total = ids, values
        return []


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def _of_ranks(rows: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return the rows of some ranks, of a tensor [world_size, ...]; the host does not wait."""
    return rows if ranks == range(len(rows)) else torch.cat([rows[rank : rank + 1] for rank in ranks])


def _any(flags: Sequence[Tensor]) -> Tensor:
    """Return whether any is true, bool []."""
    flat = _joined([flag.view(-1) for flag in flags])
    return flat.view(()) if flat.numel() == 1 else flat.any()


class CollectiveSum:
    """Sums of the sparse gradients of a step over the ranks of a process group.

    All ranks make the same calls in the same order, on the thread that issues the other collectives of the group.

    Args:
        exchange: the collectives of the model's process group. Its ``host_waits`` grows by two in a call, and by one
            more where a table has far more rows than in the last one, or records have room for other numbers of tables.

    Attributes:
        counts: rows of each table in the last call, by name.
        note: a number, not negative, that the next call tells all ranks.
        notes: the number that each rank sent in the last call.

    Example:
        >>> total = CollectiveSum(Collectives(dist.group.WORLD))          # doctest: +SKIP
        >>> total.all_reduce([NamedGradient("words", weight.grad)], schemes.ZEN)  # doctest: +SKIP
    """

    def __init__(self, exchange: Collectives) -> None:
        self.exchange = exchange
        self.counts: dict[str, Counts] = {}
        self._step = 0
        self._late: Tensor | None = None  # whether sums of the last call were corrupt, bool [], on the device
        self._capacities: dict[str, int] = {}
        self._starts: dict[tuple[object, ...], Tensor] = {}
        self._room_bytes, self._room = 0, TABLES_OF_A_RECORD  # the room of records, in tables, of the last call
        self.note, self.notes = 0, [0] * exchange.world_size

    def all_reduce(
        self, tables: Sequence[NamedGradient], scheme: Scheme | Iterable[Scheme | TwoLevel], scale: float = 1.0
    ) -> list[Tensor]:
        """Sum the gradients over all ranks, times ``scale``, to the same bits on every rank.

        Args:
            tables: the same tables on all ranks, with gradients of the same shapes and dtypes on one device.
            scheme: how, or how for each table (if that raises, so do all ranks). DENSE is the group's own all-reduce.
            scale: multiplies each sum before it is rounded to the dtype, 1 / world_size for a mean.

        Returns:
            For each table its gradient, with the sum in place, or a new coalesced COO tensor.

        Raises:
            ValueError: a gradient or scheme is illegal; the other ranks raise PeerError.
            MismatchError: ranks disagree about the tables, a scheme, the scale, or the number of calls so far.
            PeerError: another rank failed.
            CorruptMessageError: rows arrived that their sender cannot have sent. Where they are sums, the call that
                received them returns nan instead, and the next one raises.
            LostPeerError, CorruptHeaderError: the ranks are out of step, and the group is of no more use.
        """
        self._step = self._step + 1 & 0xFFFFFFFF
        call = _Call(self, scale)
        self._late, self._room_bytes = None, 0
        call.find(tables, scheme)
        call.agree_on_counts()
        self.notes = call.notes
        for job in call.jobs:
            for table, held in zip(job.tables, job.held_by, strict=True):
                self._capacities[table.name] = max(held) * 3 // 2 + SLACK_ROWS
        call.all_reduce_dense()
        call.exchange_rows()
        call.exchange_shares()
        call.agree_on_sums()
        results, self._late = call.exchange_sums()
        self._room_bytes = call.received_bytes * 3 // 2
        counted = [zip(job.tables, job.counted(), strict=True) for job in call.jobs]
        self.counts = {table.name: counts for table, counts in chain.from_iterable(counted)}
        return results


class _Call(Attempts):
    """The phases of one call of `CollectiveSum.all_reduce`, in order.

    Whatever fails on this rank alone is kept as ``failure`` until the next record tells the others, and meaningless
    bytes of the size that they expect go out in between.
    """

    def __init__(self, sums: CollectiveSum, scale: float) -> None:
        self.sums, self.exchange, self.scale = sums, sums.exchange, scale
        self.step, self.late, self.note = sums._step, sums._late, sums.note
        self.room_bytes, self.received_bytes = sums._room_bytes, 0
        self.room: Tensor | None = None  # of all exchanges, one after the other, as what arrives is used at once
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.jobs: list[_Job] = []
        self.device = torch.device("cpu")

    def find(self, tables: Sequence[NamedGradient], scheme: Scheme | Iterable[Scheme | TwoLevel]) -> None:
        """Phase 1."""
        self.num_tables, self.text = len(tables), ""
        if tables:
            self.device = tables[0].gradient.device
        self.zero = torch.zeros(1, dtype=torch.int64, device=self.device)

        def find() -> None:
            points = [scheme] * len(tables) if isinstance(scheme, (Scheme, TwoLevel)) else scheme
            schemes = [one.placed(self.exchange.hosts) if isinstance(one, TwoLevel) else one for one in points]
            self.text = "\n".join([f"call {self.step}", f"scale={self.scale!r}", *map(_describe, tables, schemes)])
            for table in tables:
                if table.gradient.device != self.device:
                    raise ValueError(f"{table.name} is on {table.gradient.device}, others on {self.device}: sum apart")
            kinds = [(table.layout.width, table.gradient.dtype, table.gradient.is_sparse) for table in tables]
            self.indices = stacks((point, *kind) for point, kind in zip(schemes, kinds, strict=True))
            if self.world_size == 1:
                self.indices = [[index] for index in range(len(tables))]
            for indices in self.indices:
                self.jobs.append(_Job([tables[index] for index in indices], schemes[indices[0]], self))

        self.attempt(find)
        self._take_room(1.0)

    def _take_room(self, growth: float) -> None:
        """Take memory for what arrives: a rank that lacks it has to say so before the others send."""
        self.room = None  # freed before the larger one is allocated
        num_bytes = int(growth * self.room_bytes)
        self.room = self.attempt(lambda: torch.empty(num_bytes, dtype=torch.uint8, device=self.device))

    def agree_on_counts(self) -> None:
        """Phase 2."""
        late = [] if self.late is None else [self.late]
        if (room := _room(self.num_tables)) != self.sums._room:
            self._exchanged(self._record(2, late, list), "in the last call, and got nan for them")
            self.sums._room = room
        numbers = self._exchanged(self._counts_record(self.jobs, late), "in the last call, and got nan for them")
        found = list(zip(self.jobs, self._rows(numbers.received), strict=True))
        for job, rows in found:
            if (most := max(rows)) > job.plan.num_rows:
                where = f"{self.where()}: from rank {self._global(rows.index(most))}"
                raise in_exchange(CorruptHeaderError(f"{where}: {most} rows of {job.names} are announced"))
        if any(job.misses(rows) for job, rows in found):
            own = self._rows(numbers.sent[:1])
            self._take_room(max(max(rows) / max(1, job.capacity) for job, rows in found))
            self.attempt(lambda: [job.find_again(*rows) for job, rows in zip(self.jobs, own, strict=True)])
            numbers = self._exchanged(self._counts_record(self.jobs, late), "in the last call, and got nan for them")
        self.notes = (numbers.received[:, _NOTE] // 2 - 1).tolist()
        self._know_counts(self.jobs, numbers)

    def _know_counts(self, jobs: Sequence[_Job], numbers: Numbers) -> None:
        sent, received = numbers.sent.T.tolist(), numbers.received.T.tolist()
        first = _FIXED
        for job, column in zip(jobs, range(_FIXED + _room(self.num_tables), len(sent)), strict=False):
            held, first = received[first : first + len(job.tables)], first + len(job.tables)
            counts = numbers.on_device[:, column].contiguous()
            self._act_on(partial(job.know_counts, sent[column], received[column], held, counts))

    def _rows(self, numbers: Tensor) -> list[list[int]]:
        """Return the rows of each stack that each rank has found."""
        parts = numbers[:, _FIXED : _FIXED + self.num_tables].split([len(job.tables) for job in self.jobs], dim=1)
        return [part.sum(1).tolist() for part in parts]

    def _act_on(self, take: Callable[[], None]) -> None:
        """Take numbers that only this rank got; without them it cannot go on, and the others cannot know."""
        try:
            take()
        except CorruptHeaderError as error:
            raise in_exchange(CorruptHeaderError(f"{self.where()}: {error}")) from None

    def _counts_record(self, jobs: Sequence[_Job], wrong: Sequence[Tensor]) -> Tensor:
        record = self._record(2, wrong, lambda: [job.held for job in jobs])
        if jobs and self.failure is None:
            first = _FIXED + _room(self.num_tables)
            dealt = [_joined(job.spread(job.dealt.split(1), self.zero)) if job.plan.groups else job.dealt for job in jobs]  # fmt: skip # noqa: E501
            record[:, first : first + len(jobs)] = _joined([each.view(-1, 1) for each in dealt], 1)
        return record

    def _record(self, numbers: int, wrong: Sequence[Tensor], columns: Callable[[], list[Tensor]]) -> Tensor:
        """Return a record of some numbers for each table, equal for all ranks, and of whether any id is ``wrong``.

        Its size is one that all ranks know: until they have met in this call, that of the last one.
        """
        size = self.world_size, _FIXED + numbers * self.sums._room
        record = torch.zeros(size, dtype=torch.int64, device=self.device)
        record[:, _DIGEST] = digest64(self.text.encode()) - (1 << 63)
        record[:, _NOTE] = 2 * (self.note + 1) + (self.failure is not None)
        if self.jobs and self.failure is None:
            numbers_of = torch.cat([_any(wrong).view(1) if wrong else self.zero, *columns()])
            record[:, _CORRUPT : _CORRUPT + len(numbers_of)] = numbers_of
        elif self.late is not None:
            record[:, _CORRUPT] = self.late
        return record

    def _exchanged(self, record: Tensor, when: str) -> Numbers:
        """Exchange a record, and raise on all ranks alike what any of them reports in it.

        The columns of a record add up to 0, so a record that was altered ends this rank before it acts on it; and
        `_NOTE` is positive, or else a record of zeros would be whole.
        """
        record.select(1, _CHECK).sub_(record.sum(1))
        numbers = self.exchange.numbers(record)
        received = numbers.received
        if received.sum(1).any() or (received[:, _NOTE] <= 0).any():
            raise in_exchange(CorruptHeaderError(f"{self.where()}: a record whose checksum does not match"))
        rows = slice(_FIXED, _FIXED + self.num_tables)
        if (numbers.sent[0, rows] < 0).any() and self.failure is None:
            self.failure = ValueError("a row id is out of range")
        failed = ((received[:, _NOTE] & 1) | (received[:, rows] < 0).any(1)).tolist()
        if any(failed):
            reason = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
            texts, peer = self.exchange.texts(reason, self.device), failed.index(1)
            error = PeerError(f"{self.where()}: rank {self._global(peer)} reports: {texts[peer]}")
            raise told(self.failure or error, self.world_size)
        if (received[:, _DIGEST] != numbers.sent[0, _DIGEST]).any():
            self._raise_mismatch()
        corrupt = received[:, _CORRUPT].tolist()
        if any(corrupt):
            ranks = ", ".join(str(self._global(rank)) for rank, is_corrupt in enumerate(corrupt) if is_corrupt)
            error = CorruptMessageError(f"{self.where()}: ranks {ranks} received ids that no rank can have sent {when}")
            raise told(error, self.world_size)
        return numbers

    def _raise_mismatch(self) -> NoReturn:
        sizes = torch.full((self.world_size, 1), len(self.text.encode()), dtype=torch.int64, device=self.device)
        texts = self.exchange.texts(
            self.text, self.device, min(1 << 20, int(self.exchange.numbers(sizes).received.max()))
        )
        peer = next((peer for peer, text in enumerate(texts) if text != texts[self.rank]), self.rank)
        ours, theirs = first_difference(texts[self.rank], texts[peer])
        error = MismatchError(
            f"{self.where()}: ranks disagree about what is summed.\n  rank {self._global(self.rank)}: {ours}\n"
            f"  rank {self._global(peer)}: {theirs}\nAll ranks must make the same calls in the same order, with the"
            " same tables, schemes and scale."
        )
        raise told(error, self.world_size)

    def all_reduce_dense(self) -> None:
        """Sum tables that go dense by the group's own algorithm, scaled before, as DDP does: it adds in the dtype."""
        for job in self.jobs:
            if job.is_native:
                dense = self.attempt(partial(job.dense, 0))
                if dense is None:
                    size = job.plan.num_rows, job.plan.push.width
                    dense = torch.zeros(size, dtype=job.gradients[0].dtype, device=self.device)
                if self.scale != 1.0:
                    dense.mul_(self.scale)
                self.exchange.all_reduce(dense)
                self.attempt(partial(job.take_dense, dense))

    def exchange_rows(self) -> None:
        """Phases 3 and 4."""
        gathered = [job for job in self.jobs if not (job.is_native or job.is_owned)]
        self._add(gathered, self._gather(gathered, [job.arriving for job in gathered], _Job.encoded))
        owned = [job for job in self.jobs if job.is_owned]
        self._add(owned, self._swap(owned, [(job.outgoing, job.arriving) for job in owned], _Job.encoded))

    def exchange_shares(self) -> None:
        """Take what hosts have summed through phases 1 to 4 between them, where there are two levels."""
        inside = [job for job in self.jobs if job.plan.groups]
        if not inside:
            return
        shares = self.attempt(lambda: [_Share(job) for job in inside]) or []
        numbers = self._exchanged(self._counts_record(shares, [job.wrong for job in self.jobs]), "in this call")
        self._know_counts(shares, numbers)
        pieces = [(share.outgoing * (1 if share.is_owned else len(share.ranks)), share.arriving) for share in shares]
        self._add(shares, self._swap(shares, pieces, _Job.encoded))

    def _add(self, jobs: Sequence[_Job], payloads: Sequence[Sequence[Tensor]]) -> None:
        for job, of_job in zip(jobs, payloads, strict=True):
            is_last = isinstance(job, _Share) or not job.plan.groups
            self.attempt(partial(job.add, of_job, self.scale if is_last else 1.0))

    def _swap(
        self, jobs: Sequence[_Job], pieces: Sequence[tuple[Sequence[CodedPiece], Sequence[CodedPiece]]],
        encode: Callable[[_Job], list[list[Tensor]]],
    ) -> list[list[Tensor]]:  # fmt: skip
        """Return the bytes that each job gets from its ranks, in one message for each rank of the group.

        Args:
            pieces: of each job, those for its ranks and those from them.
            encode: makes a job's bytes for each of its ranks, or one for all of them.
        """
        if not jobs:
            return []
        sent, arriving = (
            [job.spread(of_job[end], _NOTHING) for job, of_job in zip(jobs, pieces, strict=True)] for end in (0, 1)
        )
        send, receive = self._sizes(sent), self._sizes(arriving)
        self._check_fits(receive)

        def parts() -> list[list[Tensor]]:
            encoded = [(job, encode(job)) for job in jobs]
            spread = [job.spread(made * (len(job.ranks) // len(made)), []) for job, made in encoded]
            return [of_job[peer] for peer in range(self.world_size) for of_job in spread]

        incoming = self.exchange.all_to_all(self._joined(parts, sum(send)), send, receive, self.room)
        cut = _cut(incoming.split(receive), arriving)
        return [[of_job[rank] for rank in job.ranks] for job, of_job in zip(jobs, cut, strict=True)]

    def _gather(
        self, jobs: Sequence[_Job], pieces: Pieces, encode: Callable[[_Job], list[list[Tensor]]]
    ) -> list[list[Tensor]]:
        """Return the bytes of all ranks' pieces of each table, which ``encode`` makes on each rank."""
        sizes = self._sizes(pieces)
        self._check_fits(sizes)
        own = self._joined(lambda: [encode(job)[0] for job in jobs], sizes[self.rank])
        return _cut(self.exchange.all_gather(own, sizes, self.room), pieces)

    def _check_fits(self, sizes: Sequence[int]) -> None:
        self.received_bytes = max(self.received_bytes, sum(sizes))
        if self.device.type == "cpu":  # elsewhere the allocator refuses
            check_fits(sum(sizes), self.where)

    def _joined(self, parts: Callable[[], list[list[Tensor]]], num_bytes: int) -> Tensor:
        """Return the bytes of all pieces; if making them fails, bytes that are ids of no row and values of nan."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)  # not a launch
        joined = self.attempt(lambda: torch.cat([nothing, *chain.from_iterable(parts())]))
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=self.device) if joined is None else joined

    def _sizes(self, pieces: Pieces) -> list[int]:
        """Return the bytes of the pieces of all tables, for each rank."""
        return [sum(of_table[rank].num_bytes for of_table in pieces) for rank in range(self.world_size)]

    def agree_on_sums(self) -> None:
        """Phase 5, the numbers of rows."""
        last = [job.share or job for job in self.jobs]
        record = self._record(1, [job.wrong for job in last], lambda: [job.sizes for job in last])
        numbers = self._exchanged(record, "in this call")
        received, first = numbers.received.T.tolist(), _FIXED
        for job in last:
            columns = slice(first, first + len(job.tables))
            self._act_on(partial(job.take_sizes, received[columns], numbers.on_device[:, columns]))
            first += len(job.tables)

    def exchange_sums(self) -> tuple[list[Tensor], Tensor | None]:
        """Gather the sums of all parts; return all results, and whether one is corrupt."""
        shares = [job.share for job in self.jobs if job.share is not None]
        dealt = [share for share in shares if share.is_owned]
        for share, of_share in zip(dealt, self._swap_sums(dealt), strict=True):
            self.attempt(partial(share.joined, of_share))
        for share in shares:
            if not share.is_owned:
                self.attempt(share.whole)
        inside = iter(self._swap_sums([share.inside for share in shares]))
        self.room = None if shares else self.room  # what has arrived is still there
        whole = [job for job in self.jobs if job.is_owned and not job.plan.groups]
        payloads = iter(self._gather(whole, [job.sums for job in whole], _Job.encoded_sum))
        if self.failure is not None:
            raise self.failure
        results: dict[int, Tensor] = {}
        for job, indices in zip(self.jobs, self.indices, strict=True):
            arrived = inside if job.plan.groups else payloads
            sums = job.joined(next(arrived)) if job.is_owned else job.whole()
            results.update(zip(indices, sums, strict=True))
        wrong = [job.wrong for job in (*self.jobs, *shares) if job.is_owned]
        return [results[index] for index in range(self.num_tables)], _any(wrong) if wrong else None

    def _swap_sums(self, jobs: Sequence[_Job]) -> list[list[Tensor]]:
        """Return the sums of all parts of each job, which those of its ranks that own them send to the others."""
        pieces = [([job.sums[job.index]] * len(job.ranks), job.sums) for job in jobs]
        return self._swap(jobs, pieces, _Job.encoded_sum)

    def where(self) -> str:
        """Return what begins a message."""
        return f"rank {self._global(self.rank)}, sum {self.step} of {self.num_tables} tables"

    def _global(self, rank: int) -> int:
        return self.exchange.global_ranks[rank]


_NOTHING = CodedPiece(0, 0, FORMATS[-1], 0)


def _room(num_tables: int) -> int:
    return max(1, -(-num_tables // TABLES_OF_A_RECORD)) * TABLES_OF_A_RECORD


def _pieces(coding: Coding, counts: Sequence[int], sizes: Sequence[int]) -> list[CodedPiece]:
    return [coding.piece(count, size) for count, size in zip(counts, sizes, strict=True)]


def _cut(incoming: Sequence[Tensor], pieces: Pieces) -> list[list[Tensor]]:
    """Cut what each rank sent into its pieces; return the pieces of each table, in rank order."""
    cut = [data.split([of_table[rank].num_bytes for of_table in pieces]) for rank, data in enumerate(incoming)]
    return [[of_rank[index] for of_rank in cut] for index in range(len(pieces))]


def _describe(table: NamedGradient, scheme: Scheme | TwoLevel) -> str:
    gradient = table.gradient
    sparse = f" of {gradient.sparse_dim()} sparse dimensions" if gradient.is_sparse else ""
    return f"{table.name}: {gradient.dtype} {list(gradient.shape)}{sparse}, {scheme.describe()}"
