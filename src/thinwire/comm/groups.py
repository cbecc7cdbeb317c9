"""Private groups of the ranks of a process group: how ranks meet to make one, and which ones are left for the next.

Whoever waits for peers here raises within a timeout, and names a rank that failed or ended meanwhile.
"""

import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm.c10d import device_of, gloo_group, sparse_group, store_of, timeout_of
from thinwire.comm.connections import Connected, PrivateGroup, between, connected, dead, packed_ends, shut_down_groups
from thinwire.comm.notes import ATTACH, Note, Notes
from thinwire.errors import CorruptHeaderError, LostPeerError, logger

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh | None


def resolve_group(process_group: Group) -> dist.ProcessGroup:
    """Return the process group of a ProcessGroup, a one-dimensional DeviceMesh, or None for the default one.

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
        if process_group.get_coordinate() is None:
            raise ValueError("this rank is not in the mesh: only its ranks may call this")
        return process_group.get_group()
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the process group: only its members may call this")
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group is {process_group!r}: pass a ProcessGroup, a DeviceMesh, or None for all")
    return process_group


_Kind = tuple[timedelta | None, bool]  # a timeout, and whether one collective is run after the other
_idle_groups: WeakKeyDictionary[dist.ProcessGroup, list[PrivateGroup]] = WeakKeyDictionary()
STORE_SECONDS = 2.0
"""Seconds that a rank waits for a connection to the store, which takes less than one ms."""
_NONCE_BYTES = 8
_stores: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()
_jobs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_lanes_of: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def beside(name: str, call: Callable[[], T]) -> Future[T]:
    """Begin a call on a thread of its own, for one that may wait for ever for a host that is gone."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def let_go(group: dist.ProcessGroup) -> None:
    """Drop a group that C++ parts of a model still hold, which go now; one that was shut down, on another thread later.

    Its end waits for works that may never fail, see `PrivateGroup.shut_down`.
    """
    if group in shut_down_groups and not sys.is_finalizing():  # no thread starts then
        end_beside([group], LETTING_GO_SECONDS)


LETTING_GO_SECONDS = 1.0
"""Seconds after which the C++ parts of a model that is being collected are gone."""
ending: WeakSet[Future[None]] = WeakSet()  # held by the threads that end groups


def end_beside(groups: list[Any], seconds: float = 0.0) -> None:
    """Clear a list of groups, on another thread and after some seconds: the end of a broken one may wait for long."""
    with suppress(RuntimeError):  # no thread starts while the process exits
        ending.add(beside("thinwire-ending", lambda: time.sleep(seconds) or groups.clear()))


def take_group(parent: dist.ProcessGroup, kind: _Kind, notes: Notes) -> PrivateGroup:
    """Return a Gloo group of the same ranks for one lane: one that a closed lane left, else a new one.

    Groups are kept because each costs a few connections and threads, and the wait until all ranks have connected. One
    that a rank hung up, as after a step that it did not complete, is gone for all of them. Ranks may have closed lanes
    in different orders, so the group that was made first is the next.
    """
    idle = _idle_groups.setdefault(parent, [])
    for group in sorted(idle, key=attrgetter("number")):
        if group.lost():
            idle.remove(group)
            group.shut_down()
            group.destroy()
        elif group.kind == kind:
            idle.remove(group)
            return group
    return _new_group(parent, kind, notes)


def leave_idle(parent: dist.ProcessGroup, groups: Iterable[PrivateGroup]) -> None:
    """Leave groups for `take_group`, in a collective call of their ranks."""
    _idle_groups.setdefault(parent, []).extend(groups)


def private_group(process_group: Group, timeout: timedelta | None) -> PrivateGroup:
    """Return a new Gloo group of the same ranks that nothing else uses, in a collective call of them.

    Args:
        timeout: longest wait for a peer, here and in the group; None means that of ``process_group``.

    Raises:
        LostPeerError: not all ranks came within the timeout; those that did raise the same sentence.
    """
    parent = resolve_group(process_group)
    return _new_group(parent, (timeout or timeout_of(parent), False), notes_of(parent, next_number(parent)))


def _new_group(parent: dist.ProcessGroup, kind: _Kind, notes: Notes) -> PrivateGroup:
    """Return a new Gloo group of the same ranks, in a collective call of them.

    Ranks wait for each other in a store, where the death of a peer shows nothing, and in collectives of the parent, of
    which only some ranks see it. So on the CPU another thread waits, and this one looks at the connections and notes.
    Nothing is sent over the new group here: a rank that waited in it for one that failed would have nobody to tell it.

    Raises:
        LostPeerError: not all ranks came within the timeout, or one of them failed or ended meanwhile; those that came
            raise the same sentence.
    """
    processes: list[list[Connected]] = []
    try:
        if device_of(parent).type != "cpu":
            return _connect(parent, kind, processes, notes)
        made = beside("thinwire-group", lambda: _connect(parent, kind, processes, notes))
        with notes.listening() as heard:
            while not wait([made], _LOOK_SECONDS).done:
                if heard.is_set():
                    raise _not_all_here(parent, "another rank failed, or the store is gone")
                if lost := dead(processes):
                    rank = dist.get_process_group_ranks(parent)[min(lost)]
                    raise _not_all_here(parent, f"rank {rank} is gone", rank)
        return made.result()
    except LostPeerError as error:
        raise _told(parent, notes, error, kind[0]) from error


_LOOK_SECONDS = 0.05


def _told(parent: dist.ProcessGroup, notes: Notes, error: LostPeerError, timeout: timedelta | None) -> LostPeerError:
    """Leave a note that this rank did not meet the others; return the error that all raise."""
    is_late, waits = timed_out(error), tuple({*dist.get_process_group_ranks(parent)} - {notes.rank})
    lost = () if is_late or error.rank is None else (error.rank,)
    seconds = (timeout or default_pg_timeout).total_seconds() if is_late else 0.0
    notes.leave(Note(notes.rank, False, str(error), ATTACH, lost, waits, seconds, is_late))
    return notes.truth() or error


def timed_out(error: BaseException | None) -> bool:
    """Return whether an error of torch says that a time limit was reached."""
    return any(text in str(error).lower() for text in ("timed out", "application timeout"))


def _not_all_here(parent: dist.ProcessGroup, why: str, lost: int | None = None) -> LostPeerError:
    error = LostPeerError(
        f"rank {dist.get_rank()}: not all of the {parent.size()} ranks of the process group came here within the"
        f" timeout ({why}): attach and the like must be called on all of them"
    )
    error.rank = lost
    return error


def _connect(parent: dist.ProcessGroup, kind: _Kind, processes: list[list[Connected]], notes: Notes) -> PrivateGroup:
    """Make the group, and append which connections of this process lead to which rank as soon as that is known."""
    ranks = dist.get_process_group_ranks(parent)
    timeout, for_sparse = kind
    limit = timeout or timeout_of(parent) or default_pg_timeout
    try:
        name, found = _meet(parent, notes, limit)
        processes += found
        # Torch makes a group without a barrier, so the first ranks have all their connections while others still make
        # theirs. If one of the first failed then and hung up, a rank that connects to a peer of it would try until the
        # timeout. So each waits until all have sent their addresses.
        make = partial(sparse_group if for_sparse else gloo_group, name, ranks, limit)
        return PrivateGroup(make, lambda data: _gather(data, parent, limit), kind)
    except RuntimeError as error:
        raise _not_all_here(parent, str(error).splitlines()[0]) from error


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, limit: timedelta) -> None:
    """All-reduce within the timeout of a lane: that of the group can be far longer, and not all ranks may come."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "lanes are made by ranks of the group"
    work.wait(limit)


def _gather(data: bytes, group: dist.ProcessGroup, limit: timedelta) -> list[bytes]:
    """Gather bytes of each rank, at least one, in rank order, by all-reduces: any back end has these."""
    device = device_of(group)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    lengths[group.rank()] = len(data)
    _all_reduce(lengths, group, limit)
    sizes = lengths.tolist()
    for rank, size in enumerate(sizes):
        if not 0 < size <= PrivateGroup.MAX_BYTES:
            raise CorruptHeaderError(f"rank {dist.get_process_group_ranks(group)[rank]} announces {size:,} bytes")
    rows = torch.zeros(group.size(), max(sizes), dtype=torch.uint8)
    rows[group.rank(), : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    _all_reduce(rows := rows.to(device), group, limit)
    return [row[:size].numpy().tobytes() for row, size in zip(rows.cpu(), sizes, strict=True)]


def _meet(parent: dist.ProcessGroup, notes: Notes, limit: timedelta) -> tuple[str, list[list[Connected]]]:
    """Return a name for a group that only these ranks know, drawn by one, and which connections lead to which rank.

    Notes begin with the first such number of a group: the store may have those of an earlier attempt of the job.
    """
    connections = connected()
    records = _gather(secrets.token_bytes(_NONCE_BYTES) + packed_ends(connections), parent, limit)
    nonce = records[0][:_NONCE_BYTES]
    notes.begin(_jobs.setdefault(parent, int.from_bytes(nonce, "little")))
    ends = [record[_NONCE_BYTES:] for record in records]
    ends[parent.rank()] = b""  # connections of this process to itself
    return f"thinwire {nonce.hex()}", between(connections, ends)


def next_number(parent: dist.ProcessGroup) -> int:
    """Return the number of the next notes of a group, which all ranks count alike, whatever the store does."""
    return next(_lanes_of.setdefault(parent, count()))


def notes_of(parent: dist.ProcessGroup, number: int) -> Notes:
    """Return notes of a group, over a connection of our own: torch may wait on its own."""
    ranks = dist.get_process_group_ranks(parent)
    if parent not in _stores:
        try:
            clone = cloned(store := store_of(parent))
        except Exception as error:
            logger.info("the process group has no store, so errors name no rank: %s", error)
            return Notes(None, dist.get_rank(), ranks)
        if clone is None:
            return Notes(store, dist.get_rank(), ranks).without_store()
        _stores[parent] = clone
    store = dist.PrefixStore(f"thinwire/lane {number}", _stores[parent])
    notes = Notes(store, dist.get_rank(), ranks)
    if parent in _jobs:
        notes.begin(_jobs[parent])
    return notes


def cloned(store: dist.Store) -> dist.Store | None:
    """Return another connection to a store; None if its host does not answer, for which torch would wait for long."""
    try:
        return beside("thinwire-store", lambda: store.clone()).result(STORE_SECONDS)  # type: ignore[attr-defined]
    except (TimeoutError, dist.DistNetworkError):
        return None
