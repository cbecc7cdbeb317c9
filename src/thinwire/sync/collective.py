"""Exact sums of sparse gradients on their device, by collectives of the model's own process group.

All tables of a step share each message. Those with rows of the same width and dtype are stacked, one below the other:
they are dealt, coded and summed as one matrix, because each operation that is launched costs the host some 6 us. The
host waits twice:

1. Each rank finds its non-zero rows, into as much memory as the last step suggests, and deals them to owners.
2. A record of counts goes to each rank; the host waits for it. It also carries a digest of what is summed and of the
   number of the step, and whether a rank failed or holds ids that no table has. All ranks know who ran out of memory.
3. An all-to-all of exact sizes takes rows to their owners, coded as both ends expect from the counts (`sync.pieces`).
4. Owners add up in rank order: the same bits as `thinwire.sync.synchronize.synchronize`.
5. The numbers of rows in the sums go to all ranks; the host waits for them. Then an all-gather of the sums.

Under centralization the gather is in step 3, and nothing is left for step 5 but to agree that it arrived whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import first_difference
from thinwire.comm.collectives import Collectives, Numbers, gathered_bytes
from thinwire.comm.process_group import check_fits, ring_all_reduce_bytes
from thinwire.errors import CorruptHeaderError, CorruptMessageError, MismatchError, PeerError, in_exchange, told
from thinwire.partition import Partition
from thinwire.sparse import Layout, SparseRows, check_dtype
from thinwire.sync.named import NAMED
from thinwire.sync.pieces import FORMATS, CodedPiece, Coding
from thinwire.sync.scheme import Aggregation, Communication, Ownership, Scheme, Unit
from thinwire.sync.two_level import TwoLevel
from thinwire.wire import FormatChoice, digest64

TABLES_OF_A_RECORD = 64
"""Records have room for a multiple of this many tables, so that ranks that sum other tables can tell each other so."""
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
    """Rows of a table in a step: those that each rank held, and those in the sum; all of them where it went dense."""

    held: tuple[int, ...]
    union: int


def refusal(scheme: Scheme | TwoLevel) -> str:
    """Return why a scheme does not run on the collectives of a process group, or "" if it does.

    Example:
        >>> from thinwire import schemes
        >>> refusal(schemes.ZEN), refusal(schemes.SPARCML)
        ('', 'it sends in stages, between pairs of ranks')
    """
    if isinstance(scheme, TwoLevel):
        return "it has two levels"
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
    """

    scheme: Scheme
    num_rows: int
    partition: Partition | None
    sizes: tuple[int, ...]
    push: Coding
    pull: Coding


@lru_cache(maxsize=4096)
def plan(scheme: Scheme | TwoLevel, num_rows: int, width: int, dtype: torch.dtype, world_size: int) -> TablePlan:
    """Return the plan of a table [num_rows, width], or of a stack of tables, of all of its rows.

    Raises:
        ValueError: the scheme does not run here; or it has more servers than there are ranks.
    """
    reason = refusal(scheme)
    if reason or isinstance(scheme, TwoLevel):
        runs = ", ".join(name for name, point in NAMED.items() if not refusal(point))
        raise ValueError(f"{scheme!r} does not run on the collectives of a process group, because {reason}: use {runs}")
    check_dtype(dtype)
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
        plans: of each stack of tables: see `stacks`.
        pushed: for each stack, for each rank, the rows that it has for each rank (under centralization: for each
            rank those that it holds). Not used where a table goes dense.
        unions: for each stack, the rows of the sum of each owner's part. Only used under parallelism.
        num_tables: of the step; None: each stack has one.
    """
    world_size = len(pushed[0]) if pushed else 1
    total = (world_size - 1) * 8 * (2 * _FIXED + 3 * _room(num_tables or len(plans)))
    whole, sums = [0] * world_size, [0] * world_size
    for table, rows, union in zip(plans, pushed, unions, strict=True):
        if table.scheme.is_dense:
            total += ring_all_reduce_bytes(table.num_rows * table.push.row_bytes, world_size)
        elif table.partition is None:
            pieces = _pieces(table.push, [counts[0] for counts in rows], [table.num_rows] * world_size)
            whole = [mine + piece.num_bytes for mine, piece in zip(whole, pieces, strict=True)]
        else:
            pieces = _pieces(table.push, rows[rank], table.sizes)
            total += sum(piece.num_bytes for peer, piece in enumerate(pieces) if peer != rank)
            pieces = _pieces(table.pull, union, table.sizes)
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
    for place, table in enumerate(tables):
        is_dense = isinstance(table[0], Scheme) and table[0].is_dense
        groups.setdefault(place if is_dense else table, []).append(place)
    return list(groups.values())


class _Job:
    """The tables of one stack in one step, on their way through the phases of `_Call`.

    Attributes:
        starts: the first row of each table in the stack; ids are those of the stack.
        ids: int64: the rows of this rank, in the order in which they are sent.
        held: the number of rows of each table, int64 [tables], on the device. -1 where ids are out of range. More than
            ``capacity`` in total where not all fit, and then ``ids`` and ``dealt`` lack some.
        dealt: how many of them go to each rank, int64 [world_size].
        union, total, size: ids (or positions) of the sum of this rank's part, its rows, and their number, int64 [1].
        sizes: the number for each table, int64 [tables].
        wrong: which ids that arrived last are corrupt, bool.
    """

    def __init__(
        self, tables: Sequence[NamedGradient], scheme: Scheme | TwoLevel, rank: int, world_size: int,
        capacities: Mapping[str, int], made: dict[tuple[object, ...], Tensor], zero: Tensor,
    ) -> None:  # fmt: skip
        self.tables, self.rank, self.world_size, self.made, self.zero = tables, rank, world_size, made, zero
        self.gradients = [table.gradient.detach() for table in tables]
        layouts = [table.layout for table in tables]
        *self.starts, num_rows = kernels.stack_starts([layout.num_rows for layout in layouts])
        self.plan = plan(scheme, num_rows, layouts[0].width, self.gradients[0].dtype, world_size)
        self.is_sparse = self.gradients[0].is_sparse
        for table in tables:
            if not (self.is_sparse or table.gradient.is_contiguous()):
                raise ValueError(
                    f"{table.name}: the gradient has strides {table.gradient.stride()}: make it contiguous"
                )
        self.is_native = self.plan.scheme.is_dense or (world_size == 1 and not self.is_sparse)
        self.is_owned = self.plan.partition is not None and not self.is_native
        known = zip(tables, layouts, strict=True)
        self.capacity = min(num_rows, sum(capacities.get(table.name, layout.num_rows) for table, layout in known))
        self.size = zero
        self.sizes = self.held = zero.expand(len(tables))
        self.wrong = zero[:0].bool()
        self.find()

    def find(self) -> None:
        """Find the rows that are not zero, and deal them to ranks."""
        count = self.zero
        if self.is_sparse:
            count, is_outside = self._coalesce()
            self.held = self._by_table(self.ids, count).masked_fill(is_outside, -1)
        elif not self.is_native:
            matrix, *below = [self.dense(place) for place in range(len(self.tables))]
            self.ids, count = kernels.find_rows(matrix, self.capacity, below)
            self.held = self._by_table(self.ids, count)
        self.dealt = count.expand(self.world_size)
        if self.is_owned:
            assert self.plan.partition is not None
            self.ids, self.places, self.dealt = self.plan.partition.deal(self.ids)

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
        size = self.plan.sizes[self.rank if self.is_owned else 0]
        rows = [sum(of_rank) for of_rank in zip(*held, strict=True)]
        for table, of_table in zip(self.tables, held, strict=True):
            if max(of_table) > table.layout.num_rows:
                raise CorruptHeaderError(f"{max(of_table)} rows of {table.name} are announced")
        for count, most in zip(received, rows, strict=True):
            if not (0 if self.is_owned else most) <= count <= min(size, most):
                raise CorruptHeaderError(f"{count} of {most} rows of {self.names} are announced, of {size}")
        self.held_by, self.rows_by, self.counts = held, rows, counts
        self.outgoing = _pieces(self.plan.push, sent[: len(self.plan.sizes)], self.plan.sizes)
        self.arriving = _pieces(self.plan.push, received, [size] * self.world_size)

    @property
    def names(self) -> str:
        return ", ".join(table.name for table in self.tables)

    def encoded(self) -> list[list[Tensor]]:
        """Return the bytes of this rank's pieces: one for each owner, or under centralization one for all ranks."""
        total = sum(piece.count for piece in self.outgoing)
        ids = self.ids[:total]
        if self.is_sparse:
            values = kernels.gather_rows(self.source, self.places[:total]) if self.is_owned else self.source[:total]
        elif len(self.tables) == 1:
            values = kernels.gather_rows(self.dense(0), ids)
        else:
            values = self.gradients[0].new_empty(total, self.plan.push.width)
            for place, start in enumerate(self.starts):
                kernels.take_rows(self.dense(place), ids - start if start else ids, values)
        if self.plan.partition is not None:
            ids = self.plan.partition.positions(ids)
        return self.plan.push.encode(ids, values, self.outgoing, self.dealt[: len(self.outgoing)])

    def add(self, payloads: Sequence[Tensor], scale: float) -> None:
        """Add up the pieces of all ranks."""
        positions, values, self.wrong = self.plan.push.decode(payloads, self.arriving, self.counts)
        if self.world_size == 1:
            self.union, self.total, self.size = positions, values * scale, self.counts
        else:
            size = self.arriving[0].size
            self.union, self.total, self.size = kernels.merge_rows(positions, values, size, positions.numel(), scale)
        is_part = self.is_owned and len(self.tables) > 1
        ids = self.plan.partition.parts[self.rank].ids(self.union) if is_part and self.plan.partition else self.union
        self.sizes = self._by_table(ids, self.size)

    def dense(self, place: int) -> Tensor:
        """Return a gradient as a dense matrix [num_rows, width]: its own memory, or a copy of a sparse one."""
        if not self.is_sparse:
            return self.gradients[place].view(self.tables[place].layout.num_rows, self.plan.push.width)
        return kernels.put_rows(self.source.new_zeros(self.plan.num_rows, self.plan.push.width), self.ids, self.source)

    def take_dense(self, total: Tensor) -> None:
        """Note the sum of `dense`."""
        if self.is_sparse:
            self.total = total
            self.union, self.size = kernels.find_rows(total, min(self.plan.num_rows, sum(self.rows_by)))
            self.sizes = self.size

    def know_sizes(self, sizes: Sequence[Sequence[int]], on_device: Tensor) -> None:
        """Take the numbers of rows of the sums, [tables][world_size] and on the device [world_size, tables]."""
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
        size, own = self.part_sizes[self.rank], slice(self.rank, self.rank + 1)
        return self.plan.pull.encode(
            self.union[:size], self.total[:size], self.sums[own], self.part_sizes_on_device[own]
        )

    def joined(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients' sums from those of all parts; if one is corrupt, there are nan in each."""
        partition = self.plan.partition
        assert partition is not None
        positions, values, wrong = self.plan.pull.decode(payloads, self.sums, self.part_sizes_on_device)
        ids = partition.join(positions.split([piece.count for piece in self.sums]))
        wrong = wrong | (ids >= self.plan.num_rows)
        if self.is_sparse:
            ids, order = ids.sort()
            values = kernels.gather_rows(values, order)
            if len(self.tables) > 1:
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
        size = self.part_sizes[self.rank]
        ids = self.union[:size]
        return self._stored(ids, kernels.gather_rows(self.total, ids) if self.is_native else self.total[:size])

    def _stored(self, ids: Tensor, values: Tensor, is_right: Tensor | None = None) -> list[Tensor]:
        """Store rows of the stack in their tables: each has its part, or where ids are not right, all, in row 0."""
        stored, first = [], 0
        for place, (table, start) in enumerate(zip(self.tables, self.starts, strict=True)):
            mine = slice(None)
            if self.is_sparse and len(self.tables) > 1:
                mine = slice(first, first := first + self.unions[place])
            local, rows = ids[mine], values[mine]
            if start:
                local = local - start if is_right is None else torch.add(local, is_right, alpha=-start)
            if self.is_sparse:
                total = SparseRows.trusted(local, rows, table.layout.num_rows)
                stored.append(table.layout.tensor(total))
            else:
                kernels.put_rows(self.dense(place), local, rows)
                stored.append(table.gradient)
        return stored

    @property
    def unions(self) -> list[int]:
        """The rows of each table in the sum."""
        return [sum(sizes) if self.is_owned else sizes[self.rank] for sizes in self.sizes_by]

    def counted(self) -> list[Counts]:
        """Return the rows of each table."""
        if self.is_native and not self.is_sparse:
            rows = [table.layout.num_rows for table in self.tables]
            return [Counts((num_rows,) * self.world_size, num_rows) for num_rows in rows]
        return [Counts(tuple(held), union) for held, union in zip(self.held_by, self.unions, strict=True)]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def _any(flags: Sequence[Tensor]) -> Tensor:
    """Return whether any is true, bool []."""
    flat = _joined([flag.view(-1) for flag in flags])
    return flat.view(()) if flat.numel() == 1 else flat.any()


class CollectiveSum:
    """Sums of the sparse gradients of a step over the ranks of a process group.

    All ranks make the same calls in the same order, on the thread that issues the other collectives of the group.

    Args:
        exchange: the collectives of the model's process group. Its ``host_waits`` grows by two in a call, and by one
            more where a table has far more rows than in the last one.

    Attributes:
        counts: rows of each table in the last call, by name.
        note: a number, not negative, that the next call tells all ranks.
        notes: the number that each rank told in the last call.

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
                received them returns nan in their place, and the next one raises.
            LostPeerError, CorruptHeaderError: the ranks are out of step, and the group is of no more use.
        """
        self._step = self._step + 1 & 0xFFFFFFFF
        call = _Call(self.exchange, self._step, self._late, scale, self.note)
        self._late = None
        call.find(tables, scheme, self._capacities, self._starts)
        call.agree_on_counts()
        self.notes = call.notes
        for job in call.jobs:
            for table, held in zip(job.tables, job.held_by, strict=True):
                self._capacities[table.name] = max(held) * 3 // 2 + SLACK_ROWS
        call.all_reduce_dense()
        call.exchange_rows()
        call.agree_on_sums()
        results, self._late = call.exchange_sums()
        counted = [zip(job.tables, job.counted(), strict=True) for job in call.jobs]
        self.counts = {table.name: counts for table, counts in chain.from_iterable(counted)}
        return results


class _Call:
    """The phases of one call of `CollectiveSum.all_reduce`, in order.

    Whatever fails on this rank alone is kept as ``failure`` until the next record tells the others, and meaningless
    bytes of the size that they expect go out in between.
    """

    def __init__(self, exchange: Collectives, step: int, late: Tensor | None, scale: float, note: int) -> None:
        self.exchange, self.step, self.scale, self.late, self.note = exchange, step, scale, late, note
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.failure: Exception | None = None
        self.jobs: list[_Job] = []
        self.device = torch.device("cpu")

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns, or None if it fails or anything did before."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:
                self.failure = error
        return None

    def find(
        self,
        tables: Sequence[NamedGradient],
        scheme: Scheme | Iterable[Scheme | TwoLevel],
        capacities: Mapping[str, int],
        starts: dict[tuple[object, ...], Tensor],
    ) -> None:
        """Phase 1."""
        self.num_tables, self.text = len(tables), ""
        if tables:
            self.device = tables[0].gradient.device
        self.zero = torch.zeros(1, dtype=torch.int64, device=self.device)

        def find() -> None:
            schemes = [scheme] * len(tables) if isinstance(scheme, (Scheme, TwoLevel)) else list(scheme)
            self.text = "\n".join([f"call {self.step}", f"scale={self.scale!r}", *map(_describe, tables, schemes)])
            for table in tables:
                if table.gradient.device != self.device:
                    raise ValueError(f"{table.name} is on {table.gradient.device}, others on {self.device}: sum apart")
            kinds = [(table.layout.width, table.gradient.dtype, table.gradient.is_sparse) for table in tables]
            self.places = stacks((point, *kind) for point, kind in zip(schemes, kinds, strict=True))
            if self.world_size == 1:
                self.places = [[place] for place in range(len(tables))]
            for places in self.places:
                stack = [tables[place] for place in places]
                point = schemes[places[0]]
                self.jobs.append(_Job(stack, point, self.rank, self.world_size, capacities, starts, self.zero))

        self.attempt(find)

    def agree_on_counts(self) -> None:
        """Phase 2."""
        numbers = self._exchanged(self._counts_record(), "in the last call, and got nan for them")
        if any(job.misses(rows) for job, rows in zip(self.jobs, self._rows(numbers.received), strict=True)):
            own = self._rows(numbers.sent[:1])
            self.attempt(lambda: [job.find_again(*rows) for job, rows in zip(self.jobs, own, strict=True)])
            numbers = self._exchanged(self._counts_record(), "in the last call, and got nan for them")
        self.notes = (numbers.received[:, _NOTE] // 2 - 1).tolist()
        sent, received = numbers.sent.T.tolist(), numbers.received.T.tolist()
        first = _FIXED
        for job, column in zip(self.jobs, range(_FIXED + _room(self.num_tables), len(sent)), strict=False):
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

    def _counts_record(self) -> Tensor:
        late = self.zero if self.late is None else self.late.view(1)
        record = self._record(2, lambda: [late, *[job.held for job in self.jobs]])
        if self.jobs and self.failure is None:
            first = _FIXED + _room(self.num_tables)
            record[:, first : first + len(self.jobs)] = _joined([job.dealt.view(-1, 1) for job in self.jobs], 1)
        return record

    def _record(self, numbers: int, columns: Callable[[], list[Tensor]]) -> Tensor:
        """Return a record of some numbers for each table: ``columns`` are equal for all ranks, the first `_CORRUPT`."""
        size = self.world_size, _FIXED + numbers * _room(self.num_tables)
        record = torch.zeros(size, dtype=torch.int64, device=self.device)
        record[:, _DIGEST] = digest64(self.text.encode()) - (1 << 63)
        record[:, _NOTE] = 2 * (self.note + 1) + (self.failure is not None)
        if self.jobs and self.failure is None:
            record[:, _CORRUPT : _FIXED + self.num_tables] = torch.cat(columns())
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
        texts = self.exchange.texts(self.text, self.device)
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
        if not owned:
            return
        arriving = [job.arriving for job in owned]
        send, receive = self._sizes([job.outgoing for job in owned]), self._sizes(arriving)
        self._check_fits(receive)

        def parts() -> list[list[Tensor]]:
            encoded = [job.encoded() for job in owned]
            return [of_table[peer] for peer in range(self.world_size) for of_table in encoded]

        incoming = self.exchange.all_to_all(self._joined(parts, sum(send)), send, receive)
        self._add(owned, _cut(incoming.split(receive), arriving))

    def _add(self, jobs: Sequence[_Job], payloads: Sequence[Sequence[Tensor]]) -> None:
        for job, of_table in zip(jobs, payloads, strict=True):
            self.attempt(partial(job.add, of_table, self.scale))

    def _gather(
        self, jobs: Sequence[_Job], pieces: Pieces, encode: Callable[[_Job], list[list[Tensor]]]
    ) -> list[list[Tensor]]:
        """Return the bytes of all ranks' pieces of each table, which ``encode`` makes on each rank."""
        sizes = self._sizes(pieces)
        self._check_fits(sizes)
        own = self._joined(lambda: [encode(job)[0] for job in jobs], sizes[self.rank])
        return _cut(self.exchange.all_gather(own, sizes), pieces)

    def _check_fits(self, sizes: Sequence[int]) -> None:
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
        record = self._record(
            1,
            lambda: [
                _any([job.wrong for job in self.jobs]).view(1), *[job.sizes for job in self.jobs]
            ],
        )  # fmt: skip
        numbers = self._exchanged(record, "in this call")
        received, first = numbers.received.T.tolist(), _FIXED
        for job in self.jobs:
            columns = slice(first, first + len(job.tables))
            self._act_on(partial(job.know_sizes, received[columns], numbers.on_device[:, columns]))
            first += len(job.tables)

    def exchange_sums(self) -> tuple[list[Tensor], Tensor | None]:
        """Gather the sums of all parts; return all results, and whether one is corrupt."""
        owned = [job for job in self.jobs if job.is_owned]
        payloads = iter(self._gather(owned, [job.sums for job in owned], _Job.encoded_sum))
        if self.failure is not None:
            raise self.failure
        results: dict[int, Tensor] = {}
        for job, places in zip(self.jobs, self.places, strict=True):
            sums = job.joined(next(payloads)) if job.is_owned else job.whole()
            results.update(zip(places, sums, strict=True))
        wrong = [job.wrong for job in owned]
        return [results[place] for place in range(self.num_tables)], _any(wrong) if wrong else None

    def where(self) -> str:
        """Return what begins a message."""
        return f"rank {self._global(self.rank)}, sum {self.step} of {self.num_tables} tables"

    def _global(self, rank: int) -> int:
        return self.exchange.global_ranks[rank]


def _room(num_tables: int) -> int:
    return -(-num_tables // TABLES_OF_A_RECORD) * TABLES_OF_A_RECORD


def _pieces(coding: Coding, counts: Sequence[int], sizes: Sequence[int]) -> list[CodedPiece]:
    return [coding.piece(count, size) for count, size in zip(counts, sizes, strict=True)]


def _cut(incoming: Sequence[Tensor], pieces: Pieces) -> list[list[Tensor]]:
    """Cut what each rank sent into its pieces; return those of each table, in rank order."""
    cut = [data.split([of_table[rank].num_bytes for of_table in pieces]) for rank, data in enumerate(incoming)]
    return [[of_rank[place] for of_rank in cut] for place in range(len(pieces))]


def _describe(table: NamedGradient, scheme: Scheme | TwoLevel) -> str:
    gradient = table.gradient
    sparse = f" of {gradient.sparse_dim()} sparse dimensions" if gradient.is_sparse else ""
    return f"{table.name}: {gradient.dtype} {list(gradient.shape)}{sparse}, {scheme.describe()}"
