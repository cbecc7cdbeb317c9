"""Measure the link of a process group: alpha and beta of each collective, on all ranks at once and with one result.

A point is the median of a few blocks of runs; the slowest rank gives the seconds of a block. Messages grow until
one lasts long enough for its bytes to count.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, fields
from functools import partial

import torch

from thinwire.comm.agree import gather_records, longest
from thinwire.comm.lane import Lane
from thinwire.comm.machine import LONG_PROBE_BYTES, Machine, measure
from thinwire.comm.process_group import Exchange, ring_all_reduce_bytes
from thinwire.lab.planning.speeds import Fit, MeasuredLink
from thinwire.plan.profile import Linear

REPEATS = 3
_FIRST_BYTES = 4 * 1024
_GROWTH, _LATER_GROWTH = 4, 2
_LATER_SECONDS = 0.02
_LONG_SECONDS = 0.15
_BLOCK_SECONDS = 0.03
_MAX_SENT_BYTES = 4 * 1024 * 1024
_ATTEMPTS = 3
_LINK_FIELDS = [item.name for item in fields(Machine)].index("part_seconds")  # those before are of the link

Probe = Callable[[int], Callable[[], object]]
"""A function from a number of bytes to the call that is timed, with its tensors already allocated."""


def measure_link(lane: Lane, all_reduce: Probe | None = None) -> MeasuredLink:
    """Measure the link in a job of the lane, which all ranks submit; it lasts seconds on a slow link.

    Args:
        all_reduce: the all-reduce of dense gradients, if it is not the lane's own; it must wait for the sum.

    Raises:
        ValueError: there is only one rank; a byte costs no time in every measurement.
        LostPeerError: a rank died.
    """
    exchange, world_size = lane.exchange, lane.world_size
    if world_size < 2:
        raise ValueError("one rank has nobody to talk to, so there is no link to measure: start two ranks or more")
    machine = measure(exchange, LONG_PROBE_BYTES)
    if machine is None:
        raise ValueError("the link could not be measured, because messages took no time: measure again")
    others = world_size - 1
    reduce = all_reduce or partial(_reduce, exchange)
    return MeasuredLink(
        message=Linear(machine.message_seconds, machine.byte_seconds),
        round=Linear(machine.round_seconds, 0.0),
        all_reduce=_curve(exchange, reduce, lambda size: ring_all_reduce_bytes(size, world_size)),
        all_gather=_curve(exchange, partial(_gather, exchange), lambda size: others * size),
        all_to_all=_curve(exchange, partial(_deal, exchange), lambda size: others * size),
        work=astuple(machine)[_LINK_FIELDS:],
    )


def wait_for_all(exchange: Exchange) -> None:
    """Wait until all ranks have called this function."""
    gather_records(exchange, "arrival", b"")


def slowest_seconds(exchange: Exchange, work: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank needs for ``work``, which all ranks begin together."""
    wait_for_all(exchange)
    started = time.perf_counter()
    work()
    return longest(exchange, time.perf_counter() - started)


def _curve(exchange: Exchange, probe: Probe, sent_bytes: Callable[[int], int]) -> Fit:
    """Fit seconds over the bytes that a rank sends. All ranks have the same points, so they fit the same curve.

    On a busy machine the longest messages may have been the luckiest, so that a byte costs no time: then the curve is
    measured again, with messages four times as long, whose bytes weigh more.
    """
    for attempt in range(_ATTEMPTS):
        points = _points(exchange, probe, sent_bytes, _MAX_SENT_BYTES * _GROWTH**attempt)
        fit = Fit.of(points, extrapolates=True)
        if fit.line.beta > 0.0:
            break
    return fit


def _points(
    exchange: Exchange, probe: Probe, sent_bytes: Callable[[int], int], max_sent_bytes: int
) -> list[tuple[float, float]]:
    """Measure at least two points: bytes that a rank sends, and seconds.

    Short messages are sent many times in a row: a link may let the first few through at once (an emulated one has
    tokens for 4 ms), which is not what they cost in a training that keeps it busy.
    """
    points: list[tuple[float, float]] = []
    size = _FIRST_BYTES
    while True:
        seconds = _steady_seconds(exchange, probe(size))
        points.append((sent_bytes(size), seconds))
        if len(points) > 1 and (seconds > _LONG_SECONDS or sent_bytes(size) >= max_sent_bytes):
            return points
        size *= _GROWTH if seconds < _LATER_SECONDS else _LATER_GROWTH


def _steady_seconds(exchange: Exchange, run: Callable[[], object]) -> float:
    """Return the seconds of one run among many equal ones, after one that may open connections."""
    run()
    count = max(1, math.ceil(_BLOCK_SECONDS / slowest_seconds(exchange, run)))

    def block() -> None:
        for _ in range(count):
            run()

    return statistics.median(slowest_seconds(exchange, block) for _ in range(REPEATS)) / count


def _reduce(exchange: Exchange, size: int) -> Callable[[], object]:
    return partial(exchange.all_reduce, torch.zeros(size // 4, dtype=torch.float32))


def _gather(exchange: Exchange, size: int) -> Callable[[], object]:
    messages = [torch.zeros(size, dtype=torch.uint8)] * exchange.world_size
    return partial(exchange.swap, messages, [size] * exchange.world_size)


def _deal(exchange: Exchange, size: int) -> Callable[[], object]:
    messages = [torch.zeros(size, dtype=torch.uint8) for _ in range(exchange.world_size)]
    return partial(exchange.swap, messages, [size] * exchange.world_size)
