"""Stock DDP with measurement: its own collectives, with their times and bytes.

DDP gives a registered communication hook the work of its reducer, so this hook repeats the reducer's steps:
divide by the world size, then all-reduce each bucket asynchronously. Losses are bit for bit those of DDP
without a hook (``tests/ranks/test_demo.py``).
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

METADATA_BYTES = 9 * 8
"""Bytes that Gloo's sparse all-reduce gathers first from each rank: 9 int64, the sizes and the number of non-zeros."""


def ring_bytes(num_bytes: int, world_size: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of ``num_bytes``: 2 (n - 1) / n of them."""
    return 2 * (world_size - 1) / world_size * num_bytes


def gathered_bytes(rows: int, row_bytes: int, world_size: int) -> float:
    """Return the bytes that each rank sends in Gloo's sparse all-reduce ("AGsparse"), ``rows`` distinct rows per rank.

    Every rank's rows go to the n - 1 others: an int64 id and the values of each, after the metadata. With
    different counts per rank this is exact for the mean over ranks, since a rank forwards the others' rows.
    """
    return (world_size - 1) * (METADATA_BYTES + rows * (8 + row_bytes))


@dataclass
class ParameterTotals:
    """Sums over all steps, for one parameter."""

    kind: str
    scheme: str
    sent_bytes: float = 0.0
    density: float = 0.0
    density_after: float = 0.0
    steps: int = 0


@dataclass
class StockMeter:
    """Meter returned by :func:`attach`: same ``stats`` and ``table`` as a thinwire synchronizer.

    Times are measured, from the launch of a collective to its completion; bytes follow from the formulas
    above, because Gloo keeps no count.
    """

    names: dict[Tensor, str]
    world_size: int
    intervals: list[tuple[float, float]] = field(default_factory=list)
    totals: dict[str, ParameterTotals] = field(default_factory=lambda: defaultdict(_dense_totals))

    def stats(self) -> dict[str, float]:
        """Return totals since :func:`attach`: bytes this rank sent, seconds in which a collective was under way."""
        sent = sum(total.sent_bytes for total in self.totals.values())
        return {"comm/bytes_sent": sent, "comm/seconds": covered_seconds(self.intervals)}

    def table(self) -> list[dict[str, str | float]]:
        """Return one row per parameter, means per step."""
        return [
            {
                "name": name,
                "kind": total.kind,
                "scheme": total.scheme,
                "bytes": total.sent_bytes / total.steps,
                "density": total.density / total.steps,
                "density_after": total.density_after / total.steps,
            }
            for name, total in sorted(self.totals.items())
        ]


def _dense_totals() -> ParameterTotals:
    return ParameterTotals("dense", "all-reduce")


def attach(model: DistributedDataParallel) -> StockMeter:
    """Measure a DDP model whose gradients stock PyTorch synchronizes."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.module.named_parameters()}
    meter = StockMeter(names, dist.get_world_size(model.process_group))
    model.register_comm_hook(meter, stock_hook)
    return meter


def stock_hook(meter: StockMeter, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Run the reducer's own all-reduce of one bucket, timed and counted."""
    gradient = bucket.buffer()
    if gradient.is_sparse:
        gradient.div_(meter.world_size)
    else:
        gradient.mul_(1 / meter.world_size)  # the reducer multiplies dense and divides sparse gradients
    (_count_sparse if gradient.is_sparse else _count_dense)(meter, bucket)
    start = time.perf_counter()
    work = dist.all_reduce(gradient, async_op=True)
    assert work is not None

    def finished(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        meter.intervals.append((start, time.perf_counter()))
        total = future.value()[0]
        if total.is_sparse:
            name = meter.names[bucket.parameters()[0]]
            meter.totals[name].density_after += distinct_rows(total) / total.shape[0]
        return total

    return work.get_future().then(finished)


def _count_sparse(meter: StockMeter, bucket: dist.GradBucket) -> None:
    gradient = bucket.buffer()
    rows = distinct_rows(gradient)
    total = meter.totals.setdefault(meter.names[bucket.parameters()[0]], ParameterTotals("sparse rows", "agsparse"))
    row_bytes = gradient[0].numel() * gradient.element_size()
    total.sent_bytes += gathered_bytes(rows, row_bytes, meter.world_size)
    total.density += rows / gradient.shape[0]
    total.steps += 1


def _count_dense(meter: StockMeter, bucket: dist.GradBucket) -> None:
    for parameter in bucket.parameters():
        total = meter.totals[meter.names[parameter]]
        total.sent_bytes += ring_bytes(parameter.numel() * parameter.element_size(), meter.world_size)
        total.density += 1.0
        total.density_after += 1.0
        total.steps += 1


def distinct_rows(gradient: Tensor) -> int:
    """Return the number of rows of a sparse COO gradient, counting repeated ids once, without adding up the values."""
    return gradient._indices()[0].unique().numel()


def covered_seconds(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of time intervals: buckets in flight together count once."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered
