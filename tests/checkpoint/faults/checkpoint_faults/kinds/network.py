"""Hosts that nobody can reach any more, without a word: their port of the switch is down."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoint_faults.hosts import Hosts
from checkpoint_faults.kind import Expected, Kind, Outcome, restored
from checkpoint_faults.training import STEPS, Job, restart, run
from injected import Faults
from thinwire.lab.testbed.network import EmulatedNetwork, Link

_GROUP = "network"
_B = 1  # the host called b


@contextlib.contextmanager
def _emulated(directory: Path, names: str) -> Iterator[tuple[Hosts, EmulatedNetwork]]:
    with EmulatedNetwork(len(names), Link(None)) as network, Hosts(directory, network) as hosts:
        hosts.start(names)
        yield hosts, network


def unreachable_peer(directory: Path) -> Outcome:
    """A holder while training goes on, whose trainers have another network; then all trainers start again."""
    with _emulated(directory, "ab") as (hosts, network):
        slow = Faults()
        for step in range(1, 2 * STEPS + 1):
            slow = slow.pause(rank=0, step=step, seconds=0.3)

        def on_point(point: str, rank: int, step: int) -> None:
            if (point, rank, step) == ("step", 0, 2):
                network.cut(_B)
            if (point, rank, step) == ("step", 0, 2 * STEPS - 2):
                network.mend(_B)

        run(Job(hosts.sockets("ab"), steps=2 * STEPS, flush_seconds=0.0, faults=slow), on_point)
        return restart(Job(hosts.sockets("ab"), steps=2 * STEPS))


def unreachable_for_good(directory: Path) -> Outcome:
    """A host; its rank starts again on a spare one."""
    with _emulated(directory, "abc") as (hosts, network):
        run(Job(hosts.sockets("ab")))
        hosts.settle("ab")
        network.cut(_B)
        return restart(Job(hosts.sockets("ac")))


def unreachable_in_recovery(directory: Path) -> Outcome:
    """A host is lost; the peer of the new one cannot be reached when it is asked; it can at the next start."""
    with _emulated(directory, "ab") as (hosts, network):
        run(Job(hosts.sockets("ab")))
        hosts.settle("ab")
        hosts.kill("b")
        hosts.start("b")

        def on_point(point: str, rank: int, step: int) -> None:
            if point == "fetch":
                network.cut(_B)

        waits = Faults().pause(rank=1, step=0, seconds=0.5, at="fetch")
        first = restart(Job(hosts.sockets("ab"), faults=waits), on_point)
        assert first.ended == "refused", first
        network.mend(_B)
        return restart(Job(hosts.sockets("ab")))


def host_gone(directory: Path) -> Outcome:
    """A host with all its processes, in mid-training, without a word to the others; another takes its place."""
    with _emulated(directory, "ab") as (hosts, network):
        pids: dict[int, int] = {}
        watchdog: list[threading.Timer] = []

        def on_point(point: str, rank: int, step: int) -> None:
            if point == "pid":
                pids[rank] = step
            if (point, rank, step) == ("step", 1, STEPS - 1):
                network.cut(_B)
                os.kill(pids[1], signal.SIGKILL)
                hosts.kill("b")
                watchdog.append(threading.Timer(2.0, os.kill, [pids[0], signal.SIGKILL]))
                watchdog[0].start()

        run(Job(hosts.sockets("ab"), steps=2 * STEPS), on_point, network)
        watchdog[0].join()
        network.mend(_B)
        hosts.start("b")
        return restart(Job(hosts.sockets("ab"), steps=2 * STEPS), network=network)


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected) -> Kind:
    return Kind(name, _GROUP, what, run, expected, slow=True)


KINDS = (
    _kind("peer black-holed", "a holder cannot be reached for some steps of the training", unreachable_peer,
          restored("memory", STEPS, 2 * STEPS)),
    _kind("host black-holed for good", "a host cannot be reached; its rank starts on a spare one", unreachable_for_good,
          restored("peer", STEPS)),
    _kind("black-holed while recovering", "the peer cannot be reached when a new host asks it for its shard",
          unreachable_in_recovery, restored("peer", STEPS)),
    _kind("host gone", "all processes of an emulated host and its network at once, in mid-training", host_gone,
          restored("peer", STEPS - 2, STEPS)),
)  # fmt: skip
