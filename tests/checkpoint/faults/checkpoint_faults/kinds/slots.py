"""Bits altered in the memory of holders, before, while and after it is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from checkpoint_faults.hosts import SlotFile
from checkpoint_faults.kind import Expected, Kind, Outcome, refused, restored
from checkpoint_faults.shards import Shards, content
from thinwire.checkpoint.holder import faultpoint

_GROUP = "memory"


def slot_of(shards: Shards, host: int, owner: int, step: int) -> SlotFile:
    """The complete version of a shard that a host has, as it lies in memory."""
    for shard in shards.holders[host].store.shards.values():
        for holding, manifest in shard.complete():
            if (manifest.shard.owner, manifest.step) == (owner, step):
                return SlotFile.of(Path(f"/proc/self/fd/{holding.slot.descriptor}"))
    raise ValueError(f"host {host} has no step {step} of owner {owner}")


def altered(directory: Path, what: str, where: tuple[tuple[int, int], ...] = ((1, 2),)) -> Outcome:
    """One bit of the shard of owner 1, at these (host, step); then all trainers start again."""
    with Shards(directory) as shards:
        shards.train([1, 2])
        for host, step in where:
            slot_of(shards, host, owner=1, step=step).flip(what)
        return shards.recover()


def without_digests(directory: Path) -> Outcome:
    with Shards(directory) as shards:
        shards.train([1, 2])
        slot_of(shards, host=1, owner=1, step=2).drop_digests()
        return shards.recover()


def altered_between(directory: Path, point: str) -> Outcome:
    """After all copies were found to be good, one is altered before it is loaded."""
    with Shards(directory) as shards:
        shards.train([1, 2])
        _once(point, lambda: slot_of(shards, host=1, owner=1, step=2).flip("payload"))
        return shards.recover()


def altered_while_sent(directory: Path, point: str) -> Outcome:
    """The slot of the peer that supplies a lost host."""
    with Shards(directory) as shards:
        shards.train([1, 2])
        shards.replace(1)
        _once(point, lambda: slot_of(shards, host=0, owner=1, step=2).flip("payload"))
        return shards.recover()


def still_writing(directory: Path) -> Outcome:
    """A trainer that was taken for dead writes on, into a slot that is a version by now, after that was found good."""
    with Shards(directory) as shards:
        shards.train([1])
        writer = shards.owners[1].slot(2)
        assert writer is not None
        stale = writer.payload
        stale[:] = content(1, 2, shards.history, shards.num_bytes)
        writer.publish(b'{"owner": 1, "step": 2, "history": "first"}', wait=True)
        shards.write(0, 2)
        for client in shards.owners.values():
            client.grant_all()
        Shards.wait_for(lambda: shards.replicated(2), "step 2 is everywhere")
        _once("survey", lambda: stale.__setitem__(slice(None), content(1, 1, shards.history, shards.num_bytes)))
        try:
            return shards.recover()
        finally:
            stale.release()


def altered_before_sent(directory: Path) -> Outcome:
    """An owner's own copy, before its peer got it: it must not count as a version on either of them."""
    with Shards(directory) as shards:
        shards.train([1])
        for owner in (0, 1):
            shards.owners[owner].revoke()
            assert shards.write(owner, 2, keep_step=1)
        slot_of(shards, host=1, owner=1, step=2).flip("payload")
        for client in shards.owners.values():
            client.grant_all()
        Shards.wait_for(lambda: shards.owners[0].status()["newest_replicated"] == 2, "owner 0 has sent step 2")
        Shards.wait_for(lambda: shards.owners[1].status()["newest_local"] == 1, "owner 1 knows that step 2 was altered")
        return shards.recover()


def failing_thread(directory: Path, point: str) -> Outcome:
    """An error that nobody expected, in the thread of a holder that sends, or receives; then a host is lost."""

    def fail() -> None:
        raise RuntimeError("an error that nobody expected")

    with Shards(directory) as shards:
        shards.train([1])
        _once(point, fail)
        shards.train([2])
        shards.replace(1)
        return shards.recover()


def _once(point: str, action: Callable[[], object]) -> None:
    """At the first time that the point is reached."""
    chance = iter([action])

    def strike(reached: str, owner: int, step: int) -> None:
        if reached == point:
            next(chance, random.random)()

    faultpoint.arm(strike)


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected) -> Kind:
    return Kind(name, _GROUP, what, run, expected)


_PEER = restored("peer", 2)
_BOTH = ((0, 2), (1, 2))
KINDS = (
    _kind("payload altered", "one bit of the own copy", partial(altered, what="payload"), _PEER),
    _kind("slot header altered", "one bit of the own copy's header", partial(altered, what="header"), _PEER),
    _kind("manifest altered", "one bit of the own copy's JSON", partial(altered, what="manifest"), _PEER),
    _kind("layout altered", "one bit of the own copy's layout", partial(altered, what="layout"), _PEER),
    _kind("digest missing", "the own copy has no digests, and is consistent otherwise", without_digests, _PEER),
    _kind("replica altered", "one bit of the peer's copy", partial(altered, what="payload", where=((0, 2),)),
          restored("memory", 2)),
    _kind("all copies of a step altered", "one bit of the own copy and one of the peer's",
          partial(altered, what="payload", where=_BOTH), restored("memory", 1)),
    _kind("all copies altered", "one bit of every copy of every step of a shard",
          partial(altered, what="payload", where=((0, 1), (1, 1), *_BOTH)), refused("nobody has a copy of shard 1")),
    _kind("altered before it is loaded", "one bit of the own copy, after it was verified",
          partial(altered_between, point="survey"), _PEER),
    _kind("altered before it is served", "a host is lost, and the peer's copy altered after it was verified",
          partial(altered_while_sent, point="survey"), restored("peer", 1)),
    _kind("altered while it is served", "a host is lost, and the peer's copy altered while it is being sent",
          partial(altered_while_sent, point="serve"), restored("peer", 1)),
    _kind("a dead trainer writes on", "another step's bytes into a verified copy, by a process taken for dead",
          still_writing, _PEER),
    _kind("altered before it is sent", "one bit of the own copy before the peer had it", altered_before_sent,
          restored("memory", 1)),
    _kind("error in a sender", "an unexpected error in a holder's thread, then its host is lost",
          partial(failing_thread, point="send"), _PEER),
    _kind("error in a receiver", "an unexpected error in the peer's thread, then the sender's host is lost",
          partial(failing_thread, point="receive"), _PEER),
)  # fmt: skip
