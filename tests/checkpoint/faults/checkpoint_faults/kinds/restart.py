"""Restarts that are not like the start: other runs, other places, other numbers of ranks, other clocks, less memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from checkpoint_faults.hosts import SECRET, Hosts
from checkpoint_faults.kind import Expected, Kind, Outcome, WrongRestore, refused, restored
from checkpoint_faults.training import STEPS, Job, restart, run
from injected import Faults

_GROUP = "restart"


def stale_run(directory: Path) -> Outcome:
    """Another run on the same hosts got further, with the same model; both go on where they were."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        other = {"run_id": "other"}
        run(Job(hosts.sockets("ab"), steps=STEPS + 3, seed=1, storage=other))
        run(Job(hosts.sockets("ab")))
        back = restart(Job(hosts.sockets("ab"), steps=STEPS + 3, seed=1, storage=other))
        assert (back.ended, back.step) == ("restored", STEPS + 3), back
        return restart(Job(hosts.sockets("ab")))


def same_name(directory: Path) -> Outcome:
    """A second training with the name of the first, whose hosts were away, gets as far; then a host of each starts.

    Holders of both are asked, so all ranks restore one of the two trainings, and never some of each."""
    with Hosts(directory) as hosts:
        hosts.start("abcd")
        alone = {"replicas": 1}
        run(Job(hosts.sockets("ab"), storage=alone))
        run(Job(hosts.sockets("cd"), seed=1, storage=alone))
        with suppress(WrongRestore):  # unless all ranks have the state of the first training
            return restart(Job(hosts.sockets("ad"), storage=alone))
        return restart(Job(hosts.sockets("ad"), seed=1, storage=alone))


def moved(directory: Path, places: str, lost: str = "") -> Outcome:
    """Ranks start again on other hosts."""
    with Hosts(directory) as hosts:
        hosts.start("abcd")
        run(Job(hosts.sockets("abcd")))
        hosts.settle("abcd")
        for name in lost:
            hosts.kill(name)
            hosts.start(name)
        return restart(Job(hosts.sockets(places)))


def another_model(directory: Path) -> Outcome:
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets("ab")))
        return restart(Job(hosts.sockets("ab"), width=100))


def another_world_size(directory: Path, before: str, after: str) -> Outcome:
    """More or fewer ranks, and then as many as before again."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets(before)))
        hosts.settle("ab")
        others = restart(Job(hosts.sockets(after), was=len(before)))
        again = restart(Job(hosts.sockets(before)))
        assert (again.ended, again.step) == ("restored", STEPS), again
        return others


def skewed(directory: Path, seconds: float) -> Outcome:
    """One rank is slow at every step, and the versions are not waited for; then all are killed."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        faults = Faults()
        for step in range(1, STEPS + 1):
            faults = faults.pause(rank=1, step=step, seconds=seconds, at="publish")
        faults = faults.kill(rank=0, step=STEPS).kill(rank=1, step=STEPS)
        run(Job(hosts.sockets("ab"), flush_seconds=0.0, faults=faults))
        return restart(Job(hosts.sockets("ab")))


def jumping_clocks(directory: Path) -> Outcome:
    """The wall clocks of all processes are wherever they like; a host is lost."""
    with Hosts(directory) as hosts:
        hosts.start("ab", clock_jumps=True)
        run(Job(hosts.sockets("ab"), clock_jumps=True))
        hosts.settle("ab")
        hosts.kill("b")
        hosts.start("b", clock_jumps=True)
        return restart(Job(hosts.sockets("ab"), clock_jumps=True))


def less_room(directory: Path, budget: str | None = None, file_limit_bytes: int | None = None) -> Outcome:
    """The host that takes the place of a lost one has too little memory."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets("ab")))
        hosts.settle("ab")
        hosts.kill("b")
        hosts.start("b", budget=budget or "100MB", file_limit_bytes=file_limit_bytes)
        return restart(Job(hosts.sockets("ab")))


def other_secret(directory: Path) -> Outcome:
    """Of one trainer."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets("ab")))
        return restart(Job(hosts.sockets("ab"), secrets=(SECRET, "another secret of sixteen")))


def other_secret_of_peer(directory: Path) -> Outcome:
    """A holder and its trainer have another one than the rest: nobody would get a copy."""
    another = "another secret of sixteen"
    with Hosts(directory) as hosts:
        hosts.start("a")
        hosts.start("b", secret=another)
        return restart(Job(hosts.sockets("ab"), secrets=(SECRET, another)))


def two_trainings(directory: Path) -> Outcome:
    """The training is started a second time while it runs."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        second: list[Outcome] = []
        threads: list[threading.Thread] = []

        def on_point(point: str, rank: int, step: int) -> None:
            if (point, rank, step) == ("step", 0, STEPS - 1) and not threads:
                threads.append(threading.Thread(target=lambda: second.append(restart(Job(hosts.sockets("ab"))))))
                threads[0].start()

        slow = Faults().pause(rank=0, step=STEPS, seconds=30.0).pause(rank=1, step=STEPS, seconds=30.0)
        run(Job(hosts.sockets("ab"), faults=slow), on_point)
        threads[0].join()
        return second[0]


def altered_while_restarting(directory: Path) -> Outcome:
    """One bit of a trainer's own copy, after all copies were found to be good and before it is loaded."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets("ab")))
        hosts.settle("ab")

        def on_point(point: str, rank: int, step: int) -> None:
            if (point, rank) == ("survey", 1):
                hosts.slots("b", owner=1)[0].flip("payload")

        return restart(Job(hosts.sockets("ab"), faults=Faults().pause(1, 0, 1.0, at="survey")), on_point)


def altered(directory: Path, where: str) -> Outcome:
    """One bit of the newest version of rank 1 on these hosts; its own is ``b``."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets("ab")))
        hosts.settle("ab")
        for name in where:
            hosts.slots(name, owner=1)[0].flip("payload")
        return restart(Job(hosts.sockets("ab")))


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected, slow: bool = False) -> Kind:
    return Kind(name, _GROUP, what, run, expected, slow)


KINDS = (
    _kind("stale run", "another run of the same model on the same hosts, further on", stale_run,
          restored("memory", STEPS), slow=True),
    _kind("same name twice", "two trainings of one name that did not see each other, one host of each",
          same_name, restored("memory|peer", STEPS), slow=True),
    _kind("training, ranks renumbered", "4 ranks, each on the next host", partial(moved, places="bcda"),
          restored("peer", STEPS), slow=True),
    _kind("training, group lost", "2 of 4 hosts, which had each other's copies",
          partial(moved, places="abcd", lost="ab"), refused("nobody has a copy of shard 0, 1.*fresh=True"), slow=True),
    _kind("another model", "the same run with another model", another_model,
          refused("is of another model.*model.0.weight was"), slow=True),
    _kind("more ranks", "3 ranks instead of 2, then 2 again", partial(another_world_size, before="ab", after="abb"),
          restored("memory", STEPS), slow=True),
    _kind("fewer ranks", "2 ranks instead of 3, then 3 again", partial(another_world_size, before="abb", after="ab"),
          restored("memory", STEPS), slow=True),
    _kind("skewed ranks", "one rank publishes 0.2 s late at each step; all are killed", partial(skewed, seconds=0.2),
          restored("memory", 1, STEPS - 1), slow=True),
    _kind("clock jumps", "wall clocks 30 years off, another way at each look; a host is lost", jumping_clocks,
          restored("peer", STEPS)),
    _kind("budget too small", "the new host's holder may take 1 MB", partial(less_room, budget="1MB"),
          refused(r"needs [\d,]+ bytes, available are [\d,]+ of the memory budget of 1,000,000")),
    _kind("shared memory too small", "the new host has no shared memory for a slot",
          partial(less_room, file_limit_bytes=1 << 20), refused(r"no shared memory for a slot of [\d,]+ bytes"),
          slow=True),
    _kind("trainer with another secret", "one of two", other_secret, refused("another secret"), slow=True),
    _kind("holder with another secret", "one of two, and its trainer", other_secret_of_peer,
          refused("rank [01]: .* cannot reach .*another secret"), slow=True),
    _kind("training started twice", "a second time while it runs", two_trainings,
          refused("is in use by another job"), slow=True),
    _kind("training, copy altered", "one bit of a rank's own copy", partial(altered, where="b"),
          restored("peer", STEPS)),
    _kind("training, all copies altered", "one bit of each copy of a rank's newest version",
          partial(altered, where="ab"), restored("memory", STEPS - 1), slow=True),
    _kind("training, altered while restarting", "one bit of a copy that was found good", altered_while_restarting,
          restored("peer", STEPS), slow=True),
)  # fmt: skip
