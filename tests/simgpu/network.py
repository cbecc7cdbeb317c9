"""Order through the network: what a rank knew when it sent a message is known to who receives it.

A message of the lane's Gloo groups has the clock of its sender beside it, in the store of the process group. So a sum
that comes back is behind the rows that were sent for it, on whichever threads: without that, pinned memory that one
thread reads to send and another writes when the answer has come would seem to race.

Collectives of other groups and of NCCL carry no clocks: order that only they make is not seen, and reported as a race.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch.distributed as dist

from simgpu.device import Clock, World
from thinwire.comm.c10d import default_store
from thinwire.comm.connections import PrivateGroup
from thinwire.comm.process_group import Waits

_worlds = count()
"""Ranks simulate the same worlds one after the other, so their numbers tell them apart in the store."""
_groups: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The number of each private group: ranks make them in the same order, and lanes take over those of earlier ones."""


class Messages:
    """The clocks of messages of one world, between the ranks of all private groups."""

    def __init__(self, world: World) -> None:
        self._world, self._store, self._rank = world, default_store(), dist.get_rank()
        self._prefix = f"simgpu/{next(_worlds)}"
        self._sent, self._posted = Counter[str](), Counter[str]()
        self._awaited: dict[int, tuple[Any, list[str]]] = {}  # by the id of a work, which is kept alive
        self.num_learned = 0

    def send(self, group: Any, target: int, tag: int) -> None:
        """Leave the clock of a message that is about to be sent."""
        if group in _groups:
            self._leave(self._next(self._sent, f"{_groups[group]}/{group.rank()}>{target}/{tag}"))

    def receive(self, work: Any, group: Any, source: int, tag: int) -> None:
        """Note that a receive was posted."""
        if group in _groups:
            key = self._next(self._posted, f"{_groups[group]}/{source}>{group.rank()}/{tag}")
            self._awaited[id(work)] = work, [key]

    def begin(self, group: dist.ProcessGroup) -> list[str]:
        """Leave the clock of a collective that is about to begin; return where those of all ranks will be."""
        if group not in _groups:
            return []
        key = self._next(self._sent, f"{_groups[group]}/all")
        self._leave(f"{key}/{group.rank()}")
        return [f"{key}/{rank}" for rank in range(group.size())]

    def begun(self, work: Any, keys: list[str]) -> None:
        self._awaited[id(work)] = work, keys

    def waited(self, work: Any) -> None:
        """Let the calling thread know what the senders knew."""
        for key in self._awaited.pop(id(work), (None, []))[1]:
            self._world.learn(self._own(json.loads(self._store.get(key))))
            self.num_learned += 1

    def _next(self, counter: Counter[str], key: str) -> str:
        with self._world.lock:
            counter[key] += 1
            return f"{self._prefix}/{key}/{counter[key]}"

    def _leave(self, key: str) -> None:
        known = self._world.tell()
        mine = {actor if "/" in actor else f"{self._rank}/{actor}": tick for actor, tick in known.items()}
        self._store.set(key, json.dumps(mine))

    def _own(self, clock: Clock) -> Clock:
        return {actor.removeprefix(f"{self._rank}/"): tick for actor, tick in clock.items()}


_made, _numbers = PrivateGroup.__init__, count()


def _make(self: Any, make: Callable[[], dist.ProcessGroup], *rest: Any) -> None:
    def numbered() -> dist.ProcessGroup:
        group = make()
        _groups[group] = next(_numbers)
        return group

    _made(self, numbered, *rest)


PrivateGroup.__init__ = _make  # type: ignore[method-assign]  # also outside of worlds


@contextmanager
def ordered(world: World) -> Iterator[None]:
    """A time in which messages of private groups order what their ends do."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    messages = world.messages = Messages(world)
    waits = Waits.wait

    def wait(self: Any, work: Any, *args: Any) -> None:
        waits(self, work, *args)
        messages.waited(work)

    isend, irecv = dist.isend, dist.irecv

    def send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        messages.send(group, group_dst, tag)
        return isend(tensor, dst, group, tag, group_dst)

    def receive(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        work = irecv(tensor, src, group, tag, group_src)
        messages.receive(work, group, group_src, tag)
        return work

    def collective(real: Any) -> Any:
        def call(group: Any, *args: Any) -> Any:
            keys = messages.begin(group)
            work = real(group, *args)
            messages.begun(work, keys)
            return work

        return call

    with ExitStack() as cleanup:
        cleanup.enter_context(patch.object(Waits, "wait", wait))
        cleanup.enter_context(patch.object(dist, "isend", send))
        cleanup.enter_context(patch.object(dist, "irecv", receive))
        for name in ("alltoall_base", "allreduce"):
            cleanup.enter_context(patch.object(dist.ProcessGroup, name, collective(getattr(dist.ProcessGroup, name))))
        yield
