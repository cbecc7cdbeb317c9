"""The communication lane: the jobs of a process, in one order that all ranks share, off the training thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from thinwire.cuda.exchange import StagedExchange
from thinwire.cuda.staging import HostStaging, Staging
from thinwire.errors import CorruptHeaderError, CorruptMessageError, LostPeerError, ThinwireError
from thinwire.sync.channel import Channel, Subject
from thinwire.sync.exchange import Exchange, ProcessGroupExchange
from thinwire.sync.hosts import discover
from thinwire.sync.machine import Machine, measure

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh | None


def resolve_group(process_group: Group) -> dist.ProcessGroup:
    """The process group meant by a ProcessGroup, a one-dimensional DeviceMesh, or None for the default one.

    Raises:
        ValueError: no process group was initialized, a mesh has several dimensions, or this rank is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() first,"
            " and start the script with torchrun"
        )
    if process_group is None:
        group = dist.group.WORLD
        assert group is not None
        return group
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"the DeviceMesh has {process_group.ndim} dimensions; pass one of them, such as mesh['dp']"
            )
        return process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"this rank is not in the process group ({process_group!r})")
    return process_group


_idle_groups: WeakKeyDictionary[dist.ProcessGroup, list[tuple[timedelta | None, dist.ProcessGroup]]]
_idle_groups = WeakKeyDictionary()


def _take_group(parent: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A Gloo group of the same ranks for a lane alone: one that a closed lane left, else a new one.

    Groups are kept because torch names a group of some of the ranks after those ranks, so that a second
    one finds the addresses of the first, which are dead if it was destroyed.
    """
    idle = _idle_groups.setdefault(parent, [])
    for place, (idle_timeout, group) in enumerate(idle):
        if idle_timeout == timeout:
            del idle[place]
            return group
    ranks = dist.get_process_group_ranks(parent)
    some = len(ranks) < dist.get_world_size()
    group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout that the group was made with; None, for torch's default, where this torch does not tell."""
    for device in ("cpu", "cuda"):  # a group of NCCL has no part for the CPU
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


class Lane:
    """Runs jobs one after the other on a thread and a process group of their own.

    All ranks submit the same jobs in the same order; nothing else uses the group, so ranks can never
    interleave differently, and the training thread goes on meanwhile.

    Args:
        process_group: the ranks that take part. Making a lane is a collective call of all of them.
        timeout: how long an exchange may wait for a peer; None takes that of ``process_group``.
        staging: how tensors that jobs all-reduce get to the host; None where they are there. The group of the lane is
            Gloo's whatever ``process_group`` is.
    """

    def __init__(
        self, process_group: Group = None, timeout: timedelta | None = None, staging: Staging | None = None
    ) -> None:
        parent = resolve_group(process_group)
        self._parent = weakref.ref(parent)  # a lane must not keep alive a group that its owner has destroyed
        self._timeout = timeout or _timeout_of(parent)
        group = _take_group(parent, self._timeout)
        self._group: dist.ProcessGroup | None = group
        self.exchange: Exchange = StagedExchange(group, staging or HostStaging())
        self.busy_seconds = 0.0
        self.watcher: Callable[[float, float], None] | None = None  # told when each job started and ended
        self._sequence = 0
        self._broken: Exception | None = None
        self._machine: Machine | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thinwire-lane", daemon=True)
        self._thread.start()
        self._jobs.put(lambda: self._find_hosts(ProcessGroupExchange(group)))

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    def submit(self, job: Callable[[Lane], T]) -> Future[T]:
        """Queue a job, called with this lane; the future holds its result or its exception.

        The job opens a `channel` for each tensor that it synchronizes. The tensors that it reads belong to the
        lane until the future is done.
        """
        future: Future[T] = Future()

        def run() -> None:
            started = time.perf_counter()
            try:
                result = self._attempt(job)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result
            else:
                future.set_result(result)
            finally:
                ended = time.perf_counter()
                self.busy_seconds += ended - started
                if self.watcher is not None:
                    self.watcher(started, ended)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        """Finish the queued jobs and release the thread and the group. Nothing can be submitted afterwards."""
        self._jobs.put(None)
        self._thread.join()
        parent = self._parent()
        if parent is not None and self._group is not None and self._broken is None:
            _idle_groups.setdefault(parent, []).append((self._timeout, self._group))
            self._group = None
        self._hang_up()

    def abandon(self) -> None:
        """Have the thread end after the queued jobs, and the group with it, without waiting for them.

        The group is not left to a next lane: ranks that abandon at different times would disagree on whether it is.
        """
        self._jobs.put(self._hang_up)
        self._jobs.put(None)

    def channel(self, subject: Subject) -> Channel:
        """The next conversation. Only for a running job.

        Raises:
            ThinwireError: an earlier failure left this rank out of step with its peers; they learn of it here.
        """
        channel = Channel(self.exchange, subject, self._sequence, self.machine)
        self._sequence += 1
        if self._broken is not None:
            self._refuse(channel, self._broken)
        return channel

    def rehearsal(self, subject: Subject) -> Channel:
        """As `channel`, but what it sends is not counted: nothing of it reaches a gradient."""
        channel = self.channel(subject)
        assert self._group is not None, "a lane without connections runs no jobs"
        exchange = ProcessGroupExchange(self._group)
        exchange.hosts = self.exchange.hosts
        return Channel(exchange, subject, channel.sequence, self.machine)

    def machine(self) -> Machine:
        """What messages, bytes and rows take on these ranks: measured by the first call, which all ranks make together.

        Only for a running job. It takes a few tenths of a second.
        """
        if self._machine is None:
            assert self._group is not None, "a lane without connections runs no jobs"
            self._machine = measure(ProcessGroupExchange(self._group))
        return self._machine

    def _find_hosts(self, exchange: Exchange) -> None:
        """Before the first job, and on an exchange of its own: what a lane counts are bytes of its jobs."""
        self.exchange.hosts = discover(exchange)

    def _attempt(self, job: Callable[[Lane], T]) -> T:
        try:
            return job(self)
        except (LostPeerError, CorruptHeaderError) as error:
            self._broken = error
            self._hang_up()
            raise
        except CorruptMessageError as error:
            self._broken = error
            raise

    def _refuse(self, channel: Channel, reason: Exception) -> NoReturn:
        """Peers still in step are told at the start of this job; those we hung up on know already."""

        def fail() -> NoReturn:
            raise ThinwireError(
                f"rank {self.rank}, {channel.subject.name}: not synchronized, because the lane stopped after"
                f" an earlier failure: {reason}"
            )

        if self._group is None:
            fail()
        channel.attempt(fail)

    def _hang_up(self) -> None:
        """Close the connections, so that peers who wait for this rank fail at once instead of at the timeout."""
        group, self._group = self._group, None
        self.exchange.close()
        if group is not None:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and with it the gradients that it read
