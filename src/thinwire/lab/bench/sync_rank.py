"""One rank of `thinwire bench sync`: it runs every method in turn, and reports the cost and result of each."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import Subject
from thinwire.comm.hosts import HOST_VARIABLE
from thinwire.comm.lane import Lane
from thinwire.comm.machine import LONG_PROBE_BYTES, Machine
from thinwire.comm.machine import measure as measure_machine
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.tables import TableGradient
from thinwire.lab.bench.methods import AGSPARSE_TORCH, scheme_of
from thinwire.lab.bench.workload import Workload
from thinwire.lab.testbed.rank import RankContext
from thinwire.sparse import SparseRows
from thinwire.sync.choose import MAX_STEPS
from thinwire.sync.experience import Experience
from thinwire.sync.named import AUTO, DENSE, name_of
from thinwire.sync.scheme import Scheme
from thinwire.sync.synchronize import agree, dense_all_reduce, synchronize
from thinwire.sync.two_level import TwoLevel

_HEAD_START_SECONDS = 0.05  # a broadcast of 8 bytes lasts 5 to 15 ms


_WARM_UP_ROWS = 64
_TABLE, _LEAST_STEPS = "table", 2

Run = Callable[[], SparseRows | Tensor]


class Timed(Protocol):
    """Measurement whose runs have times."""

    @property
    def started(self) -> tuple[float, ...]: ...
    @property
    def ended(self) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class RankMeasurement:
    """Measurement of one method on one rank. Times of all ranks are comparable, see `Turns`."""

    started: tuple[float, ...]
    ended: tuple[float, ...]
    sent_bytes: int | None  # of one run; None if torch moves the bytes, uncounted
    sent_between_hosts_bytes: int | None
    chosen: str
    digest: str
    max_abs_error: float | None  # on rank 0
    machine: Machine | None


@dataclass(frozen=True)
class Turns:
    """How often each method runs; in every turn each runs once.

    Args:
        repeat: turns that are timed.
        warm_up: full turns before, which are not; a run on a few rows always comes first.
        ranks_per_host: so many consecutive ranks pretend to share a host; None if they are on hosts of their own.
        one_clock: whether all ranks are on one machine, whose clock times a run from the first start to the last end.
            Otherwise each rank times itself from a barrier on.
    """

    repeat: int
    warm_up: int = 0
    ranks_per_host: int | None = None
    one_clock: bool = True


def measure(
    context: RankContext, workload: Workload, methods: tuple[str, ...], turns: Turns
) -> dict[str, RankMeasurement]:
    """Run each method in turns, interleaved, and return a measurement for each."""
    if turns.ranks_per_host is not None:
        os.environ[HOST_VARIABLE] = str(context.rank // turns.ranks_per_host)
    rows = workload.rows(context.rank)
    lane = Lane()
    kernels.warm_up()
    machine = lane.submit(lambda lane: measure_machine(lane.exchange, LONG_PROBE_BYTES)).wait()
    points = {method: _point(method, lane, rows) for method in methods}
    for method in methods:
        _once(_runner(points[method], lane, _few(rows)), lane, turns.one_clock)
    runs: dict[str, list[_Run]] = {method: [] for method in methods}
    for turn in range(turns.warm_up + turns.repeat):
        for method in methods:
            run = _once(_runner(points[method], lane, rows), lane, turns.one_clock)
            if turn >= turns.warm_up:
                runs[method] = [*(replace(earlier, result=None) for earlier in runs[method]), run]
            context.send(method)
    lane.close()
    results = {method: _as_rows(runs[method][-1].result) for method in methods}
    errors = _errors(workload, results) if context.rank == 0 else {}
    return {
        method: RankMeasurement(
            started=tuple(run.started for run in runs[method]),
            ended=tuple(run.ended for run in runs[method]),
            sent_bytes=None if points[method] == AGSPARSE_TORCH else runs[method][-1].sent_bytes,
            sent_between_hosts_bytes=(
                None if points[method] == AGSPARSE_TORCH else runs[method][-1].sent_between_hosts_bytes
            ),
            chosen=_name(points[method]) if method == AUTO else method,
            digest=_digest(results[method]),
            max_abs_error=errors.get(method),
            machine=machine,
        )
        for method in methods
    }


@dataclass(frozen=True)
class _Run:
    """One timed run. Only the last one of a method keeps its result."""

    started: float
    ended: float
    sent_bytes: int
    sent_between_hosts_bytes: int
    result: SparseRows | Tensor | None


def _once(run: Run, lane: Lane, one_clock: bool) -> _Run:
    results: list[SparseRows | Tensor] = []
    figures = timed(lambda: results.append(run()), lane, one_clock)
    return _Run(*figures, results[0])


def timed(run: Callable[[], None], lane: Lane, one_clock: bool) -> tuple[float, float, int, int]:
    """Run on all ranks together, and return start, end, bytes sent, and those between hosts; see `Turns`."""
    before = replace(lane.exchange.traffic)
    if one_clock:
        _start_together()
    else:
        dist.barrier()
    started = time.perf_counter()
    run()
    ended = time.perf_counter()
    now = lane.exchange.traffic
    sent_bytes = now.sent_bytes - before.sent_bytes
    between_bytes = now.sent_between_hosts_bytes - before.sent_between_hosts_bytes
    origin = 0.0 if one_clock else started
    return started - origin, ended - origin, sent_bytes, between_bytes


def _few(rows: SparseRows) -> SparseRows:
    """The first few rows: enough to open connections and load code."""
    count = int((rows.ids < _WARM_UP_ROWS).sum())
    return SparseRows(rows.ids[:count], rows.values[:count], min(rows.num_rows, _WARM_UP_ROWS))


def _as_rows(result: SparseRows | Tensor | None) -> SparseRows:
    assert result is not None, "the last run keeps its result"
    return SparseRows.from_tensor(result) if isinstance(result, Tensor) else result


def _start_together() -> None:
    """Return at the same instant on all ranks. They leave a barrier 10 ms apart on two cores, which is not the
    synchronization's time; the clock is the machine's, so rank 0 can name an instant for all."""
    dist.barrier()
    instant = torch.tensor([time.perf_counter() + _HEAD_START_SECONDS], dtype=torch.float64)
    dist.broadcast(instant, 0)
    time.sleep(max(0.0, instant.item() - time.perf_counter()))


Point = Scheme | TwoLevel | str


def _name(point: Point) -> str:
    return point if isinstance(point, str) else name_of(point)


def _point(method: str, lane: Lane, rows: SparseRows) -> Point:
    """Return the scheme that a method runs; for "auto" the one that a training settles on within its first steps."""
    if method == AGSPARSE_TORCH:
        return method
    scheme = scheme_of(method)
    if scheme is not None:
        return scheme
    gradients, shape = GradientSync(AUTO), (rows.num_rows, rows.width)
    gradients.may_leave = True

    def step(lane: Lane) -> Experience | None:
        tensor = torch.sparse_coo_tensor(rows.ids[None], rows.values, shape, is_coalesced=True, check_invariants=False)
        gradients.tables(lane, [TableGradient(_TABLE, tensor)])
        return gradients.experiences.get(_TABLE)

    learned = None
    for number in range(1, MAX_STEPS + 1):
        learned = lane.submit(step).wait()
        if gradients.left:
            return AGSPARSE_TORCH
        if learned is None or (number > _LEAST_STEPS and learned.rehearsal is None):
            break
    point = DENSE if learned is None or learned.choice is None else learned.choice
    return point.placed(lane.exchange.hosts) if isinstance(point, TwoLevel) else point


def _runner(point: Point, lane: Lane, rows: SparseRows) -> Run:
    """Prepare, outside of the timing, a scheme's input for one run: a fresh copy where it works in place."""
    if isinstance(point, str):
        return _torch_run(rows)
    if point == DENSE:
        return _dense_run(lane, rows)
    subject = Subject(f"bench {point.describe()}", f"{rows.num_rows} x {rows.width} {rows.values.dtype}")

    def job(lane: Lane) -> SparseRows:
        channel = lane.channel(subject)
        held, scheme = agree(lambda: rows, point, channel)
        return synchronize(held, scheme, channel)

    return lambda: lane.submit(job).wait()


def _dense_run(lane: Lane, rows: SparseRows) -> Run:
    dense = rows.to_dense()

    def job(lane: Lane) -> Tensor:
        channel = lane.channel(Subject("bench dense", f"{list(dense.shape)} {dense.dtype}"))
        channel.open()
        dense_all_reduce(dense, channel)
        return dense

    return lambda: lane.submit(job).wait()


def _torch_run(rows: SparseRows) -> Run:
    shape = (rows.num_rows, rows.width)
    tensor = torch.sparse_coo_tensor(
        rows.ids[None], rows.values.clone(), shape, is_coalesced=True, check_invariants=False
    )

    def run() -> SparseRows:
        dist.all_reduce(tensor)
        total = tensor.coalesce()
        return SparseRows(total.indices()[0], total.values(), rows.num_rows)

    return run


def _errors(workload: Workload, results: dict[str, SparseRows]) -> dict[str, float]:
    """The largest deviation of each result from the sum in float64, including missing and superfluous rows."""
    ranks = [workload.rows(rank) for rank in range(workload.world_size)]
    union = torch.cat([rows.ids for rows in ranks]).unique()
    exact = torch.zeros(union.numel(), ranks[0].width, dtype=torch.float64)
    for rows in ranks:
        exact.index_add_(0, torch.searchsorted(union, rows.ids), rows.values.double())
    return {method: _deviation(result, union, exact) for method, result in results.items()}


def _deviation(result: SparseRows, union: Tensor, exact: Tensor) -> float:
    places = torch.searchsorted(union, result.ids).clamp(max=max(union.numel() - 1, 0))
    inside = union[places] == result.ids if union.numel() else torch.zeros_like(result.ids, dtype=torch.bool)
    extra = result.values[~inside].double().abs().sum()
    difference = exact.clone()
    difference.index_add_(0, places[inside], -result.values[inside].double())
    largest = difference.abs().max() if difference.numel() else torch.zeros(())
    return float(torch.maximum(largest.double(), extra))


def _digest(rows: SparseRows) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(rows.ids.numpy().tobytes())
    digest.update(rows.values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
