"""Exact sums of sparse gradients on their device, by collectives of the model's own process group.

All tables of a step share each message, and the host waits twice:

1. Each rank finds its non-zero rows, into as much memory as the last step suggests, and deals them to owners.
2. A record of counts goes to each rank; the host waits for it. It also carries the number of the step, a digest of what
   is summed, and whether a rank failed, ran out of that memory, or holds ids that no table has.
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
_CHECK, _STEP, _FAILED, _INVALID, _CORRUPT, _DIGEST, _MISSING, _NOTE, _FIXED = range(9)
_SUM_OF_COLUMNS = 0x7468696E77697265  # not 0, or else a record of zeros would be whole
SLACK_ROWS = 256
_NEEDS_HOST = (Ownership.HIERARCHICAL_HASH, Ownership.COLUMNS, Ownership.UNION)

T = TypeVar("T")
Pieces = Sequence[Sequence[CodedPiece]]
"""For each table, the piece of each rank, or for each rank."""


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
    """Return the plan of a table [num_rows, width].

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
    plans: Sequence[TablePlan], pushed: Sequence[Sequence[Sequence[int]]], unions: Sequence[Sequence[int]], rank: int
) -> int:
    """Return the exact bytes that a rank sends for all tables of a step.

    Args:
        pushed: for each table, for each rank, the rows that it has for each rank (under centralization: for each
            rank those that it holds). Not used where a table goes dense.
        unions: for each table, the rows of the sum of each owner's part. Only used under parallelism.
    """
    world_size = len(pushed[0]) if pushed else 1
    total = (world_size - 1) * 8 * (2 * _FIXED + 3 * _room(len(plans)))
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


class _Job:
    """One table in one step, on its way through the phases of `_Call`.

    Attributes:
        ids, places: int64: the rows of this rank, in the order in which they are sent, and their indices in ``source``.
        held, dealt: their number, int64 [1], and that for each rank, int64 [world_size], on the device. More than
            ``capacity`` where not all fit, and then ``ids`` and ``dealt`` lack some.
        union, total, size: ids (or positions) of the sum of this rank's part, its rows, and their number, int64 [1].
        is_wrong: whether what arrived last is corrupt, or the ids of this rank are; bool [], on the device.
    """

    def __init__(self, table: NamedGradient, plan: TablePlan, rank: int, world_size: int, capacity: int | None) -> None:
        self.table, self.plan, self.rank, self.world_size = table, plan, rank, world_size
        self.gradient = table.gradient.detach()
        self.is_sparse = self.gradient.is_sparse
        if not (self.is_sparse or self.gradient.is_contiguous()):
            raise ValueError(f"{table.name}: the gradient has strides {self.gradient.stride()}: make it contiguous")
        self.is_native = plan.scheme.is_dense or (world_size == 1 and not self.is_sparse)
        self.is_owned = plan.partition is not None and not self.is_native
        self.capacity = plan.num_rows if capacity is None else min(plan.num_rows, capacity)
        self.is_wrong = torch.zeros((), dtype=torch.bool, device=self.gradient.device)
        self.size = torch.zeros(1, dtype=torch.int64, device=self.gradient.device)
        self.find()

    def find(self) -> None:
        """Find the rows that are not zero, and deal them to ranks."""
        self.held = self.size
        if self.is_sparse:
            self._coalesce()
        elif not self.is_native:
            self.source = self.dense()
            self.ids, self.held = kernels.find_rows(self.source, self.capacity)
            self.places = self.ids
        self.dealt = self.held.expand(self.world_size)
        if self.is_owned:
            assert self.plan.partition is not None
            self.ids, order, self.dealt = self.plan.partition.deal(self.ids)
            self.places = self.places[order]

    def _coalesce(self) -> None:
        """Add up rows of equal id in their order, as `SparseRows.from_pairs`, and check the ids."""
        indices, values = self.gradient._indices(), self.gradient._values()
        num_rows, self.capacity = self.plan.num_rows, indices.shape[1]
        ids = torch.zeros_like(indices[0])
        is_outside = torch.zeros_like(ids, dtype=torch.bool)
        for index, size in zip(indices, self.table.layout.shape, strict=False):
            is_outside |= (index < 0) | (index >= size)
            ids = ids * size + index
        self.is_wrong = is_outside.any()
        self.ids, self.held = ids.masked_fill(is_outside, num_rows), self.held + self.capacity
        self.source = values.reshape(self.capacity, self.plan.push.width)
        if not self.gradient.is_coalesced():
            self.ids, self.source, self.held = kernels.merge_rows(self.ids, self.source, num_rows, self.capacity)
        self.places = torch.arange(self.capacity, device=ids.device)

    def know_counts(self, sent: Sequence[int], received: Sequence[int], held: Sequence[int], counts: Tensor) -> None:
        """Take the numbers of rows for and from each rank, which also ``counts`` has on the device."""
        size, num_rows = self.plan.sizes[self.rank if self.is_owned else 0], self.plan.num_rows
        for count, rows in zip(received, held, strict=True):
            if not (0 if self.is_owned else rows) <= count <= min(size, rows) or rows > num_rows:
                raise CorruptHeaderError(f"{count} of {rows} rows of {self.table.name} are announced, of {size}")
        self.held_by, self.counts = held, counts
        self.outgoing = _pieces(self.plan.push, sent[: len(self.plan.sizes)], self.plan.sizes)
        self.arriving = _pieces(self.plan.push, received, [size] * self.world_size)

    def encoded(self) -> list[list[Tensor]]:
        """Return the bytes of this rank's pieces: one for each owner, or under centralization one for all ranks."""
        total = sum(piece.count for piece in self.outgoing)
        values = kernels.gather_rows(self.source, self.places[:total])
        positions = self.ids[:total]
        if self.plan.partition is not None:
            positions = self.plan.partition.positions(positions)
        return self.plan.push.encode(positions, values, self.outgoing, self.dealt[: len(self.outgoing)])

    def add(self, payloads: Sequence[Tensor], scale: float) -> None:
        """Add up the pieces of all ranks."""
        positions, values, self.is_wrong = self.plan.push.decode(payloads, self.arriving, self.counts)
        if self.world_size == 1:
            self.union, self.total, self.size = positions, values * scale, self.counts
        else:
            size = self.arriving[0].size
            self.union, self.total, self.size = kernels.merge_rows(positions, values, size, positions.numel(), scale)

    def dense(self) -> Tensor:
        """Return the gradient as a dense matrix [num_rows, width]: its own memory, or a copy of a sparse one."""
        num_rows, width = self.plan.num_rows, self.plan.push.width
        if not self.is_sparse:
            return self.gradient.view(num_rows, width)
        return kernels.put_rows(self.source.new_zeros(num_rows, width), self.ids, self.source)

    def take_dense(self, total: Tensor) -> None:
        """Note the sum of `dense`."""
        if self.is_sparse:
            self.total = total
            self.union, self.size = kernels.find_rows(total, min(self.plan.num_rows, sum(self.held_by)))

    def know_sizes(self, sizes: Sequence[int], on_device: Tensor) -> None:
        """Take the numbers of rows of the sums on each rank."""
        self.sizes, self.sizes_on_device = sizes, on_device
        if self.is_owned:
            if any(not 0 <= size <= part for size, part in zip(sizes, self.plan.sizes, strict=True)):
                raise CorruptHeaderError(f"sums of {sizes} rows of {self.table.name} are announced")
            self.sums = _pieces(self.plan.pull, sizes, self.plan.sizes)

    def encoded_sum(self) -> list[list[Tensor]]:
        """Return the bytes of the sum of this rank's part."""
        size, own = self.sizes[self.rank], slice(self.rank, self.rank + 1)
        return self.plan.pull.encode(self.union[:size], self.total[:size], self.sums[own], self.sizes_on_device[own])

    def joined(self, payloads: Sequence[Tensor]) -> Tensor:
        """Return the gradient's sum from those of all parts; if one is corrupt, it is filled with nan."""
        partition, num_rows = self.plan.partition, self.plan.num_rows
        assert partition is not None
        positions, values, is_wrong = self.plan.pull.decode(payloads, self.sums, self.sizes_on_device)
        ids = partition.join(positions.split([piece.count for piece in self.sums]))
        is_outside = ids >= num_rows
        self.is_wrong = is_wrong | is_outside.any()
        ids, values = ids.masked_fill(is_outside, 0), values.masked_fill(self.is_wrong, torch.nan)
        if self.is_sparse:
            ids, order = ids.sort()
            values = kernels.gather_rows(values, order)
        return self._stored(ids, values)

    def whole(self) -> Tensor:
        """Return the gradient's sum where this rank has all of it."""
        if self.is_native and not self.is_sparse:
            return self.table.gradient
        size = self.sizes[self.rank]
        ids = self.union[:size]
        return self._stored(ids, kernels.gather_rows(self.total, ids) if self.is_native else self.total[:size])

    def _stored(self, ids: Tensor, values: Tensor) -> Tensor:
        if self.is_sparse:
            return self.table.layout.tensor(SparseRows.trusted(ids, values, self.plan.num_rows))
        kernels.scatter_rows(self.dense(), ids, values)
        return self.table.gradient

    def counted(self) -> Counts:
        """Return the rows of the table."""
        if self.is_native and not self.is_sparse:
            return Counts((self.plan.num_rows,) * self.world_size, self.plan.num_rows)
        return Counts(tuple(self.held_by), sum(self.sizes) if self.is_owned else self.sizes[self.rank])


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
        call.find(tables, scheme, self._capacities)
        call.agree_on_counts()
        self.notes = call.notes
        for job in call.jobs:
            self._capacities[job.table.name] = max(job.held_by) * 3 // 2 + SLACK_ROWS
        call.all_reduce_dense()
        call.exchange_rows()
        call.agree_on_sums()
        results, self._late = call.exchange_sums()
        self.counts = {job.table.name: job.counted() for job in call.jobs}
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
    ) -> None:
        """Phase 1."""
        self.num_tables, self.text = len(tables), ""
        if tables:
            self.device = tables[0].gradient.device

        def find() -> None:
            schemes = [scheme] * len(tables) if isinstance(scheme, (Scheme, TwoLevel)) else list(scheme)
            self.text = "\n".join([f"scale={self.scale!r}", *map(_describe, tables, schemes)])
            for table, point in zip(tables, schemes, strict=True):
                layout = table.layout
                if table.gradient.device != self.device:
                    raise ValueError(f"{table.name} is on {table.gradient.device}, others on {self.device}: sum apart")
                made = plan(point, layout.num_rows, layout.width, table.gradient.dtype, self.world_size)
                self.jobs.append(_Job(table, made, self.rank, self.world_size, capacities.get(table.name)))

        self.attempt(find)

    def agree_on_counts(self) -> None:
        """Phase 2."""
        for _ in range(2):
            numbers = self._exchanged(self._counts_record(), "in the last call, and got nan for them")
            if not numbers.received[:, _MISSING].any():
                break
            self.attempt(partial(self._find_again, numbers.sent[0, _FIXED + 1 :: 2].tolist()))
        else:
            raise told(CorruptHeaderError(f"{self.where()}: ranks miss rows that they have found"), self.world_size)
        self.notes = numbers.received[:, _NOTE].tolist()
        sent, received = numbers.sent.T.tolist(), numbers.received.T.tolist()
        for job, column in zip(self.jobs, range(_FIXED, len(sent), 2), strict=False):
            counts = numbers.on_device[:, column].contiguous()
            self._act_on(partial(job.know_counts, sent[column], received[column], received[column + 1], counts))

    def _act_on(self, take: Callable[[], None]) -> None:
        """Take numbers that only this rank got; without them it cannot go on, and the others cannot know."""
        try:
            take()
        except CorruptHeaderError as error:
            raise in_exchange(CorruptHeaderError(f"{self.where()}: {error}")) from None

    def _find_again(self, found: Sequence[int]) -> None:
        for job, held in zip(self.jobs, found, strict=False):
            if held > job.capacity:
                job.capacity = held
                job.find()

    def _counts_record(self) -> Tensor:
        record = self._record(_FIXED + 2 * _room(self.num_tables))
        record[:, _DIGEST], record[:, _NOTE] = digest64(self.text.encode()) - (1 << 63), self.note
        if self.late is not None:
            record[:, _CORRUPT] = self.late
        if self.jobs and self.failure is None:
            record[:, _INVALID] = torch.stack([job.is_wrong for job in self.jobs]).any()
            record[:, _MISSING] = torch.stack([job.held > job.capacity for job in self.jobs]).any()
            tables = record[:, _FIXED : _FIXED + 2 * self.num_tables].view(self.world_size, -1, 2)
            tables[:, :, 0] = torch.stack([job.dealt for job in self.jobs], 1)
            tables[:, :, 1] = torch.cat([job.held for job in self.jobs])
        return record

    def _record(self, num_columns: int) -> Tensor:
        record = torch.zeros(self.world_size, num_columns, dtype=torch.int64, device=self.device)
        record[:, _STEP], record[:, _FAILED] = self.step, self.failure is not None
        return record

    def _exchanged(self, record: Tensor, when: str) -> Numbers:
        """Exchange a record, and raise on all ranks alike what any of them reports in it.

        The columns of a record have a known sum, so a record that was altered ends this rank before it acts on it.
        """
        record[:, _CHECK] = _SUM_OF_COLUMNS - record.sum(1)
        numbers = self.exchange.numbers(record)
        received = numbers.received
        if (received.sum(1) != _SUM_OF_COLUMNS).any():
            raise in_exchange(CorruptHeaderError(f"{self.where()}: a record whose checksum does not match"))
        if numbers.sent[0, _INVALID] and self.failure is None:
            self.failure = ValueError("a row id is out of range")
        failed = (received[:, _FAILED] | received[:, _INVALID]).tolist()
        if any(failed):
            reason = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
            texts, peer = self.exchange.texts(reason, self.device), failed.index(1)
            error = PeerError(f"{self.where()}: rank {self._global(peer)} reports: {texts[peer]}")
            raise told(self.failure or error, self.world_size)
        alike = received[:, [_STEP, _DIGEST]] == numbers.sent[0, [_STEP, _DIGEST]]
        if not alike.all():
            self._raise_mismatch()
        corrupt = received[:, _CORRUPT].tolist()
        if any(corrupt):
            ranks = ", ".join(str(self._global(rank)) for rank, is_corrupt in enumerate(corrupt) if is_corrupt)
            error = CorruptMessageError(f"{self.where()}: ranks {ranks} received ids that no rank can have sent {when}")
            raise told(error, self.world_size)
        return numbers

    def _raise_mismatch(self) -> NoReturn:
        texts = self.exchange.texts(f"call {self.step}\n{self.text}", self.device)
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
                dense = self.attempt(job.dense)
                if dense is None:
                    size = job.plan.num_rows, job.plan.push.width
                    dense = torch.zeros(size, dtype=job.gradient.dtype, device=self.device)
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
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        joined = self.attempt(lambda: torch.cat([nothing, *chain.from_iterable(parts())]))
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=self.device) if joined is None else joined

    def _sizes(self, pieces: Pieces) -> list[int]:
        """Return the bytes of the pieces of all tables, for each rank."""
        return [sum(of_table[rank].num_bytes for of_table in pieces) for rank in range(self.world_size)]

    def agree_on_sums(self) -> None:
        """Phase 5, the numbers of rows."""
        record = self._record(_FIXED + _room(self.num_tables))
        if self.jobs and self.failure is None:
            record[:, _CORRUPT] = torch.stack([job.is_wrong for job in self.jobs]).any()
            record[:, _FIXED : _FIXED + self.num_tables] = torch.cat([job.size for job in self.jobs])
        numbers = self._exchanged(record, "in this call")
        received = numbers.received.T.tolist()
        for job, column in zip(self.jobs, range(_FIXED, len(received)), strict=False):
            self._act_on(partial(job.know_sizes, received[column], numbers.on_device[:, column].contiguous()))

    def exchange_sums(self) -> tuple[list[Tensor], Tensor | None]:
        """Gather the sums of all parts; return all results, and whether one is corrupt."""
        owned = [job for job in self.jobs if job.is_owned]
        payloads = iter(self._gather(owned, [job.sums for job in owned], _Job.encoded_sum))
        if self.failure is not None:
            raise self.failure
        results = [job.joined(next(payloads)) if job.is_owned else job.whole() for job in self.jobs]
        return results, torch.stack([job.is_wrong for job in owned]).any() if owned else None

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
