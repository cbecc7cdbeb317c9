"""The back end of torch.distributed: ``torch.distributed.init_process_group("thinwire")`` sends less, exactly.

Every collective goes to Gloo (tensors of the CPU) or NCCL (of a GPU), but those for which there is something better:
all-reduces of sparse tensors take the schemes of `thinwire.schemes`, and large sums of floats travel as lossless codes.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as SimpleFuture
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function

from thinwire.all_reduce import sum_on
from thinwire.comm import c10d, point_to_point
from thinwire.comm.agree import gather_bytes
from thinwire.comm.channel import Channel, opening_bytes
from thinwire.comm.connections import PrivateGroup
from thinwire.comm.groups import Group, beside, cloned, resolve_group
from thinwire.comm.hosts import host_identity
from thinwire.comm.lane import Lane
from thinwire.comm.notes import Notes
from thinwire.comm.process_group import Exchange
from thinwire.errors import MissingPackageError, unknown
from thinwire.kernels import warm_up
from thinwire.rows import floats
from thinwire.sums import lossless
from thinwire.sums.named import AUTO, Rows, name_of, resolve
from thinwire.tune.call_steps import CallSteps
from thinwire.tune.playing import SETUP_SECONDS, Agree, Playing, answered
from thinwire.tune.trial import Trial

__all__ = ("Options", "stats")

NATIVE, LOSSLESS = "native", "lossless"
VARIABLE, ONE_HOST = "THINWIRE_BACKEND", "all ranks are on one host"
"""Environment variable with settings, such as ``dense=lossless,rows=zen``."""
Begin = Callable[[Lane], Callable[[], int]]
"""Begins a sum as a job of a lane; returns what completes it, and returns the bytes sent."""
_CALLS = "all_reduce", "reduce_scatter", "all_gather", "broadcast", "send"
_FLOATS = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


@dataclass(frozen=True)
class Options:
    """Settings of a process group of the back end: ``init_process_group("thinwire", pg_options=Options(...))``.

    Subgroups without settings of their own have those of the default group; without any, ``THINWIRE_BACKEND`` decides.

    Args:
        dense: how dense floating-point tensors are summed: "native" by Gloo or NCCL, "lossless" as lossless codes,
            "auto" the faster of the two.
        rows: scheme of sparse tensors, a name of `thinwire.schemes` or "auto".
        least_bytes: fewest bytes of a dense tensor that may be coded.
        calls: collectives whose dense tensors may be coded, with "+" between them; "send" is point to point.
        dtypes: names of dtypes that may be coded, likewise.

    Raises:
        ValueError: a value that is none of these.

    Example:
        >>> Options(dense="lossless", calls="reduce_scatter+all_gather", dtypes="bfloat16").least_bytes
        65536
    """

    dense: Literal["auto", "native", "lossless"] = AUTO
    rows: Rows = AUTO
    least_bytes: int = 64 * 1024
    calls: str = "+".join(_CALLS)
    dtypes: str = "+".join(_FLOATS)

    def __post_init__(self) -> None:
        given = {"dense": [self.dense], "calls": self.calls.split("+"), "dtypes": self.dtypes.split("+")}
        for name, legal in {"dense": (AUTO, NATIVE, LOSSLESS), "calls": _CALLS, "dtypes": _FLOATS}.items():
            if wrong := [one for one in given[name] if one not in legal]:
                raise unknown(name, str(wrong[0]), legal)
        resolve(self.rows)

    @classmethod
    def parse(cls, text: str) -> Options:
        """Return the settings of a text such as "dense=lossless,rows=zen".

        >>> Options.parse("rows=zen").rows
        'zen'
        """
        values: dict[str, Any] = {}
        known = [entry.name for entry in fields(cls)]
        for item in filter(None, text.split(",")):
            name, equals, value = item.strip().partition("=")
            if not equals or name not in known:
                raise ValueError(f"{VARIABLE}={text!r}: {item!r} is not one of {', '.join(known)} and a value")
            values[name] = int(value) if name == "least_bytes" else value
        return cls(**values)


@dataclass
class _Count:
    """What one collective took: calls, bytes of its tensors, bytes sent, seconds of those that thinwire ran."""

    decision: str = NATIVE  # of the last call
    reason: str = ""
    calls: int = 0
    bytes: int = 0
    bytes_sent: float = 0.0
    seconds: float = 0.0


def create(options: c10d.BackEndOptions, settings: object) -> ThinwireGroup:
    """Make a process group; torch calls it in ``init_process_group`` and ``new_group``."""
    c10d.check_names('the back end "thinwire"', 'call init_process_group("gloo")', c10d.UNREGISTERED)
    if settings is None:
        world = dist.group.WORLD
        settings = world.settings if isinstance(world, ThinwireGroup) else Options.parse(os.environ.get(VARIABLE, ""))
    if not isinstance(settings, Options):
        raise ValueError(f"pg_options is {settings!r}: pass thinwire.backend.Options(...)")
    return ThinwireGroup(options, settings)


class _Work(dist.Work):
    """A sum of a lane. Torch's own work of a future forgets its error."""

    def __init__(self, future: Future[list[Tensor]], name: str) -> None:
        super().__init__()
        self._future, self._name = future, name

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, and raise what the sum raised; without a timeout that of the group holds, which the lane has."""
        if timeout:
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                raise RuntimeError("Operation timed out!")  # as torch does: the sum goes on
        with record_function(self._name):  # a profiler records this thread, and the lane's only if it is asked to
            self._future.wait()
        return True

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future whose error C++ sees too: that of `Future.set_exception` is a result for it."""
        return self._future.then(lambda done: done.value())

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return what the sum raised, or None."""
        try:
            self._future.value()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._future.wait()


class ThinwireGroup(dist.ProcessGroup):
    """A process group whose sums take fewer bytes. Torch makes it; nobody else does.

    ``_plain`` is a process group of torch over the same back ends: what is forwarded takes the path that it has there.
    """

    def __init__(self, made: c10d.BackEndOptions, settings: Options) -> None:
        super().__init__(made.group_rank, made.group_size)  # type: ignore
        self.settings = settings
        self.counts: defaultdict[str, _Count] = defaultdict(_Count)
        self._plain = dist.ProcessGroup(made.store, made.group_rank, made.group_size)
        self._lane: Lane | None = None
        self._begin_lane = partial(beside, "thinwire-meet", partial(_lane_of, made))
        self._beginning: SimpleFuture[Lane] | None = None
        self._is_lossless = settings.dense == LOSSLESS and made.group_size > 1
        self._dtypes = {_FLOATS[name] for name in settings.dtypes.split("+")}
        self._reason, is_one_host = _agreed(made, settings)
        self._leaves_rows = is_one_host and settings.rows == AUTO
        self._sparse: Any = None  # what sums them then, once it is connected
        options = c10d.gloo_options(made.timeout)
        met = dist.PrefixStore("sparse/", made.store), _global_ranks(made), made.group_rank, options
        self._begin_sparse = partial(c10d.alternating, *met)
        is_open = settings.dense == AUTO and made.group_size > 1 and not self._reason
        self._choice = _Choice("coded collectives", partial(_ask, weakref.ref(self))) if is_open else None
        self._own_choice = _Choice("coded messages", lambda what, numbers: [list(numbers)]) if is_open else None
        self._codes = set(settings.calls.split("+")) if self._is_lossless or is_open else set[str]()
        for device, kind, back_end in _inner(made, options):
            for group in (self, self._plain):
                c10d.add_back_end(group, device, kind, back_end)

        if self._is_lossless:
            self._keep(_lane_of(made))

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)  # type: ignore
        self._plain._set_group_name(name)  # type: ignore

    def allreduce(self, tensors: Any, *arguments: Any, **keywords: Any) -> dist.Work:
        """Sum tensors over all ranks, in place."""
        if _are_several(tensors):
            return self._plain.allreduce(tensors, *arguments, **keywords)
        tensor: Tensor = tensors if isinstance(tensors, Tensor) else tensors[0]
        if tensor.is_sparse and (scale := self._scale(tensor, arguments, keywords)) is not None:
            rows = tensor._values().nbytes + tensor._indices().nbytes
            if self._leaves_rows and scale == 1.0 and tensor.dtype.itemsize >= 4:  # torch sums no shorter ones
                self._count("all_reduce_sparse", rows).reason = ONE_HOST
                self._sparse = self._sparse or self._begin_sparse()
                return self._sparse.allreduce(tensors, *arguments, **keywords)
            count = self._count("all_reduce_sparse", rows)
            how = self.settings.rows, "sum" if scale == 1.0 else "mean", torch.are_deterministic_algorithms_enabled()
            begin = partial(_sparse_sum, tensor, how, count)
            return self._submit("all_reduce_sparse", tensor, count, begin, is_whole=True)
        begin = None
        if self._may_sum("all_reduce", tensor) and (scale := self._scale(tensor, arguments, keywords)) is not None:
            about = f"{tensor.numel()} values times {scale}"
            begin = partial(_coded, "all_reduce", about, _values(tensor), partial(lossless.begin, scale=scale))
        forward = partial(self._plain.allreduce, tensors, *arguments, **keywords)
        return self._run("all_reduce", tensor, tensor, begin, forward)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *arguments: Any, **keywords: Any) -> dist.Work:
        """Sum [n * k] over all ranks; ``output`` [k] gets the part of this rank."""
        begin, is_large = None, self._may_sum("reduce_scatter", tensor) and _are_parts(output, tensor, self.size())
        if is_large and (scale := self._scale(tensor, arguments, keywords)) is not None:
            about, add = f"{tensor.numel()} values times {scale}", partial(_add_parts, _values(tensor), scale)
            begin = partial(_coded, "reduce_scatter", about, _values(output), add)
        forward = partial(self._plain._reduce_scatter_base, output, tensor, *arguments, **keywords)
        return self._run("reduce_scatter", tensor, output, begin, forward)

    _reduce_scatter_base = reduce_scatter_single

    def all_gather_single(self, output: Tensor, tensor: Tensor, *arguments: Any, **keywords: Any) -> dist.Work:
        """Gather [k] of each rank as ``output`` [n * k]."""
        begin = None
        if self._may_code("all_gather", tensor) and _are_parts(tensor, output, self.size()):
            about, gather = f"{tensor.numel()} values", partial(_gather, _values(tensor))
            begin = partial(_coded, "all_gather", about, _values(output), gather)
        forward = partial(self._plain._allgather_base, output, tensor, *arguments, **keywords)
        return self._run("all_gather", tensor, output, begin, forward)

    _allgather_base = all_gather_single

    def broadcast(self, tensors: Any, *arguments: Any, **keywords: Any) -> dist.Work:
        """Give all ranks what one has."""
        if _are_several(tensors):
            return self._plain.broadcast(tensors, *arguments, **keywords)
        tensor: Tensor = tensors if isinstance(tensors, Tensor) else tensors[0]
        options = arguments[0] if arguments else keywords.get("opts", keywords.get("root", 0))
        source = getattr(options, "rootRank", options)
        begin = None
        if self._may_code("broadcast", tensor) and 0 <= source < self.size():
            about, give = f"{tensor.numel()} values of rank {source}", partial(lossless.begin_broadcast, source=source)
            begin = partial(_coded, "broadcast", about, _values(tensor), give)
        forward = partial(self._plain.broadcast, tensors, *arguments, **keywords)
        return self._run("broadcast", tensor, tensor, begin, forward)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        """Send a tensor to one rank; it says itself whether it is coded."""
        (tensor,) = tensors
        if not self._has_message(tensor):
            self._count("send", tensor.nbytes)
            return self._plain.send(tensors, dstRank, tag)
        count = self._decided("send", tensor, tensor.nbytes, self._own_choice)
        started = time.perf_counter()
        with record_function("thinwire::send"):
            message = point_to_point.pack(tensor, self.rank(), count.decision == LOSSLESS)
        count.seconds += time.perf_counter() - started
        count.bytes_sent += message.numel()
        return self._plain.send([message], dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        """Receive what a rank sends."""
        return self._receive("recv", tensors, lambda into: self._plain.recv(into, srcRank, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        """Receive what any rank sends."""
        return self._receive("recv_anysource", tensors, lambda into: self._plain.recv_anysource(into, tag))

    def _receive(self, name: str, tensors: list[Tensor], post: Callable[[list[Tensor]], dist.Work]) -> dist.Work:
        (tensor,) = tensors
        count = self._count(name, tensor.nbytes)
        if not self._has_message(tensor):
            work = post(tensors)
            return _Receive(work, tensor, tensor, count, None) if self._may_get_message(tensor) else work
        if self._own_choice is not None:
            self._own_choice.note((name, tensor.numel(), tensor.dtype))
        data = torch.empty(point_to_point.most_bytes(tensor), dtype=torch.uint8)
        return _Receive(post([data]), data, tensor, count, self._own_choice)

    def shutdown(self) -> None:
        if self._lane is not None:
            self._lane.abandon()
            self._lane.join(1.0)
            self._lane = None
        super().shutdown()

    def abort(self) -> None:
        if self._lane is not None:
            self._lane.break_off(f"rank {dist.get_rank()} aborts the process group")
        super().abort()

    # --- how a call is decided

    def _scale(self, tensor: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float | None:
        """Return the factor of a sum or a mean that thinwire may make; None for what is only forwarded."""
        if self.size() == 1 or tensor.device.type != "cpu" or tensor.dtype not in _FLOATS.values():
            return None
        options = arguments[0] if arguments else keywords.get("opts", keywords.get("op", dist.ReduceOp.SUM))
        op = getattr(options, "reduceOp", options)
        if op == dist.ReduceOp.SUM:
            return 1.0
        return 1.0 / self.size() if op == dist.ReduceOp.AVG else None

    def _may_code(self, name: str, tensor: Tensor) -> bool:
        """Return what all ranks say of a call: strides may differ between them."""
        if name not in self._codes or tensor.dtype not in self._dtypes:
            return False
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        return is_plain and tensor.nbytes >= max(1, self.settings.least_bytes)

    def _may_sum(self, name: str, tensor: Tensor) -> bool:
        """As `_may_code`; under deterministic algorithms no clock decides in which order a sum is added."""
        return self._may_code(name, tensor) and not (
            self.settings.dense == AUTO and torch.are_deterministic_algorithms_enabled()
        )

    def _has_message(self, tensor: Tensor) -> bool:
        """Whether a tensor travels in a message of ours: what both ranks know without asking each other."""
        return self._may_code("send", tensor) and tensor.is_contiguous()

    def _may_get_message(self, tensor: Tensor) -> bool:
        """Whether a tensor that travels in none has room for one: a sender may have another dtype or size in mind."""
        has_room = 4 * tensor.nbytes >= max(self.settings.least_bytes, 4 * point_to_point.LEAST_BYTES)
        return "send" in self._codes and has_room and tensor.device.type == "cpu" and tensor.is_contiguous()

    def _decided(self, name: str, tensor: Tensor, num_bytes: int, choice: _Choice | None = None) -> _Count:
        """Decide about a call that may be coded; unless the choice is this rank's own, all ranks decide alike."""
        choice = choice or self._choice
        if choice is None:
            return self._count(name, num_bytes, LOSSLESS)
        choice.note((name, tensor.numel(), tensor.dtype))
        if choice.length and choice is self._choice and self._lane is self._beginning is None:
            self._beginning = self._begin_lane()  # nothing waits for it before the next step
            weakref.finalize(self, wait, [self._beginning], 1.0)
        count = self._count(name, num_bytes, LOSSLESS if choice.codes else NATIVE)
        count.reason = choice.trial.explain()
        return count

    # --- how it is run

    def _run(
        self, name: str, tensor: Tensor, result: Tensor, begin: Begin | None, forward: Callable[[], dist.Work]
    ) -> dist.Work:
        """Run a collective coded, which may begin, or forward it."""
        num_bytes = 0 if tensor.is_sparse else max(tensor.nbytes, result.nbytes)
        if begin is None:
            self._count(name, num_bytes)
            return forward()
        count = self._decided(name, tensor, num_bytes)
        if count.decision == LOSSLESS:
            return self._submit(name, result, count, begin)
        work = forward()
        if self._choice is not None:
            self._choice.watch(work, num_bytes)
        return work

    def _submit(self, name: str, result: Tensor, count: _Count, begin: Begin, is_whole: bool = False) -> dist.Work:
        """Run a sum on the lane; return its work. Unless it is whole, it may begin while the one before ends."""
        label = f"thinwire::{name}"

        def run(lane: Lane, finish: Callable[[], int]) -> list[Tensor]:
            started = time.perf_counter()
            with record_function(label):
                count.bytes_sent += finish()
            count.seconds += time.perf_counter() - started
            return [result]

        lane = self.lane()
        if is_whole:
            return _Work(lane.submit(lambda lane: run(lane, begin(lane))), label)
        return _Work(lane.submit(run, begin=begin), label)

    def lane(self) -> Lane:
        """Return the lane of the group, which the first call makes on all ranks together, unless it is being made."""
        if self._lane is None:
            return self._keep(Lane(self) if self._beginning is None else self._beginning.result())
        return self._lane

    def _keep(self, lane: Lane) -> Lane:
        self._lane, lane.is_watched = lane, True
        weakref.finalize(self, lane.abandon)
        return lane

    def _count(self, name: str, num_bytes: int, decision: str = NATIVE) -> _Count:
        count = self.counts[name]
        count.decision, count.reason = decision, self._reason
        count.calls += 1
        count.bytes += num_bytes
        return count


class _Receive(dist.Work):
    """A receive of a message, which is stored in its tensor as soon as anybody asks whether it is there.

    Data that are the tensor itself are to be no message.
    """

    def __init__(self, work: dist.Work, data: Tensor, tensor: Tensor, count: _Count, choice: _Choice | None) -> None:
        super().__init__()
        self._work, self._data, self._tensor, self._count, self._choice = work, data, tensor, count, choice
        self._is_stored = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        started = time.perf_counter()
        self._work.wait(timeout)
        if self._choice is not None:
            self._choice.busy += time.perf_counter() - started
        self._store()
        return True

    def is_completed(self) -> bool:
        if self._work.is_completed():
            self._store()
        return self._is_stored

    is_success = is_completed

    def result(self) -> list[Tensor]:
        self.wait()
        return [self._tensor]

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def _store(self) -> None:
        if not self._is_stored:
            started = time.perf_counter()
            with record_function("thinwire::recv"):
                if self._data is self._tensor:
                    point_to_point.check_plain(self._data, self._source_rank())
                else:
                    point_to_point.unpack(self._data, self._tensor, self._source_rank())
            self._is_stored = True
            self._count.seconds += time.perf_counter() - started


def _ask(group: weakref.ref[ThinwireGroup], what: str, numbers: Sequence[float]) -> Future[list[list[float]]]:
    """Ask all ranks for their numbers, over the lane of the group."""
    alive = group()
    assert alive is not None, "a group that calls"
    return alive.lane().ask(what, numbers)


class _Choice:
    """The choice whether calls of a group are coded, by the seconds of steps; see `thinwire.tune.trial`.

    Ranks that decide together note the same calls, so they decide at the same ones. What they ask each other at the
    beginning of a step they know at that of the next one: till then a rank may come late, and wait for this one.

    Args:
        what: what is coded.
        agree: returns the numbers of all ranks, or a future of them.
    """

    def __init__(self, what: str, agree: Agree) -> None:
        self.codes = False
        self._what, self._agree = what, agree
        self._steps = CallSteps()
        self.length = 0  # of the steps that are being timed, in calls
        self._gaps: list[float] = []  # seconds before each call of a step, until it is known where steps begin
        self._last = 0.0
        self.busy = self._busy_until = 0.0  # seconds for which this rank waited for the network
        self._bytes = self._busy_bytes = 0  # of all native works, and of those whose seconds are known
        self.trial = Trial([NATIVE, LOSSLESS], SETUP_SECONDS)
        self._playing = Playing(agree, what, self.trial, self._play)
        self._first: list[list[float]] | Future[list[list[float]]] = []  # calls that steps begin with, of all ranks

    def note(self, call: tuple[str, int, torch.dtype]) -> None:
        """Note the next call that may be coded; it and the following ones may be coded otherwise than before."""
        now = time.perf_counter()
        is_first = self._steps.note(call)
        if self._steps.length != self.length:
            self.length, self._gaps = self._steps.length, []
            self._playing.forget()
        elif len(self._gaps) < 2 * self.length:
            self._gaps.append(now - self._last)
            if len(self._gaps) == self.length:  # after the longest gap: there are the optimizer and a forward
                self._first = self._agree("where steps begin", [max(range(self.length), key=self._gaps.__getitem__)])
            elif len(self._gaps) == 2 * self.length:
                self._steps.begin_at(int(answered(self._first)[0][0]))
        elif is_first:
            self._finish_step()
        self._last = now

    def watch(self, work: dist.Work, num_bytes: int) -> None:
        """Count the seconds of a native work as waited for, at most, while nothing else is known."""
        if not self.length or not self.trial.is_watching:
            return
        self._bytes += num_bytes
        started = time.perf_counter()

        def done(_: object) -> None:
            ended = time.perf_counter()
            self.busy += max(0.0, ended - max(started, self._busy_until))
            self._busy_until = ended
            self._busy_bytes += num_bytes

        with suppress(RuntimeError):  # Gloo's reduce-scatters have no future: they are as fast as the rest
            work.get_future().add_done_callback(done)

    def _finish_step(self) -> None:
        waited = self.busy * (self._bytes / self._busy_bytes if self._busy_bytes else 1.0)
        self.busy, self._bytes, self._busy_bytes = 0.0, 0, 0
        self._playing.finish_step(waited)

    def _play(self, arm: str, stands: bool) -> None:
        if arm == LOSSLESS:
            warm_up(wait=False)
        if self.codes != (arm == LOSSLESS) and dist.is_initialized() and dist.get_rank() == 0:
            text = "%s: dense=%s from this step on; %s='dense=%s' pins it and so the order in which sums are added"
            logging.getLogger("thinwire").info(text, self._what, arm, VARIABLE, arm)
        self.codes = arm == LOSSLESS


def _agreed(made: c10d.BackEndOptions, settings: Options) -> tuple[str, bool]:
    """Return why nothing is to be decided about codes, as a rank can make none, and whether all are on one host.

    Raises:
        ValueError: ranks have different settings, and would send what others do not expect.
        MissingPackageError: codes are asked for, and a rank cannot make them.
    """
    if made.group_size == 1:
        return "", True
    ranks = range(made.group_size)
    can_code = settings.dense == NATIVE or floats.is_possible(imports=settings.dense == LOSSLESS)
    made.store.set(f"settings of {made.group_rank}", json.dumps([can_code, host_identity(), str(settings)]))
    said = (json.loads(text) for text in made.store.multi_get([f"settings of {rank}" for rank in ranks]))
    can, hosts, texts = zip(*said, strict=True)
    named = _global_ranks(made)
    other = next((rank for rank in ranks if texts[rank] != texts[0]), None)
    unable = "" if all(can) else f"rank {named[can.index(False)]} cannot run compiled kernels: {floats.CURE}"
    if other is None and not (unable and settings.dense == LOSSLESS):
        is_one_host = len({*hosts}) == 1
        return unable or ONE_HOST * (settings.dense == AUTO and is_one_host), is_one_host
    made.store.set(f"refused by {made.group_rank}", "")  # the host of the store outlives the others' reading
    with suppress(RuntimeError):
        made.store.wait([f"refused by {rank}" for rank in ranks], timedelta(seconds=5))
    if other is None:
        raise MissingPackageError(f"dense={LOSSLESS!r}: {unable}")
    raise ValueError(
        f"rank {named[0]} has {texts[0]}, and rank {named[other]} {texts[other]}: set {VARIABLE} or pg_options alike on"
        " all ranks"
    )


def stats(group: Group = None) -> dict[str, dict[str, Any]]:
    """Return what each collective of a process group took on this rank, by its name.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for the default group.

    Returns:
        For each collective the ``decision`` about the last call ("native", "lossless", or the scheme of a sparse sum),
        and its ``reason``, ``calls``, ``bytes`` of its tensors, and of those that thinwire ran ``bytes_sent`` and
        ``seconds``.

    Raises:
        ValueError: a group of another back end.

    Example:
        >>> thinwire.backend.stats()["all_reduce"]["bytes_sent"]  # doctest: +SKIP
    """
    found = resolve_group(group)
    if not isinstance(found, ThinwireGroup):
        raise ValueError(
            f"the process group's back end is {dist.get_backend(found)}: use init_process_group('thinwire')"
        )
    return {name: asdict(count) for name, count in found.counts.items()}


def _inner(made: c10d.BackEndOptions, gloo_options: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield device, kind and back end of those that are forwarded to."""
    met = dist.PrefixStore("gloo/", made.store), _global_ranks(made), made.group_rank, gloo_options
    gloo = c10d.gloo_back_end(*met, made.group_id)
    yield "cpu", dist.ProcessGroup.BackendType.GLOO, _checked(gloo, "gloo", made)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = made.timeout
        options.global_ranks_in_group, options.group_name = made.global_ranks_in_group, made.group_id  # type: ignore
        nccl_store = dist.PrefixStore("nccl/", made.store)
        nccl = dist.ProcessGroupNCCL(nccl_store, made.group_rank, made.group_size, options)
        yield "cuda", dist.ProcessGroup.BackendType.NCCL, _checked(nccl, "nccl", made)


def _global_ranks(made: c10d.BackEndOptions) -> list[int]:
    return made.global_ranks_in_group or list(range(made.group_size))


def _lane_of(made: c10d.BackEndOptions) -> Lane:
    """Make the lane of a group while its ranks meet, or beside their calls.

    In its first sum a rank would wait for all others, of which one may wait for what this one sends after that call.
    """
    store = cloned(made.store)  # in that of the group a call beside this one would wait
    met = dist.PrefixStore("lane/", store or made.store), _global_ranks(made), made.group_rank, made.timeout
    own = PrivateGroup(partial(c10d.unregistered_group, *met))
    exchange = Exchange(own.process_group)
    (job, *_) = gather_bytes(exchange, "number of the job", secrets.token_bytes(8), 8)
    notes = Notes(store, exchange.global_ranks[exchange.rank], exchange.global_ranks)
    notes.begin(int.from_bytes(job))
    return Lane(own, made.timeout, notes=notes)


def _checked(back_end: Any, name: str, made: c10d.BackEndOptions) -> Any:
    """Wrap a back end as torch does under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which compares the calls of ranks."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return back_end
    return c10d.checked(back_end, dist.PrefixStore(f"{name} checked/", made.store), made)


def _sparse_sum(tensor: Tensor, how: tuple[Any, ...], count: _Count, lane: Lane) -> Callable[[], int]:
    def finish() -> int:
        before = lane.exchange.traffic.sent_bytes
        total, taken = sum_on(lane, tensor, *how)
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(total)
        count.decision = name_of(taken)
        return lane.exchange.traffic.sent_bytes - before

    return finish


def _are_several(tensors: Any) -> bool:
    """Return whether a call has more than one tensor, as no function of torch's passes: Gloo's takes them all."""
    return not isinstance(tensors, Tensor) and len(tensors) > 1


def _values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that any thread may write to: no leaf of autograd, and none of inference."""
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        return torch.from_dlpack(tensor.detach())


def _are_parts(part: Tensor, whole: Tensor, world_size: int) -> bool:
    """Whether a tensor has the part of one rank in another; what does not fit is left to Gloo, which says why."""
    return (part.dtype, part.device, world_size * part.numel()) == (whole.dtype, whole.device, whole.numel())


def _coded(
    name: str, about: str, result: Tensor, begin: Callable[[Tensor, Channel], Callable[[], int]], lane: Lane
) -> Callable[[], int]:
    """Begin what fills a flat tensor with the elements of ``result``, which may have any strides."""
    channel = lane.channel(lossless.subject(name, f"{result.dtype} {about}, lossless", result))
    channel.begin_open()
    flat = result.contiguous().view(-1)
    complete = begin(flat, channel)

    def finish() -> int:
        num_bytes = complete() + opening_bytes(channel.world_size)
        if not result.is_contiguous():
            result.copy_(flat.view_as(result))
        return num_bytes

    return finish


def _add_parts(tensor: Tensor, scale: float, flat: Tensor, channel: Channel) -> Callable[[], int]:
    return lossless.begin(tensor.contiguous(), channel, scale, out=flat)


def _gather(own: Tensor, flat: Tensor, channel: Channel) -> Callable[[], int]:
    flat[channel.rank * own.numel() :][: own.numel()] = own.reshape(-1)
    return lossless.begin_all_gather(flat, channel)


_FORWARDED = {
    "barrier": 0, "reduce": 0, "allreduce_coalesced": 0, "allgather": 1,
    "allgather_coalesced": 1, "allgather_into_tensor_coalesced": 1, "all_gather_single_coalesced": 1, "gather": 1,
    "scatter": 0, "reduce_scatter": 1, "reduce_scatter_tensor_coalesced": 1, "reduce_scatter_single_coalesced": 1,
    "alltoall": 1, "alltoall_base": 1, "all_to_all_single": 1, "gather_single": 1, "gather_into_tensor": 1,
}  # fmt: skip
"""Collectives that are only counted, and the index of the argument that has the tensors of this rank.

All collectives have a method here. C++ runs one that it does not find here with the interpreter locked, for which a
thread of Gloo may wait that has what the call waits for: one barrier in 140 hung."""


def _forwarding(name: str, index: int) -> Callable[..., Any]:
    def call(self: ThinwireGroup, *arguments: Any, **keywords: Any) -> Any:
        tensors = arguments[index] if len(arguments) > index else None
        while isinstance(tensors, (list, tuple)) and tensors:
            tensors = tensors[0]
        self._count(name, tensors.nbytes if isinstance(tensors, Tensor) else 0)
        return getattr(self._plain, name)(*arguments, **keywords)

    return call


for _name, _index in _FORWARDED.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(ThinwireGroup, _name, _forwarding(_name, _index))
for _name, _method in vars(ThinwireGroup).items():
    if hasattr(dist.ProcessGroup, _name) and not _name.startswith("__") and callable(_method):
        c10d.never_compiled(_method)


def _monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """Do what torch's function does, which asks for the name of Gloo."""
    found = group or dist.group.WORLD
    if not isinstance(found, ThinwireGroup):
        _torch_monitored_barrier(group, timeout, wait_all_ranks)
        return
    seconds = c10d.default_timeout() if timeout is None else timeout
    seconds = timedelta(seconds=seconds) if isinstance(seconds, float) else seconds
    found._plain.monitored_barrier(seconds, wait_all_ranks=wait_all_ranks)  # type: ignore


_torch_monitored_barrier = dist.monitored_barrier
dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = _monitored_barrier
