"""The persistent tier: altered, cut short, half written, or of another time, when the memory has nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_faults.hosts import Hosts
from checkpoint_faults.kind import Expected, Kind, Outcome, refused, restored
from checkpoint_faults.training import STEPS, Job, restart, run
from thinwire.checkpoint.options import Disk

_GROUP = "disk"
_STEPS = STEPS + 2


def disk_only(directory: Path, damage: Callable[[list[Path]], None]) -> Outcome:
    """Both hosts are lost; ``damage`` gets the checkpoints on the disk, the newest first."""
    with Hosts(directory) as hosts:
        job = _saved(hosts, directory)
        hosts.kill("a", "b")
        hosts.start("ab")
        damage(sorted((directory / "disk").glob("step-*"), reverse=True))
        return restart(job)


def _saved(hosts: Hosts, directory: Path) -> Job:
    """A training that has run to its end, with two checkpoints on the disk."""
    hosts.start("ab")
    storage: dict[str, Any] = {"disk": Disk(directory / "disk", every=0.001)}
    job = Job(hosts.sockets("ab"), steps=_STEPS, storage=storage)
    started = restart(job)  # which says what a rank died of
    assert started.ended == "fresh", started
    hosts.settle("ab")
    return job


def nothing(checkpoints: list[Path]) -> None:
    """No damage."""


def flip(checkpoints: list[Path], pattern: str, place: float = 0.6) -> None:
    """One bit of each file of the newest."""
    for path in checkpoints[0].glob(pattern):
        content = bytearray(path.read_bytes())
        content[int(len(content) * place)] ^= 4
        path.write_bytes(content)


def cut(checkpoints: list[Path], pattern: str) -> None:
    for path in checkpoints[0].glob(pattern):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def remove(checkpoints: list[Path], pattern: str) -> None:
    for path in checkpoints[0].glob(pattern):
        path.unlink()


def half_written(checkpoints: list[Path]) -> None:
    """The process died before the directory got its name."""
    checkpoints[0].rename(checkpoints[0].with_name(f"{checkpoints[0].name}.partial"))


def renamed(checkpoints: list[Path]) -> None:
    """The older one is called as if it was newer than the newest."""
    shutil.copytree(checkpoints[-1], checkpoints[0].with_name("step-00000099"))


def mixed(checkpoints: list[Path]) -> None:
    """A file of the older one is in the newest."""
    (path,) = checkpoints[0].glob("__1_*.distcp")
    shutil.copy(checkpoints[-1] / path.name, path)


def without_digests(checkpoints: list[Path]) -> None:
    path = checkpoints[0] / "thinwire.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "digests": []}))


def all_of(checkpoints: list[Path]) -> None:
    for checkpoint in checkpoints:
        flip([checkpoint], "*.distcp")


def left_behind(directory: Path) -> Outcome:
    """The hosts of a run, which did not answer, come back after it went on from the disk, on others, lost by now."""
    with Hosts(directory) as hosts:
        job = _saved(hosts, directory)
        for name in "ab":  # or their newer step would be read: the disk has the addresses of the run's holders
            hosts.pause(name)
        hosts.start("cd")
        elsewhere = Job(hosts.sockets("cd"), steps=_STEPS + 3, storage=job.storage)
        went_on = restart(elsewhere)
        assert went_on.source == "disk", went_on
        for name in "ab":
            hosts.resume(name)
        back = restart(Job(job.sockets, steps=_STEPS + 3, storage=job.storage))
        assert back.step > went_on.step, "what the run has become elsewhere is lost"
        return back


def all_lost(directory: Path) -> Outcome:
    """And there is no disk."""
    with Hosts(directory) as hosts:
        hosts.start("ab")
        run(Job(hosts.sockets("ab")))
        hosts.kill("a", "b")
        hosts.start("ab")
        return restart(Job(hosts.sockets("ab")))


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected, slow: bool = True) -> Kind:
    return Kind(name, _GROUP, what, run, expected, slow)


def _damaged(name: str, what: str, damage: Callable[[list[Path]], None], slow: bool = True) -> Kind:
    intact = damage in (nothing, renamed)  # the newest one
    return _kind(name, what, partial(disk_only, damage=damage), restored("disk", 1, _STEPS - (not intact)), slow)


KINDS = (
    _damaged("all hosts lost, disk", "all hosts lost", nothing),
    _damaged("disk, payload altered", "one bit of each data file of the newest checkpoint",
             partial(flip, pattern="*.distcp"), slow=False),
    _damaged("disk, metadata altered", "one bit of .metadata", partial(flip, pattern=".metadata")),
    _damaged("disk, description altered", "one bit of thinwire.json", partial(flip, pattern="thinwire.json")),
    _damaged("disk, digests missing", "thinwire.json without digests", without_digests),
    _damaged("disk, cut short", "the data files of the newest have half their length",
             partial(cut, pattern="*.distcp")),
    _damaged("disk, metadata missing", ".metadata of the newest is missing", partial(remove, pattern=".metadata")),
    _damaged("disk, half written", "the newest never got its name", half_written),
    _damaged("disk, renamed", "the older checkpoint once more, under the name of a newer step", renamed),
    _damaged("disk, mixed", "a data file of the older checkpoint in the newest", mixed),
    _kind("disk, all altered", "one bit of each data file of all checkpoints", partial(disk_only, damage=all_of),
          refused("cannot be read.*altered")),
    _kind("hosts left behind", "memory of hosts that the run has left, and a newer disk", left_behind,
          restored("disk", 2, _STEPS + 3)),
    _kind("all hosts lost, no disk", "nothing is left but the note of the run beside the sockets", all_lost,
          refused("had reached step .*no holder here has any of it")),
)  # fmt: skip
