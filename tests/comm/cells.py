"""The campaign of living processes: a rank fails at each point of each scheme, lives on, and all others must raise.

A cell is a scheme, a point (the n-th time that the failing rank moves bytes), and a kind of failure. Ranks are
forked once for a scheme; each cell has a process group of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from thinwire.comm.process_group import Exchange, Stream
from thinwire.lab.testbed.launch import RankContext

WORLD_SIZE = 4
FAILING = 1
TIMEOUT = timedelta(minutes=5)
"""Longer than a test may take: whoever hears of nothing waits for it, so who raises at all has heard."""
MEDIAN_SECONDS, WORST_SECONDS = 2.0, 10.0
"""Of the notices of all cells. Each one is under 2 s unless the machine is starved (2.1 s once, of a cell that takes
10 ms, with 35 busy processes on two cores); one that waits for a connection or a timer would move the median."""
CALLS = 3
"""Sums of a cell: who is done when a peer fails hears of it in the next one."""
KINDS = ("flip", "memory", "memory afterwards", "exit")
AUTO_SCHEMES = (
    "auto",
    "zen", "column_split", "union_split", "agsparse_coded", "sparcml_coded", "dense", "two_level:zen",
)  # fmt: skip
OTHER_SCHEMES = ("sparse_ps", "agsparse_ring", "dense_ring", "dense_halving_doubling", "sparcml_split")


@dataclass
class Injector:
    """Counts what a rank does with its exchange, and fails at one of these points.

    Args:
        at: the point, counted from 0; one that never comes only counts.
    """

    kind: str = ""
    at: int = -1
    points: list[str] = field(default_factory=list)
    struck: float | None = None
    call: int = 0

    def around(self, point: str, work: Callable[[], Any], changed: Callable[[Any], bool] = lambda result: False) -> Any:
        """What the work returns, unless this is the point; ``changed`` flips a bit of it, if it has any."""
        is_here = len(self.points) == self.at
        self.points.append(point)
        if not is_here:
            return work()
        if self.kind in ("memory", "exit", "kill"):
            self.struck = time.time()
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise SystemExit(3) if self.kind == "exit" else _out_of_memory()
        result = work()
        if self.kind == "memory afterwards":
            self.struck = time.time()
            raise _out_of_memory()
        if changed(result):
            self.struck = time.time()
        return result


def _out_of_memory() -> RuntimeError:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory (injected)")


@contextmanager
def injected(injector: Injector) -> Iterator[None]:
    """Have all exchanges of this process pass through the injector."""
    exchange, stream = Exchange, Stream
    saved = {name: getattr(exchange, name) for name in ("begin_records", "swap", "swap_with", "all_reduce")}
    receive, send = stream.receive, stream.send

    def flip_one(incoming: list[Tensor], own: int) -> bool:
        return any(_flip(part) for rank, part in enumerate(incoming) if rank != own)

    def begin_records(self: Any, outgoing: Any) -> Any:
        complete = saved["begin_records"](self, outgoing)
        return lambda: injector.around("records", complete, lambda got: flip_one(got, self.rank))

    def swap(self: Any, outgoing: Any, sizes: Any) -> Any:
        return injector.around(
            "swap", lambda: saved["swap"](self, outgoing, sizes), lambda got: flip_one(got, self.rank)
        )

    def swap_with(self: Any, *args: Any) -> Any:
        return injector.around("swap_with", lambda: saved["swap_with"](self, *args), _flip)

    def all_reduce(self: Any, tensor: Tensor) -> Any:
        return injector.around("all_reduce", lambda: saved["all_reduce"](self, tensor))

    def receiving(self: Any, source: int, most_bytes: int, size: Callable[[Tensor], int]) -> Any:
        wait = receive(self, source, most_bytes, size)
        return lambda: injector.around("receive", wait, _flip)

    def sending(self: Any, target: int, make: Callable[[], Tensor]) -> Any:
        return send(self, target, lambda: injector.around("make", make))

    patched = {"begin_records": begin_records, "swap": swap, "swap_with": swap_with, "all_reduce": all_reduce}
    try:
        for name, function in patched.items():
            setattr(exchange, name, function)
        stream.receive, stream.send = receiving, sending  # type: ignore[method-assign]
        yield
    finally:
        for name, function in saved.items():
            setattr(exchange, name, function)
        stream.receive, stream.send = receive, send  # type: ignore[method-assign]


def _flip(part: Tensor) -> bool:
    if part.numel():
        part[part.numel() // 2] ^= 16
    return part.numel() > 0


@dataclass(frozen=True)
class Seen:
    """What a rank saw of a cell: when it struck (the failing one), when it raised, in which call, and what."""

    cell: tuple[str, int, str]
    point: str
    struck: float | None
    raised: float | None
    error: str
    total: float | None
    call: int = 0


def campaign(context: RankContext, scheme: str, kinds: tuple[str, ...], points: tuple[int, ...] | None) -> list[Seen]:
    """All cells of a scheme; ``points`` names some (negative ones from the end), None all.

    Of "auto", which has by far the most points, each point fails in one of the ways, by turns: with all of them it took
    a seventh of what all slow tests take of processors.
    """
    if scheme.startswith("two_level"):
        os.environ["THINWIRE_HOST"] = f"host {context.rank // 2}"
    counting = Injector()
    _cell(context, scheme, counting)
    found = len(counting.points)
    numbers = range(found) if points is None else sorted({point % found for point in points if point < found})
    every: list[list[int]] = [[]] * context.world_size
    dist.all_gather_object(every, list(numbers))  # ranks may have different numbers of points: the failing one decides
    seen = []
    for number, kind in enumerate(kinds):
        for at in every[FAILING]:
            if points is not None or scheme != "auto" or at % len(kinds) == number:
                seen.append(_cell(context, scheme, Injector(kind, at)))
    return seen


def _cell(context: RankContext, scheme: str, injector: Injector) -> Seen:
    """What this rank sees; with "auto" from the first connection on, else after a first synchronization."""
    group = dist.new_group(timeout=TIMEOUT)
    tensor = torch.zeros(1000, 64)
    tensor[torch.arange(0, 200, 2) + context.rank] = 1.0
    if scheme != "auto":
        thinwire.sparse_all_reduce(tensor, scheme, process_group=group)
    dist.barrier()
    raised, error, total = None, "", None
    with injected(injector if context.rank == FAILING or injector.at < 0 else Injector()):
        for call in range(CALLS if injector.at >= 0 else 1):
            injector.call = call
            try:
                total = float(thinwire.sparse_all_reduce(tensor, scheme, process_group=group).sum())
            except (Exception, SystemExit) as caught:  # what a rank does before it has a lane is on its own thread
                raised, error = time.time(), f"{type(caught).__name__}: {caught}"
                break
        dist.barrier()  # the failing process lives on until all others have raised
    dist.destroy_process_group(group)
    point = injector.points[injector.at] if 0 <= injector.at < len(injector.points) else ""
    return Seen((scheme, injector.at, injector.kind), point, injector.struck, raised, error, total, injector.call)


def notices(outcomes: list[list[Seen]]) -> list[float]:
    """For each cell that raises the seconds until the last of the other ranks does; checks every cell."""
    seconds = []
    for of_cell in zip(*outcomes, strict=True):
        failing = of_cell[FAILING]
        if failing.struck is None:
            continue  # there was nothing to change at this point
        if failing.call == CALLS - 1:  # who was done with the last sum never hears of it
            assert failing.cell[0] == "auto", f"{failing.cell}: only probes have more or fewer points, by the clock"
            continue
        if failing.cell[2] == "flip" and all(seen.raised is None for seen in of_cell):
            assert failing.cell[0] == "auto", f"{failing.cell}: nobody noticed a flipped bit"
            assert {seen.total for seen in of_cell} == {WORLD_SIZE * 100 * 64.0}  # a bit of a probe, which nobody reads
            continue
        for rank, seen in enumerate(of_cell):
            assert seen.raised is not None, f"{failing.cell} at {failing.point}: rank {rank} noticed nothing"
        seconds.append(max(seen.raised - failing.struck for seen in of_cell if seen is not failing))
        assert seconds[-1] < WORST_SECONDS, f"{failing.cell} at {failing.point}: it took {seconds[-1]:.1f} s"
    return seconds


def killed(context: RankContext, scheme: str, at: int) -> tuple[float, str]:
    """As a cell, whose failing rank ends; when this rank raised, and what."""
    if scheme.startswith("two_level"):
        os.environ["THINWIRE_HOST"] = f"host {context.rank // 2}"
    group = dist.new_group(timeout=TIMEOUT)
    tensor = torch.zeros(1000, 64)
    tensor[torch.arange(0, 200, 2) + context.rank] = 1.0
    thinwire.sparse_all_reduce(tensor, scheme, process_group=group)
    dist.barrier()
    began = time.time()
    with injected(Injector("kill", at) if context.rank == FAILING else Injector()):
        for _ in range(2):
            try:
                thinwire.sparse_all_reduce(tensor, scheme, process_group=group)
            except thinwire.PeerError as caught:
                return time.time() - began, str(caught)
    return -1.0, "nothing was raised"
