"""One bit of one rank's parameters or moments flips while it trains: the restart goes back to before, wherever it is.

The ranks that restart are compared, to the bit, with a training in which nothing flipped, so a version that was taken
although ranks differed in it is a wrong restore.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from checkpoint_faults.hosts import Hosts
from checkpoint_faults.kind import Expected, Kind, Outcome, restored
from checkpoint_faults.training import Flip, Job, restart, run
from holders import placed_at
from thinwire.checkpoint.options import Disk

GROUP = "silent corruption"
FLIPS = 20
_HOSTS = "abc"


def flip_of(seed: int) -> Flip:
    dice = Random(seed)
    what = dice.choice(("weight", "bias", "exp_avg", "exp_avg_sq", "step"))
    mantissa = 23  # another exponent or sign makes NaN of all parameters on all ranks, which are then alike
    return Flip(dice.randrange(3), dice.randint(3, 5), what, dice.randrange(1000), dice.randrange(mantissa))


def _alarmed(directory: Path, flip: Flip, after: Callable[[Hosts, Job], Outcome]) -> Outcome:
    """A training with a disk, up to the alarm; then ``after``. Some steps have no version."""
    storage: dict[str, Any] = {"disk": Disk(directory / "disk", every=0.001)}
    with Hosts(directory) as hosts:
        hosts.start(_HOSTS)
        ran = run(Job(hosts.sockets(_HOSTS), steps=flip.step + 9, storage=storage, flip=flip))
        for told in ran.told:
            assert told is not None, ran.errors
            words = rf"rank {flip.rank} differ from the other ranks at step (\d+), and at step (\d+) all were"
            found = re.search(words, told.stopped)
            assert found is not None, told
            assert int(found[2]) < flip.step <= int(found[1]), found[0]
        hosts.settle(_HOSTS)
        return after(hosts, Job(hosts.sockets(_HOSTS), steps=flip.step + 3, storage=storage))


def same_hosts(directory: Path, flip: Flip) -> Outcome:
    return _alarmed(directory, flip, lambda hosts, job: restart(job))


def all_hosts_lost(directory: Path, flip: Flip) -> Outcome:
    def after(hosts: Hosts, job: Job) -> Outcome:
        hosts.kill(*_HOSTS)
        hosts.start(_HOSTS)
        return restart(job)

    return _alarmed(directory, flip, after)


def one_host_fewer(directory: Path, flip: Flip) -> Outcome:
    """The host that the alarm names is taken away; no disk, and no steps on two ranks, which would be others."""

    def after(hosts: Hosts, job: Job) -> Outcome:
        left = _HOSTS.replace(_HOSTS[flip.rank], "")
        hosts.kill(_HOSTS[flip.rank])
        return restart(Job(hosts.sockets(left), steps=0, was=len(_HOSTS)))

    return _alarmed(directory, flip, after)


def standby(directory: Path, flip: Flip) -> Outcome:
    """Another host takes the place of the one that the alarm names, and fetches its shards before the ranks start."""

    def after(hosts: Hosts, job: Job) -> Outcome:
        hosts.kill(_HOSTS[flip.rank])
        hosts.start("d")
        names = _HOSTS.replace(_HOSTS[flip.rank], "d")
        addresses = []
        for name in names:
            with hosts.client(name) as client:
                addresses.append(client.holder_status()["address"])
        here = addresses[flip.rank]
        with hosts.client("d") as client:
            owners = placed_at(here, addresses, replicas=2)
            brought = client.prefetch("run", owners, len(names), [each for each in addresses if each != here])
        assert 0 < brought["step"] < flip.step, brought
        assert brought["missing"] == {}
        return restart(Job(hosts.sockets(names), steps=job.steps, storage=job.storage))

    return _alarmed(directory, flip, after)


def _kinds(seed: int) -> list[Kind]:
    flip, slow = flip_of(seed), seed > 0
    what = f"rank {flip.rank}, step {flip.step}, bit {flip.bit} of an element of {flip.what}"
    back = flip.step - 1

    def kind(name: str, run: Callable[[Path, Flip], Outcome], expected: Expected, is_slow: bool = True) -> Kind:
        return Kind(f"flip {seed}, {name}", GROUP, what, partial(run, flip=flip), expected, slow or is_slow)

    return [
        kind("disk", same_hosts, restored("memory", 1, back)),
        kind("one host fewer", one_host_fewer, restored("memory", 1, back), is_slow=False),
        kind("all hosts lost", all_hosts_lost, restored("disk", 1, back), is_slow=False),
        kind("standby", standby, restored("memory", 1, back)),
    ]


KINDS = tuple(kind for seed in range(FLIPS) for kind in _kinds(seed))
