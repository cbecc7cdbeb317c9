"""SIGKILL at every point of the protocol: to a trainer, to the holder that has its state, to the one that gets it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_faults.hosts import Hosts
from checkpoint_faults.kind import Expected, Kind, Outcome, refused, restored
from checkpoint_faults.training import STEPS, Job, restart, run
from injected import Faults

_GROUP = "SIGKILL"
_STRUCK = STEPS - 1  # the step at which faults strike


def trainer(directory: Path, at: str) -> Outcome:
    """One of two trainers, at a point of its checkpoint."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets("ab"), faults=Faults().kill(rank=1, step=_STRUCK, at=at)))
        return restart(Job(hosts.sockets("ab")))


def _when_struck(struck: int, strike: Callable[[dict[int, int]], None]) -> Callable[[str, int, int], None]:
    """Calls ``strike`` with the process of each rank when that rank begins the step in question."""
    pids: dict[int, int] = {}

    def on_point(point: str, rank: int, step: int) -> None:
        if point == "pid":
            pids[rank] = step
        if (point, rank, step) == ("step", struck, _STRUCK):
            strike(pids)

    return on_point


def all_trainers(directory: Path) -> Outcome:
    """All of them at once, somewhere in a step."""
    with Hosts(directory) as hosts:
        hosts.start("ab")

        def strike(pids: dict[int, int]) -> None:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)

        run(Job(hosts.sockets("ab"), steps=2 * STEPS), _when_struck(0, strike))
        return restart(Job(hosts.sockets("ab"), steps=2 * STEPS))


def holder(directory: Path, host: str, at: str) -> Outcome:
    """A holder, at a point in the life of the version of rank 1, whose own host is ``b`` and whose peer is ``a``."""
    with Hosts(directory) as hosts:
        faults = Faults().kill(rank=1, step=_STRUCK, at=at)
        for name in "ab":
            hosts.start(name, faults=faults if name == host else None)
        run(Job(hosts.sockets("ab"), steps=_STRUCK, flush_seconds=1.0))
        hosts.wait_until_dead(host)
        hosts.start(host)
        return restart(Job(hosts.sockets("ab")))


def trainer_in_recovery(directory: Path, at: str, lost: str = "") -> Outcome:
    """A trainer, at a point of its recovery; the next start recovers."""
    with Hosts(directory) as hosts:
        _trained(hosts, "ab")
        for name in lost:
            hosts.kill(name)
            hosts.start(name)
        run(Job(hosts.sockets("ab"), faults=Faults().kill(rank=1, step=0, at=at)))
        return restart(Job(hosts.sockets("ab")))


def holder_in_recovery(directory: Path, at: str) -> Outcome:
    """The holder of a new host, while it gets its shard back; the next start recovers."""
    with Hosts(directory) as hosts:
        _trained(hosts, "ab")
        hosts.kill("b")
        hosts.start("b", faults=Faults().kill(rank=1, step=STEPS, at=at))
        first = restart(Job(hosts.sockets("ab")))
        assert first.ended == "refused", first
        hosts.wait_until_dead("b")
        hosts.start("b")
        return restart(Job(hosts.sockets("ab")))


def server_in_recovery(directory: Path, replicas: int) -> Outcome:
    """Two hosts: one is lost, and the one that sends its shard is lost while it does; the next start has a third."""
    names = "abc"[:replicas]
    with Hosts(directory) as hosts:
        faults = Faults().kill(rank=1, step=STEPS, at="serve")
        hosts.start("a", faults=faults)
        hosts.start(names[1:])
        storage: dict[str, Any] = {"replicas": replicas}
        run(Job(hosts.sockets(names), storage=storage))
        hosts.settle(names)
        hosts.kill("b")
        hosts.start("b")
        first = restart(Job(hosts.sockets(names), storage=storage))
        if first.ended == "restored" or replicas == 2:
            return first  # another peer was asked
        hosts.wait_until_dead("a")
        hosts.start("a")
        return restart(Job(hosts.sockets(names), storage=storage))


def holder_comes_back(directory: Path) -> Outcome:
    """A holder is killed in mid-training, comes back with nothing, and is filled again; then the other one is lost."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        trainers: dict[int, int] = {}

        def on_point(point: str, rank: int, step: int) -> None:
            if point == "pid":
                trainers[rank] = step
            elif (point, rank, step) == ("step", 1, 2):
                hosts.kill("b")
            elif (point, rank, step) == ("step", 1, 4):
                os.kill(trainers[1], signal.SIGSTOP)  # or all steps would be over before a slow machine has a holder
                hosts.start("b")
                os.kill(trainers[1], signal.SIGCONT)

        run(Job(hosts.sockets("ab"), steps=12, flush_seconds=1.0), on_point)
        hosts.settle("ab")
        hosts.kill("a")
        hosts.start("a")
        return restart(Job(hosts.sockets("ab"), steps=12))


def holder_paused(directory: Path, seconds: float) -> Outcome:
    """A holder stops (SIGSTOP) in mid-training, and goes on later; then all trainers start again."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        timers: list[threading.Timer] = []

        def on_point(point: str, rank: int, step: int) -> None:
            if (point, rank, step) == ("step", 1, 2) and not timers:
                hosts.pause("b")
                timers.append(threading.Timer(seconds, hosts.resume, ["b"]))
                timers[0].start()

        run(Job(hosts.sockets("ab"), steps=8, flush_seconds=2.0), on_point)
        for timer in timers:
            timer.join()
        return restart(Job(hosts.sockets("ab"), steps=8))


def _trained(hosts: Hosts, names: str) -> None:
    hosts.start(names)
    run(Job(hosts.sockets(names)))
    hosts.settle(names)


def whole_host(directory: Path) -> Outcome:
    """A trainer and the holder of its host at the same moment, in mid-step."""
    with Hosts(directory) as hosts:
        hosts.start("ab")

        def strike(pids: dict[int, int]) -> None:
            os.kill(pids[1], signal.SIGKILL)
            hosts.kill("b")

        run(Job(hosts.sockets("ab"), steps=2 * STEPS), _when_struck(1, strike))
        time.sleep(0.1)
        hosts.start("b")
        return restart(Job(hosts.sockets("ab"), steps=2 * STEPS))


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected, slow: bool = False) -> Kind:
    return Kind(name, _GROUP, what, run, expected, slow)


_OLD, _NEW = (_STRUCK - 1, _STRUCK), STEPS
_ABOUT = _STRUCK - 1, 2 * STEPS
"""Of what is killed when a rank said that it has done a step: the others may be a step behind, and all of them ahead by
the time that this is heard."""
KINDS = (
    _kind("trainer, copying", "a trainer in the middle of its copy into the slot", partial(trainer, at="copy"),
          restored("memory", *_OLD)),
    _kind("trainer, copied", "a trainer that has copied all, before the holder knows", partial(trainer, at="publish"),
          restored("memory", *_OLD), slow=True),
    _kind("trainer, published", "a trainer right after the holder knows", partial(trainer, at="published"),
          restored("memory", *_OLD), slow=True),
    _kind("all trainers", "all trainers at once, somewhere in a step", all_trainers,
          restored("memory", *_ABOUT)),
    _kind("trainer and holder of a host", "both at the same moment", whole_host, restored("peer", *_ABOUT)),
    _kind("holder, before the header", "the own holder, when all but the slot's header is written",
          partial(holder, host="b", at="header"), restored("peer", *_OLD)),
    _kind("holder, after the header", "the own holder, right after the header", partial(holder, host="b", at="sealed"),
          restored("peer", *_OLD), slow=True),
    _kind("holder, sending", "the own holder in the middle of sending", partial(holder, host="b", at="send"),
          restored("peer", *_OLD)),
    _kind("holder, receiving", "the peer's holder in the middle of receiving", partial(holder, host="a", at="receive"),
          restored("peer", *_OLD), slow=True),
    _kind("holder, replica before the header", "the peer's holder, when all but the header is written",
          partial(holder, host="a", at="header"), restored("peer", *_OLD), slow=True),
    _kind("trainer, surveying", "a trainer that knows who has what", partial(trainer_in_recovery, at="survey"),
          restored("memory", _NEW), slow=True),
    _kind("trainer, loading", "a trainer in the middle of loading", partial(trainer_in_recovery, at="load"),
          restored("memory", _NEW)),
    _kind("trainer, fetching", "the trainer of a new host, when it asks for its shard",
          partial(trainer_in_recovery, at="fetch", lost="b"), restored("peer", _NEW), slow=True),
    _kind("holder, fetching", "the holder of a new host in the middle of receiving its shard",
          partial(holder_in_recovery, at="receive"), restored("peer", _NEW)),
    _kind("holder, fetched", "the same, when all but the header is written", partial(holder_in_recovery, at="header"),
          restored("peer", _NEW), slow=True),
    _kind("holder, serving", "a host is lost, and the holder that sends its shard dies while it does; a third has it",
          partial(server_in_recovery, replicas=3), restored("peer", _NEW)),
    _kind("last holder, serving", "the same, and nobody else has it", partial(server_in_recovery, replicas=2),
          refused("not restored|lost|holder"), slow=True),
    _kind("holder comes back empty", "a holder in mid-training, replaced by an empty one; later the other host is lost",
          holder_comes_back, restored("peer", 11, 12)),
    _kind("holder paused", "SIGSTOP to a holder for a second", partial(holder_paused, seconds=1.0),
          restored("memory", 7, 8)),
    _kind("holder paused for long", "SIGSTOP to a holder for 15 seconds", partial(holder_paused, seconds=15.0),
          restored("memory", 1, 8), slow=True),
)  # fmt: skip
