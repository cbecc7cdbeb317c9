"""Dense gradients whose sums travel losslessly coded: which buckets go that way, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.comm.channel import Channel, Subject, opening_bytes
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging, ring_all_reduce_bytes
from thinwire.lossless.sum import SumReport, all_reduce, reduce_scatter
from thinwire.observe.step import ParameterRecord, Phase

NATIVE, LOSSLESS, AUTO = "native", "lossless", "auto"
"""Values of ``dense=`` of `thinwire.attach`."""
ROW = "all other parameters, lossless"
"""Name of the row of `Synchronizer.table` for dense gradients that go this way."""
SAMPLED_STEPS, SAMPLE_VALUES, RUN_VALUES = 2, 128 * 1024, 1024
"""Steps in which gradients are sampled, values in each of all gradients together, and those taken side by side. The sum
of these samples sends 1 MB a rank."""
LEAST_BYTES = 16 * 1024
"""Fewest bytes of a bucket for which a code pays: below, rounds and not bytes are what a sum costs."""


@dataclass(eq=False)
class LosslessSync:
    """The means over ranks of the dense gradients that are summed losslessly, next to `GradientSync`.

    What goes this way changes between two steps only, and on all ranks alike.

    Args:
        records: rows of the table, by name.
        dtypes: dtypes of the gradients that go this way; none to leave all to the native all-reduce.
        least_bytes: fewest bytes of such gradients in a bucket.
        native: buckets that do not go this way, by name, and why.
        reports: what each bucket has taken, until somebody takes them.
        total: what all have taken.
        reason: reason of the decision, for the table.
    """

    records: dict[str, ParameterRecord]
    dtypes: frozenset[torch.dtype] = frozenset()
    least_bytes: int = 0
    native: dict[str, str] = field(default_factory=dict)
    reports: dict[str, SumReport] = field(default_factory=dict)
    total: SumReport = field(default_factory=SumReport)
    reason: str = ""
    listener: Callable[[Phase, float, float], None] | None = None

    def turn(self, dtypes: Sequence[torch.dtype]) -> None:
        """Let buckets of these dtypes go this way, from the next step on."""
        self.dtypes = frozenset(dtypes)
        self.native.clear()
        self.reports.clear()

    def takes(self, bucket: str, gradients: Sequence[Tensor]) -> bool:
        """Return whether any gradient of a bucket goes this way."""
        return bool(self.dtypes) and any(self._taken(bucket, gradients))

    def all_reduce(
        self, lane: Lane, bucket: str, gradients: Sequence[tuple[str, Tensor]], staging: Staging
    ) -> list[tuple[str, Tensor]]:
        """Average those gradients of a bucket that go this way, in place; return the others, which are unchanged."""
        tensors = [gradient for _, gradient in gradients]
        taken = self._taken(bucket, tensors)
        if any(taken):
            lines = [f"{name}: {tensor.dtype} {list(tensor.shape)}" for name, tensor in gradients]
            channel = lane.channel(Subject(bucket, "\n".join([*lines, f"mean, {LOSSLESS}"])))
            channel.open()
            mine = [tensor for tensor, goes in zip(tensors, taken, strict=True) if goes]
            hosts = staging.to_host(*mine)
            self.average(channel, bucket, hosts, opening_bytes(channel.world_size))
            for tensor, mean in () if staging.is_host else zip(mine, staging.to_device(*hosts), strict=True):
                tensor.copy_(mean)
        return [pair for pair, goes in zip(gradients, taken, strict=True) if not goes]

    def average(self, channel: Channel, bucket: str, tensors: Sequence[Tensor], opening: int = 0) -> list[Tensor]:
        """Do the same on a channel that was opened for all of them; of that ``opening`` bytes are not counted yet."""
        taken = self._taken(bucket, tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor, goes in zip(tensors, taken, strict=True) if goes):
            mine = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = mine[0] if len(mine) == 1 else torch.cat([tensor.reshape(-1) for tensor in mine])
            report, sent_before = SumReport(listener=self.listener), channel.exchange.traffic.sent_bytes
            all_reduce(flat, channel, 1.0 / channel.world_size, report)
            if len(mine) > 1:
                for tensor, mean in zip(mine, flat.split([tensor.numel() for tensor in mine]), strict=True):
                    tensor.copy_(mean.view(tensor.shape))
            sent = opening + channel.exchange.traffic.sent_bytes - sent_before
            self.book(bucket, report, sent, opening, ring_all_reduce_bytes(flat.nbytes, channel.world_size))
            opening = 0
        return [tensor for tensor, goes in zip(tensors, taken, strict=True) if not goes]

    def reduce_scatter(
        self, lane: Lane, bucket: str, flat: Tensor, out: Tensor, scale: float, staging: Staging
    ) -> None:
        """Store in ``out`` [k] the part of this rank, times ``scale``, in the sum of flat tensors [n * k]."""
        channel = lane.channel(Subject(bucket, f"{flat.dtype} {flat.numel()}, sums of parts times {scale}, {LOSSLESS}"))
        channel.open()
        report, sent_before = SumReport(listener=self.listener), channel.exchange.traffic.sent_bytes
        (host,) = staging.to_host(flat)
        total = out if staging.is_host else torch.empty_like(host[: out.numel()])
        reduce_scatter(host, total, channel, scale, report)
        if not staging.is_host:
            out.copy_(staging.to_device(total)[0])
        opening, moved = opening_bytes(channel.world_size), ring_all_reduce_bytes(flat.nbytes, channel.world_size) // 2
        self.book(bucket, report, opening + channel.exchange.traffic.sent_bytes - sent_before, opening, moved)

    def book(self, bucket: str, report: SumReport, sent: int, opening: int, moved: int) -> None:
        """Count a sum for the table: the bytes sent, those to open its channel, and those of stock's way."""
        self.total.add(report)
        self.reports.setdefault(bucket, SumReport()).add(report)
        record = self.records.setdefault(ROW, ParameterRecord(ROW))
        record.kind, record.scheme, record.fused, record.reason = "all-reduce", LOSSLESS, 1, self.reason
        pull = f" + {self.total.pull.bits:.1f}" if self.total.pull.values else ""
        record.formats = f"{self.total.push.bits:.1f}{pull} bits a value"
        record.density = record.density_after = 1.0
        record.add(sent, opening + report.predicted_bytes, moved)

    def stats(self) -> dict[str, float]:
        """Return the ``lossless/`` entries of `Synchronizer.stats`."""
        push, pull = self.total.push, self.total.pull
        return {
            "lossless/bits_per_value": self.total.bits,
            "lossless/encode_seconds": push.encode_seconds + pull.encode_seconds,
            "lossless/decode_seconds": push.decode_seconds + pull.decode_seconds,
            "lossless/values": float(self.total.values),
        }

    def _taken(self, bucket: str, gradients: Sequence[Tensor]) -> list[bool]:
        """Return of each gradient whether it goes this way."""
        if bucket in self.native:
            return [False] * len(gradients)
        num_bytes = dict.fromkeys(self.dtypes, 0)
        for gradient in gradients:
            if gradient.dtype in num_bytes:
                num_bytes[gradient.dtype] += gradient.nbytes
        return [num_bytes.get(gradient.dtype, 0) > self.least_bytes for gradient in gradients]


class GradientSampler:
    """Samples of local gradients, of the same places on all ranks.

    Args:
        num_values: values of all gradients.
    """

    def __init__(self, num_values: int) -> None:
        self._stride = max(RUN_VALUES, num_values // (SAMPLE_VALUES // RUN_VALUES))
        self._runs: dict[str, list[Tensor]] = {}

    def expect(self, name: str, gradient: Tensor) -> None:
        """Expect samples of a gradient; of one that does not come there are zeros."""
        self._runs[name] = [torch.zeros_like(self._of(gradient))] * SAMPLED_STEPS

    def __call__(self, name: str, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            self._runs[name] = [*self._runs.get(name, []), self._of(gradient)][-SAMPLED_STEPS:]

    def samples(self) -> dict[torch.dtype, Tensor]:
        """Return the samples of each dtype, in the order of names."""
        runs = [run for name in sorted(self._runs) for run in self._runs[name]]
        dtypes = sorted({run.dtype for run in runs}, key=str)
        return {dtype: torch.cat([run for run in runs if run.dtype == dtype]) for dtype in dtypes}

    def _of(self, gradient: Tensor) -> Tensor:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        flat = real.detach().reshape(-1)
        return torch.cat([flat[start : start + RUN_VALUES] for start in range(0, flat.numel(), self._stride)])
