"""One rank of `thinwire bench sync --workload dense:...`: every method in turn on the recorded gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import Channel, Subject, opening_bytes
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.lab.bench.dense.ideal import mean_bits
from thinwire.lab.bench.dense.workload import DenseWorkload
from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.bench.train.account import counter_of
from thinwire.lab.bench.train.stock import rank_order_sum
from thinwire.lab.bench.turns import TimedRun, Turns, mean_of_known, timed
from thinwire.lab.digests import digest_of
from thinwire.lab.testbed.rank import RankContext
from thinwire.sums.lossless import SumReport, begin, subject
from thinwire.sums.synchronize import dense_all_reduce

NATIVE, LOSSLESS, BF16, RANK_ORDER = "native", "lossless", "bf16", "rank_order"
METHODS = (NATIVE, LOSSLESS, BF16, RANK_ORDER)
"""The group's all-reduce; the coded two-shot sum; a cast to bfloat16 and back around the all-reduce; the uncoded
two-shot sum in rank order, whose bits lossless must have."""

_WARM_UP_VALUES = 4096


@dataclass(frozen=True)
class DenseMeasurement:
    """Measurement of one method on one rank; errors and ideal bits refer to the mean, the same on all ranks."""

    times: tuple[tuple[float, float], ...]
    sent_bytes: int
    sent_between_hosts_bytes: int
    predicted_bytes: int
    """Bytes that this rank was to send: of lossless estimated from samples before anything was coded."""
    link_bytes: float | None
    """Bytes that the interface of this rank's host sent in a run, mean over runs; None without one of its own."""
    digest: str
    equal_to_rank_order: bool
    max_abs_error: float
    relative_error: float
    coded: SumReport | None
    """What the code took, of the last run; None of other methods."""


@dataclass(frozen=True)
class DenseRank:
    """Everything that one rank measured: its buckets, ideal bits of a value pushed and pulled, and each method."""

    bucket_values: tuple[int, ...]
    dtype: str
    zeros: float
    ideal_push: float
    ideal_pull: float
    methods: dict[str, DenseMeasurement]


def measure(
    context: RankContext, workload: DenseWorkload, data: Data | None, methods: tuple[str, ...], turns: Turns
) -> DenseRank:
    """Record gradients, run each method in turns, interleaved, and return what was measured."""
    turns.share_hosts(context)
    buckets = workload.record(context.rank, context.world_size, data)
    lane = Lane()
    kernels.warm_up()
    for method in methods:
        _run(lane, method, [bucket[:_WARM_UP_VALUES].clone() for bucket in buckets], SumReport())
    runs = turns.run(context, methods, lambda method: _once(lane, method, buckets, turns))
    lane.close()
    return _judged(context, buckets, runs)


def _once(lane: Lane, method: str, buckets: Sequence[Tensor], turns: Turns) -> TimedRun:
    """Run once; the result has the means, what the code took, and the bytes that the interface sent."""
    means, coded, sent_on_link = [bucket.clone() for bucket in buckets], SumReport(), counter_of(turns.interface)
    run = timed(partial(_run, lane, method, means, coded), lane, turns.one_clock)
    dist.barrier()  # what this host still has to send belongs to this run
    return replace(run, result=(means, coded, sent_on_link()))


def _run(lane: Lane, method: str, means: Sequence[Tensor], coded: SumReport) -> None:
    """Average all buckets in place, a job of the lane for each, as in a training."""
    if method == LOSSLESS:
        begins = [partial(_begin, number, bucket, coded) for number, bucket in enumerate(means)]
        done = [lane.submit(lambda lane, complete: complete(), begin=begin) for begin in begins]
    else:
        done = [lane.submit(partial(_job, method, number, bucket)) for number, bucket in enumerate(means)]
    for future in done:
        future.wait()


def _begin(number: int, bucket: Tensor, coded: SumReport, lane: Lane) -> Callable[[], None]:
    channel, report = lane.channel(_subject(LOSSLESS, number, bucket)), SumReport()
    channel.begin_open()
    complete = begin(bucket, channel, 1.0 / channel.world_size, report)

    def finish() -> None:
        complete()
        coded.add(report)

    return finish


def _job(method: str, number: int, bucket: Tensor, lane: Lane) -> None:
    channel = lane.channel(_subject(method, number, bucket))
    channel.open()
    _UNCODED[method](bucket, channel)


def _subject(method: str, number: int, bucket: Tensor) -> Subject:
    return subject(f"bench {method} bucket {number}", f"{list(bucket.shape)} {bucket.dtype}", bucket)


def _native(bucket: Tensor, channel: Channel) -> None:
    dense_all_reduce(bucket, channel, 1.0 / channel.world_size)


def _bf16(bucket: Tensor, channel: Channel) -> None:
    small = bucket.div(channel.world_size).to(torch.bfloat16)
    channel.all_reduce(small)
    bucket.copy_(small)


def _rank_order(bucket: Tensor, channel: Channel) -> None:
    """Each rank adds up its piece in the order of the ranks, and sends the sum to all; scaled at the end."""
    pieces = list(bucket.tensor_split(channel.world_size))
    own, exchange = pieces[channel.rank], channel.exchange
    raw = [_raw(piece) for piece in pieces]
    pushed = exchange.swap(raw, [own.nbytes] * channel.world_size)
    total = rank_order_sum([part.view(bucket.dtype) for part in pushed])
    pulled = exchange.swap([_raw(total)] * channel.world_size, [piece.nbytes for piece in pieces])
    for piece, part in zip(pieces, pulled, strict=True):
        piece.copy_(part.view(bucket.dtype))
    bucket.mul_(1.0 / channel.world_size)


_UNCODED: dict[str, Callable[[Tensor, Channel], None]] = {NATIVE: _native, BF16: _bf16, RANK_ORDER: _rank_order}


def _predicted_bytes(method: str, buckets: Sequence[Tensor], context: RankContext) -> int:
    """Bytes that a rank sends by a method without a code."""
    rank, world_size = context.rank, context.world_size
    if method == RANK_ORDER:
        own = sum(bucket.tensor_split(world_size)[rank].nbytes for bucket in buckets)
        return sum(bucket.nbytes for bucket in buckets) + (world_size - 2) * own
    return sum(
        ring_all_reduce_bytes(bucket.numel() * (2 if method == BF16 else bucket.itemsize), world_size)
        for bucket in buckets
    )


def _judged(context: RankContext, buckets: Sequence[Tensor], runs: dict[str, list[TimedRun]]) -> DenseRank:
    gathered = [_gathered(bucket) for bucket in buckets]
    sums = [rank_order_sum(tensors) for tensors in gathered]
    exact = [torch.stack(tensors).double().mean(0) for tensors in gathered]
    expected = [total * (1.0 / context.world_size) for total in sums]
    values = sum(bucket.numel() for bucket in buckets)
    opening = len(buckets) * opening_bytes(context.world_size)

    def judged(method: str, each: Sequence[TimedRun]) -> DenseMeasurement:
        means, coded, _ = each[-1].result
        return DenseMeasurement(
            tuple(run.times for run in each),
            each[-1].sent_bytes,
            each[-1].sent_between_hosts_bytes,
            opening + (round(coded.predicted_bytes) or _predicted_bytes(method, buckets, context)),
            mean_of_known([link for *_, link in (run.result for run in each)]),
            digest_of(means),
            all(map(torch.equal, map(_raw, means), map(_raw, expected))),
            *_errors(means, exact),
            coded if method == LOSSLESS else None,
        )

    return DenseRank(
        tuple(bucket.numel() for bucket in buckets),
        str(buckets[0].dtype).removeprefix("torch."),
        sum(int((bucket == 0).sum()) for bucket in buckets) / values,
        mean_bits(buckets),
        mean_bits(sums),
        {method: judged(method, each) for method, each in runs.items()},
    )


def _gathered(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def _errors(means: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float]:
    """The largest deviation from the mean in float64, and the length of the error relative to that of the mean."""
    mean, true = torch.cat(list(means)).double(), torch.cat(list(exact))
    error = mean - true
    return float(error.abs().max()), float(error.norm() / true.norm()) if bool(true.any()) else 0.0


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
