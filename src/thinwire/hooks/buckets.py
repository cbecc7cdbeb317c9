"""Take gradient buckets of DDP apart, and decide which buckets are synchronized by one job of the lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire.hooks.embedding import LookupRows
from thinwire.hooks.gradients import GradientSync
from thinwire.hooks.table import TableGradient
from thinwire.lane import Lane

OTHERS = "all other parameters"
"""The row of `Synchronizer.table` for what is all-reduced in buckets."""

MAX_WAITING_BYTES = 1024 * 1024
"""Small buckets wait for each other up to this size: more would keep the network idle that backward could hide."""


@dataclass(frozen=True, eq=False)
class Contents:
    """A bucket taken apart.

    Args:
        buffer: what DDP handed over; a sparse bucket holds one COO gradient, a dense one is synchronized in place.
        tables: gradients that are synchronized as rows.
        others: what lies between them, by a name for error messages.
    """

    buffer: Tensor
    tables: tuple[TableGradient, ...]
    others: tuple[tuple[str, Tensor], ...] = ()


class Buckets:
    """Submits to the lane what DDP hands over.

    DDP gives each ``sparse=True`` embedding a bucket of its own. Small ones wait, so that one job can synchronize them
    together: until a bucket comes that does not wait, which may be the last one of the step, or until enough of them
    wait. Only what all ranks know decides, so all ranks form the same jobs. DDP waits for the futures after its last
    bucket only.

    A table does not wait the first time it is seen: under ``static_graph`` DDP calls no bucket of its first backward
    the last one (torch 2.13), and waits for all before this class could hear that backward is over.

    Args:
        gradients: what is done with each gradient.
        lookups: which parameters are tables, and which of their rows a backward touched.
        names: of parameters, by ``id()``.
        lane: where it is done.
    """

    def __init__(self, gradients: GradientSync, lookups: LookupRows, names: Mapping[int, str], lane: Lane) -> None:
        self._gradients = gradients
        self._lookups = lookups
        self._names = names
        self._lane = lane
        self._tables = {id(parameter) for parameter in lookups.parameters}
        self._seen: set[str] = set()
        self._waiting: list[tuple[Contents, Future[Tensor]]] = []
        self._waiting_bytes = 0

    def add(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """What DDP takes for the bucket, once it is there: a new sparse tensor, or its buffer, in place."""
        contents = self._take_apart(bucket)
        future: Future[Tensor] = Future()
        self._waiting.append((contents, future))
        may_wait = self._may_wait(contents)
        self._waiting_bytes += sum(self._gradients.shape(table).expected_bytes for table in contents.tables)
        if not may_wait or bucket.is_last() or self._waiting_bytes > MAX_WAITING_BYTES:
            self.flush()
        return future

    def flush(self) -> None:
        """Submit what waits. Nothing may be left when backward is over."""
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if batch:
            self._lane.submit(lambda lane: self._fulfil(lane, batch))

    def _may_wait(self, contents: Contents) -> bool:
        """Whether it is a small sparse bucket that was seen before. It has been seen now."""
        if not contents.buffer.is_sparse:
            return False
        (table,) = contents.tables
        seen = table.name in self._seen
        self._seen.add(table.name)
        return seen and self._gradients.shape(table).is_small

    def _fulfil(self, lane: Lane, batch: Sequence[tuple[Contents, Future[Tensor]]]) -> None:
        """A job of the lane. A failure reaches every bucket of the batch."""
        try:
            results = self._synchronize(lane, [contents for contents, _ in batch])
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result
            raise
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)

    def _synchronize(self, lane: Lane, batch: Sequence[Contents]) -> list[Tensor]:
        tables = [table for contents in batch for table in contents.tables]
        means = {table.name: mean for table, mean in zip(tables, self._gradients.tables(lane, tables), strict=True)}
        for contents in batch:
            for name, gradient in contents.others:
                self._gradients.dense(lane, name, gradient, OTHERS)
        return [means[contents.tables[0].name] if contents.buffer.is_sparse else contents.buffer for contents in batch]

    def _take_apart(self, bucket: dist.GradBucket) -> Contents:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return Contents(buffer, (TableGradient(self._names[id(bucket.parameters()[0])], buffer),))
        tables: list[TableGradient] = []
        others: list[tuple[str, Tensor]] = []
        done = 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) in self._tables:
                assert isinstance(parameter, nn.Parameter)
                begin = int(gradient.storage_offset() - buffer.storage_offset())
                others += _between(bucket, done, begin)
                tables.append(TableGradient(self._names[id(parameter)], gradient, self._lookups.take(parameter)))
                done = begin + gradient.numel()
        others += _between(bucket, done, buffer.numel())
        return Contents(buffer, tuple(tables), tuple(others))


def _between(bucket: dist.GradBucket, begin: int, stop: int) -> list[tuple[str, Tensor]]:
    name = f"elements {begin} to {stop} of gradient bucket {bucket.index()}"
    return [(name, bucket.buffer()[begin:stop])] if stop > begin else []
