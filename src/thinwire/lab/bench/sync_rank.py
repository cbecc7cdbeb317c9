"""One rank of `thinwire bench sync`: it runs every method in turn, and reports the cost and result of each."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.comm.machine import LONG_PROBE_BYTES, Machine
from thinwire.comm.machine import measure as measure_machine
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.tables import TableGradient
from thinwire.lab.bench.methods import AGSPARSE_TORCH, scheme_of
from thinwire.lab.bench.turns import TimedRun, Turns, timed
from thinwire.lab.bench.workload import Workload
from thinwire.lab.digests import digest_of
from thinwire.lab.testbed.rank import RankContext
from thinwire.rows.sparse import Layout, SparseRows
from thinwire.sums.named import AUTO, DENSE, name_of
from thinwire.sums.scheme import Scheme
from thinwire.sums.synchronize import agree, dense_all_reduce, synchronize
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import chosen
from thinwire.tune.trial import Trial

_WARM_UP_ROWS = 64
_TABLE, _SEEN_STEPS, _MOST_STEPS = "table", 3, 200

Sum = Callable[[], SparseRows | Tensor]


@dataclass(frozen=True)
class RankMeasurement:
    """Measurement of one method on one rank. Times of all ranks are comparable, see `Turns`."""

    times: tuple[tuple[float, float], ...]
    sent_bytes: int | None  # of one run; None if torch moves the bytes, uncounted
    sent_between_hosts_bytes: int | None
    chosen: str
    digest: str
    max_abs_error: float | None  # on rank 0
    machine: Machine | None


def measure(
    context: RankContext, workload: Workload, methods: tuple[str, ...], turns: Turns
) -> dict[str, RankMeasurement]:
    """Run each method in turns, interleaved, and return a measurement for each."""
    turns.share_hosts(context)
    rows = workload.rows(context.rank)
    lane = Lane()
    kernels.warm_up()
    machine = lane.submit(lambda lane: measure_machine(lane.exchange, LONG_PROBE_BYTES)).wait()
    points = {method: _point(method, lane, rows) for method in methods}
    for method in methods:
        timed(_runner(points[method], lane, _few(rows)), lane, turns.one_clock)
    kept: dict[str, TimedRun] = {}

    def run(method: str) -> TimedRun:
        """Run once; only the last run of a method keeps its result."""
        done = timed(_runner(points[method], lane, rows), lane, turns.one_clock)
        if method in kept:
            kept[method].result = None
        kept[method] = done
        return done

    runs = turns.run(context, methods, run)
    lane.close()
    results = {method: _as_rows(runs[method][-1].result) for method in methods}
    errors = _errors(workload, results) if context.rank == 0 else {}

    def measured(method: str) -> RankMeasurement:
        point, last, result = points[method], runs[method][-1], results[method]
        is_counted = point != AGSPARSE_TORCH
        return RankMeasurement(
            times=tuple(run.times for run in runs[method]),
            sent_bytes=last.sent_bytes if is_counted else None,
            sent_between_hosts_bytes=last.sent_between_hosts_bytes if is_counted else None,
            chosen=point if isinstance(point, str) else name_of(point),
            digest=digest_of((result.ids, result.values)),
            max_abs_error=errors.get(method),
            machine=machine,
        )

    return {method: measured(method) for method in methods}


def _few(rows: SparseRows) -> SparseRows:
    """The first few rows: enough to open connections and load code."""
    count = int((rows.ids < _WARM_UP_ROWS).sum())
    return SparseRows(rows.ids[:count], rows.values[:count], min(rows.num_rows, _WARM_UP_ROWS))


def _as_rows(result: SparseRows | Tensor) -> SparseRows:
    return SparseRows.from_tensor(result) if isinstance(result, Tensor) else result


Point = Scheme | TwoLevel | str


def _point(method: str, lane: Lane, rows: SparseRows) -> Point:
    """Return the scheme that a method runs; for "auto" the one that a training settles on within its first steps."""
    if method == AGSPARSE_TORCH:
        return method
    scheme = scheme_of(method)
    if scheme is not None:
        return scheme
    gradients = GradientSync(AUTO)

    def step(lane: Lane) -> None:
        gradients.tables(lane, [TableGradient(_TABLE, _sparse(rows))])

    for _ in range(_SEEN_STEPS):
        lane.submit(step).wait()
    chosen_point = gradients.windows[_TABLE].choice if gradients.windows else None
    _, rivals = gradients.rivals(1)
    points: dict[str, Point] = {AGSPARSE_TORCH: AGSPARSE_TORCH}
    for point in (chosen_point or DENSE, *(scheme_of(name) or DENSE for name, _ in rivals)):
        points[name_of(point)] = point.placed(lane.exchange.hosts) if isinstance(point, TwoLevel) else point
    trial = Trial(list(points))
    while not trial.is_settled and trial.steps < _MOST_STEPS:
        run = _runner(points[trial.arm], lane, rows)
        dist.barrier()
        started = time.perf_counter()
        run()
        numbers = trial.note(time.perf_counter() - started)
        if numbers is not None:
            trial.learn(lane.agree("seconds of sums", numbers))
    return points[trial.arms[trial.standing]]


def _runner(point: Point, lane: Lane, rows: SparseRows) -> Sum:
    """Prepare, outside of the timing, a scheme's input for one run: a fresh copy where it works in place."""
    if isinstance(point, str):
        return _torch_run(rows)
    if point == DENSE:
        return _dense_run(lane, rows)
    subject = Subject(f"bench {point.describe()}", f"{rows.num_rows} x {rows.width} {rows.values.dtype}")

    def job(lane: Lane) -> SparseRows:
        channel = lane.channel(subject)
        held, scheme = agree(lambda: rows, point, channel, chosen)
        return synchronize(held, scheme, channel)

    return lambda: lane.submit(job).wait()


def _dense_run(lane: Lane, rows: SparseRows) -> Sum:
    dense = rows.to_dense()

    def job(lane: Lane) -> Tensor:
        channel = lane.channel(Subject("bench dense", f"{list(dense.shape)} {dense.dtype}"))
        channel.open()
        dense_all_reduce(dense, channel)
        return dense

    return lambda: lane.submit(job).wait()


def _torch_run(rows: SparseRows) -> Sum:
    tensor = _sparse(rows).clone()

    def run() -> Tensor:
        dist.all_reduce(tensor)
        return tensor.coalesce()

    return run


def _sparse(rows: SparseRows) -> Tensor:
    """The rows as torch has them, with the same values in memory."""
    return Layout((rows.num_rows, rows.width), 1).tensor(rows)


def _errors(workload: Workload, results: dict[str, SparseRows]) -> dict[str, float]:
    """The largest deviation of each result from the sum in float64, including missing and superfluous rows."""
    ranks = [workload.rows(rank) for rank in range(workload.world_size)]
    union = torch.cat([rows.ids for rows in ranks]).unique()
    exact = torch.zeros(union.numel(), ranks[0].width, dtype=torch.float64)
    for rows in ranks:
        exact.index_add_(0, torch.searchsorted(union, rows.ids), rows.values.double())
    return {method: _deviation(result, union, exact) for method, result in results.items()}


def _deviation(result: SparseRows, union: Tensor, exact: Tensor) -> float:
    indices = torch.searchsorted(union, result.ids).clamp(max=max(union.numel() - 1, 0))
    inside = union[indices] == result.ids if union.numel() else torch.zeros_like(result.ids, dtype=torch.bool)
    extra = result.values[~inside].double().abs().sum()
    difference = exact.clone()
    difference.index_add_(0, indices[inside], -result.values[inside].double())
    largest = difference.abs().max() if difference.numel() else torch.zeros(())
    return float(torch.maximum(largest.double(), extra))
