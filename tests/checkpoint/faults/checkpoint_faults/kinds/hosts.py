"""Hosts lost, swapped and left behind: which of several histories of a run is gone back to, and by whose copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event

from checkpoint_faults.kind import Expected, Kind, Outcome, refused, restored
from checkpoint_faults.shards import Shards
from thinwire.checkpoint.holder import faultpoint
from thinwire.checkpoint.holder.version import next_attempt

_GROUP = "hosts"


def lost(directory: Path, hosts: int, replicas: int, which: Sequence[int]) -> Outcome:
    """These hosts at once; other ones take their places."""
    with Shards(directory, hosts, replicas) as shards:
        shards.train([1, 2])
        for host in which:
            shards.replace(host)
        return shards.recover()


def moved(directory: Path, places: Sequence[int], which: Sequence[int] = ()) -> Outcome:
    """All trainers start again, each on another host; some hosts were lost."""
    with Shards(directory, hosts=4) as shards:
        shards.train([1, 2])
        for host in which:
            shards.replace(host)
        return shards.recover(places)


def lost_while_recovering(directory: Path, replicas: int) -> Outcome:
    """A host is lost; while it gets its shard back, the peer that sends it is lost too."""
    with Shards(directory, hosts=3, replicas=replicas) as shards:
        shards.train([1, 2])
        shards.replace(1)
        ended = Event()

        def strike(point: str, owner: int, step: int) -> None:
            if point == "serve" and owner == 1 and not ended.is_set():
                ended.set()
                serving = next(h for h in shards.holders if h.status()["shards"] and _serves(h, owner))
                serving.store.close()
                raise ConnectionError("the host is lost")

        faultpoint.arm(strike)
        return shards.recover()


def _serves(holder: object, owner: int) -> bool:
    store = holder.store  # type: ignore[attr-defined]
    return any(s.id.owner == owner and any(h.readers for h in s.holdings) for s in store.shards.values())


def ahead(directory: Path, by: int) -> Outcome:
    """One owner has written steps that the others have not."""
    with Shards(directory, hosts=3) as shards:
        shards.train([1, 2])
        for step in range(3, 3 + by):
            shards.write(0, step, keep_step=2)
        return shards.recover()


def two_histories(directory: Path) -> Outcome:
    """A run of one copy on two hosts; it starts over on two others; then one host of each is there."""
    with Shards(directory, replicas=1) as shards:
        shards.train([1, 2])
        shards.end_owners()
        first = shards.holders
        shards.holders = [shards._start(), shards._start()]
        assert shards.recover().ended == "refused"
        shards.history = "second"
        shards.train([1, 2])
        shards.holders = [first[0], shards.holders[1]]
        return shards.recover()


def full_of_old(directory: Path) -> Outcome:
    """A host comes back whose slots are full of versions that nobody else ever got, while the run went on elsewhere."""
    reachable = Event()
    real_or_none = lambda real: real if reachable.is_set() else "127.0.0.1:9"  # noqa: E731
    with Shards(directory, via=real_or_none, deadline_seconds=60.0) as shards:
        shards.train([1, 2], replicate=False)
        shards.end_owners()
        left_behind = shards.holders[0]
        shards.holders[0] = shards._start()
        reachable.set()
        assert shards.recover().ended == "refused"
        shards.history = "second"
        shards.train([11, 12])
        shards.end_owners()
        shards.holders[0] = left_behind
        return shards.recover()


def late_sender(directory: Path) -> Outcome:
    """A version of a given-up attempt is still being sent when its owner starts on the host that it goes to."""
    blocked, late = Event(), Event()

    def strike(point: str, owner: int, step: int) -> None:
        if point == "send" and (owner, step) == (1, 3) and not blocked.is_set():
            blocked.set()
            late.wait(10)

    with Shards(directory) as shards:
        shards.train([1, 2])
        faultpoint.arm(strike)
        assert shards.write(1, 3, keep_step=2)
        shards.owners[1].grant_all()
        blocked.wait(10)
        assert shards.recover(places=[1, 0]).step == 2
        shards.history = "second"
        late.set()
        for step in (3, 4):
            _write_all(shards, step, keep_step=step - 1)
        return shards.recover()


def _write_all(shards: Shards, step: int, keep_step: int) -> None:
    for owner in shards.owners:
        assert shards.write(owner, step, keep_step)
        shards.owners[owner].grant_all()
    Shards.wait_for(lambda: shards.replicated(step), f"step {step} is everywhere")


def pushed_out(directory: Path) -> Outcome:
    """A host that was away comes back and sends what it has to a peer that has newer versions; then all start again."""
    with Shards(directory) as shards:
        reachable = Event()
        shards._via = lambda real: real if reachable.is_set() else "127.0.0.1:9"
        shards.train([1, 2], replicate=False)
        away = shards.holders[0]
        shards.end_owners()
        shards.holders[0] = shards._start()
        reachable.set()
        shards.attempt, shards.history = next_attempt([shards.attempt], random.getrandbits(32)), "second"
        shards.train([3, 4])
        in_place, shards.holders[0] = shards.holders[0], away
        shards.end_owner(0)
        shards.attempt = 0
        shards.register(0)
        shards.owners[0].grant_all()
        old = [replica for shard in away.store.shards.values() for replica in shard.replicas.values()]
        Shards.wait_for(lambda: all(not r.bytes_pending() for r in old), "nothing old is on its way")  # type: ignore[attr-defined]
        shards.holders[0] = in_place
        shards.replace(0)
        return shards.recover()


def duplicate_owner(directory: Path) -> Outcome:
    """Somebody starts the training a second time while the first one lives."""
    with Shards(directory) as shards:
        shards.train([1, 2])
        alive = shards.owners.pop(1)
        try:
            return shards.recover()
        finally:
            alive.close()


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected, slow: bool = False) -> Kind:
    return Kind(name, _GROUP, what, run, expected, slow)


_PEER = restored("peer", 2)
KINDS = (
    _kind("host of a pair lost", "one of 4 hosts, 2 copies", partial(lost, hosts=4, replicas=2, which=[2]), _PEER),
    _kind("host of a ring lost", "one of 5 hosts, 2 copies: the last 3 are a ring",
          partial(lost, hosts=5, replicas=2, which=[3]), _PEER),
    _kind("hosts of two groups lost", "two of 4 hosts at once, not each other's peers",
          partial(lost, hosts=4, replicas=2, which=[0, 3]), _PEER),
    _kind("group lost", "two of 4 hosts at once, which had each other's copies",
          partial(lost, hosts=4, replicas=2, which=[0, 1]), refused("nobody has a copy of shard 0, 1")),
    _kind("two of three copies lost", "two of 7 hosts at once, 3 copies",
          partial(lost, hosts=7, replicas=3, which=[0, 1]), _PEER),
    _kind("all hosts lost", "4 of 4, and nobody is left who could say so",
          partial(lost, hosts=4, replicas=2, which=range(4)), refused("nobody has anything")),
    _kind("ranks renumbered", "every trainer comes back on the next host of 4", partial(moved, places=[1, 2, 3, 0]),
          _PEER),
    _kind("ranks renumbered, host lost", "and one of the hosts is new", partial(moved, places=[1, 2, 3, 0], which=[2]),
          _PEER),
    _kind("peer lost while recovering", "a host, and then the peer that sends it its shard; 3 copies",
          partial(lost_while_recovering, replicas=3), _PEER),
    _kind("last peer lost while recovering", "the same, 2 copies", partial(lost_while_recovering, replicas=2),
          refused("nobody has a copy of shard 1")),
    _kind("owner ahead", "one of 3 owners is a step ahead", partial(ahead, by=1), restored("memory", 2)),
    _kind("owner far ahead", "one of 3 owners is five steps ahead, as far as it gets", partial(ahead, by=5),
          restored("memory", 2)),
    _kind("two histories", "one host of a run and one of the same run started again, which did not see each other",
          two_histories, refused("nobody has a copy")),
    _kind("host full of old versions", "a host comes back with versions that nobody wanted, in all of its slots",
          full_of_old, restored("peer", 12)),
    _kind("late version", "of a given-up attempt, sent to the host where the owner lives now", late_sender,
          restored("memory", 4)),
    _kind("old versions sent", "by a host that was away, to a peer with newer ones; then the newer one's host is lost",
          pushed_out, restored("peer", 4)),
    _kind("duplicate owner", "the training is started a second time while it runs", duplicate_owner,
          refused("belongs to another trainer that is connected"), slow=True),
)  # fmt: skip
