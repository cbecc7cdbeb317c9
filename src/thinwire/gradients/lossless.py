"""Dense gradients whose sums travel losslessly coded: which buckets go that way, and what that takes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm.channel import Channel, opening_bytes
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging, reduce_scatter_bytes, ring_all_reduce_bytes
from thinwire.compress.assign import AUTO, LOSSLESS, NATIVE
from thinwire.gradients.tables import by_dtype, flattened
from thinwire.observe.step import ParameterRecords, Phase
from thinwire.rows.sparse import SUPPORTED_DTYPES
from thinwire.sums.lossless import Loads, SumReport, begin, subject

ROW, SCATTERED = "all other parameters, lossless", "all other parameters, to their owners"
"""Names of rows of `Synchronizer.table` for dense gradients that go this way, coded or as they are."""
LEAST_BYTES = 16 * 1024
"""Fewest bytes of a bucket for which a code pays: below, rounds and not bytes are what a sum costs."""


class Other(NamedTuple):
    """A dense gradient that is not compressed, or several of one dtype side by side.

    Args:
        name: a name for error messages.
        gradient: contiguous; averaged in place.
        how: one of `thinwire.compress.assign.EXACT`.
    """

    name: str
    gradient: Tensor
    how: str


@dataclass(eq=False)
class LosslessSync:
    """The means over ranks of the dense gradients that are summed losslessly, next to `GradientSync`.

    What is coded changes between two steps only, and on all ranks alike.

    Args:
        records: rows of the table, by name.
        scatters: whether reduce-scatters under "auto" go straight to the owners of the parts, as they are.
        exact: how each gradient that is not compressed is summed, by the name of its parameter.
        dtypes: dtypes of the gradients that "auto" codes; none to leave them to the native all-reduce.
        native: buckets whose gradients "auto" does not code, by name, and why.
        reports: what each bucket has taken, until somebody takes them.
        total: what all have taken.
        loads: bytes of the segments of each bucket and dtype in the step before.
        reason: reason of the decision, for the table.
        working: returns the context in which other threads than the lane's use gradients of a device.
    """

    records: ParameterRecords
    scatters: bool = False
    exact: Mapping[str, str] = field(default_factory=dict)
    dtypes: frozenset[torch.dtype] = frozenset()
    native: dict[str, str] = field(default_factory=dict)
    reports: dict[str, SumReport] = field(default_factory=dict)
    total: SumReport = field(default_factory=SumReport)
    loads: dict[tuple[str, torch.dtype], Loads] = field(default_factory=dict)
    reason: str = ""
    working: Callable[[], AbstractContextManager[object]] = nullcontext
    listener: Callable[[Phase, float, float], None] | None = None

    def how(self, name: str) -> str:
        """Return how the gradient of a parameter is summed; one that is not compressed any more is native."""
        return self.exact.get(name, NATIVE)

    @cached_property
    def is_asked_for(self) -> bool:
        """Whether any gradient is coded in any case."""
        return LOSSLESS in self.exact.values()

    @cached_property
    def alike(self) -> str | None:
        """How all gradients are summed, or None if that differs."""
        first, *others = set(self.exact.values()) or {NATIVE}
        return None if others else first

    def turn(self, dtypes: Sequence[torch.dtype]) -> None:
        """Let "auto" code buckets of these dtypes, from the next step on."""
        self.dtypes = frozenset(dtypes)

    def taken(self, bucket: str, gradients: Sequence[Other]) -> list[bool]:
        """Return of each gradient whether it is coded."""
        num_bytes = dict.fromkeys(() if bucket in self.native else self.dtypes, 0)
        for _, gradient, how in gradients:
            if how == AUTO and gradient.dtype in num_bytes:
                num_bytes[gradient.dtype] += gradient.nbytes
        if self.scatters:
            return [one.nbytes > LEAST_BYTES and one.dtype in SUPPORTED_DTYPES for _, one, _ in gradients]
        return [
            num_bytes.get(gradient.dtype, 0) > LEAST_BYTES
            if how == AUTO
            else how == LOSSLESS and gradient.dtype in SUPPORTED_DTYPES and gradient.numel() > 0
            for _, gradient, how in gradients
        ]

    def begin(self, lane: Lane, bucket: str, gradients: Sequence[Other], staging: Staging) -> Callable[[], list[Other]]:
        """Begin to average those gradients of a bucket that are coded, in place.

        Return a function that completes it, and returns the other gradients, which are unchanged.
        """
        taken = self.taken(bucket, gradients)
        others = [one for one, goes in zip(gradients, taken, strict=True) if not goes]
        if not any(taken):
            return lambda: others
        lines = [f"{one.name}: {one.gradient.dtype} {list(one.gradient.shape)}" for one in gradients]
        mine = [one.gradient for one, goes in zip(gradients, taken, strict=True) if goes]
        loads = "; ".join(f"{dtype} {loads}" for (name, dtype), loads in self.loads.items() if name == bucket)
        channel = lane.channel(subject(bucket, "\n".join([*lines, f"mean, {LOSSLESS}"]), mine[0], loads))
        channel.begin_open()
        staging.to_host()  # sleeps until the gradients are there; a copy of a code would spin
        complete = self._begin_average(channel, bucket, mine, opening_bytes(channel.world_size))

        def finish() -> list[Other]:
            complete()
            return others

        return finish

    def average(
        self, channel: Channel, tensors: Sequence[Tensor], bucket: str, gradients: Sequence[Other]
    ) -> list[Tensor]:
        """Do the same on a channel that was opened for all of them.

        Args:
            tensors: the gradients, on the host.
        """
        pairs = list(zip(tensors, self.taken(bucket, gradients), strict=True))
        self._begin_average(channel, bucket, [tensor for tensor, goes in pairs if goes])()
        return [tensor for tensor, goes in pairs if not goes]

    def _begin_average(
        self, channel: Channel, bucket: str, tensors: Sequence[Tensor], opening: int = 0
    ) -> Callable[[], None]:
        """Begin to average tensors, one dtype after the other; ``opening`` bytes are not counted yet."""
        same_dtype = by_dtype(tensors)
        if not same_dtype:
            return lambda: None
        complete = self._begin_sum(channel, bucket, same_dtype[0], opening)

        def finish() -> None:
            complete()
            for later in same_dtype[1:]:
                self._begin_sum(channel, bucket, later, 0)()

        return finish

    def _begin_sum(self, channel: Channel, bucket: str, tensors: Sequence[Tensor], opening: int) -> Callable[[], None]:
        flat, copy_back = flattened(tensors)
        report = SumReport(listener=self.listener)
        loads = self.loads.setdefault((bucket, flat.dtype), Loads())
        complete = begin(flat, channel, 1.0 / channel.world_size, report, working=self.working, loads=loads)

        def finish() -> None:
            sent = opening + complete()
            copy_back()
            self.book(bucket, report, sent, opening, ring_all_reduce_bytes(flat.nbytes, channel.world_size))

        return finish

    def begin_reduce_scatter(
        self, lane: Lane, bucket: str, flat: Tensor, out: Tensor, scale: float, staging: Staging
    ) -> Callable[[], None]:
        """Begin to sum flat tensors [n * k]; return a function that stores the part of this rank in ``out`` [k].

        It is multiplied by ``scale``.
        """
        how = "as they are" if self.scatters else LOSSLESS
        about = f"{flat.dtype} {flat.numel()}, sums of parts times {scale}, {how}"
        channel = lane.channel(subject(bucket, about, flat))
        channel.begin_open()
        report = SumReport(listener=self.listener)
        staging.to_host()
        complete = begin(flat, channel, scale, report, out, codes=not self.scatters, working=self.working)

        def finish() -> None:
            opening = opening_bytes(channel.world_size)
            sent = opening + complete()
            moved = reduce_scatter_bytes(flat.nbytes, channel.world_size, flat.device)
            self.book(bucket, report, sent, opening, moved)

        return finish

    def book(self, bucket: str, report: SumReport, sent: int, opening: int, moved: int) -> None:
        """Count a sum for the table: the bytes sent, the bytes to open its channel, and what stock sends."""
        if self.scatters:
            record = self.records.book(SCATTERED, "reduce-scatter", "owners", "dense")
            record.reason = "Gloo's reduce-scatter is an all-reduce: twice the bytes"
            record.add(sent, opening + report.predicted_bytes, moved)
            return
        self.total.add(report)
        self.reports.setdefault(bucket, SumReport()).add(report)
        pull = f" + {self.total.pull.bits:.1f}" if self.total.pull.values else ""
        record = self.records.book(ROW, "all-reduce", LOSSLESS, f"{self.total.push.bits:.1f}{pull} bits a value")
        record.reason = self.reason
        record.add(sent, opening + report.predicted_bytes, moved)

    def stats(self) -> dict[str, float]:
        """Return the entries of `Synchronizer.stats` whose names begin with "lossless/"."""
        if self.scatters:
            return {}
        push, pull = self.total.push, self.total.pull
        return {
            "lossless/bits_per_value": self.total.bits,
            "lossless/encode_seconds": push.encode_seconds + pull.encode_seconds,
            "lossless/decode_seconds": push.decode_seconds + pull.decode_seconds,
            "lossless/values": float(self.total.values),
        }
