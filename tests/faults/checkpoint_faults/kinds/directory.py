"""Slots as files, without a holder: the trainer writes the header itself, and may die at any point of that."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from checkpoint_faults.kind import Expected, Kind, Outcome, WrongRestore, refused, restored
from thinwire.holder import faultpoint
from thinwire.holder.store import BudgetError
from thinwire.lab.slot_directory import SlotDirectory
from thinwire.lab.testbed.faults import Faults

_GROUP = "files"
_NUM_BYTES = 5 << 20


def _state(step: int) -> bytes:
    return random.Random(step).randbytes(_NUM_BYTES)


def _write(path: str, faults: Faults) -> None:
    """Steps 1, 2 and 3, with what is planned for owner 0."""
    faultpoint.arm(lambda point, owner, step: faults.strike(owner, step, at=point))
    with SlotDirectory(path) as slots:
        slots.hello("run", {"world_size": 1}, 0, _NUM_BYTES)
        for step in (1, 2, 3):
            writer = slots.slot(step)
            assert writer is not None
            writer.payload[: _NUM_BYTES // 2] = _state(step)[: _NUM_BYTES // 2]
            faults.strike(0, step, at="copy")
            writer.payload[_NUM_BYTES // 2 :] = _state(step)[_NUM_BYTES // 2 :]
            writer.payload.release()
            writer.publish(b"{}")


def killed(directory: Path, at: str) -> Outcome:
    """SIGKILL at a point of step 3."""
    faults = Faults().kill(rank=0, step=3, at=at)
    process = multiprocessing.get_context("forkserver").Process(target=_write, args=(str(directory), faults))
    process.start()
    process.join(30)
    assert process.exitcode == -9, f"it ended with {process.exitcode}"
    return _restore(directory)


def altered(directory: Path) -> Outcome:
    """One bit in the payload of the newest file."""
    _write(str(directory), Faults())
    (newest,) = [path for path in directory.glob("*.slot") if b'"step":3' in path.read_bytes()]
    with newest.open("r+b") as file:
        file.seek(-_NUM_BYTES // 2, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    return _restore(directory)


def _restore(directory: Path) -> Outcome:
    with SlotDirectory(directory) as slots:
        slots.hello("run", {"world_size": 1}, 0, _NUM_BYTES)
        newest = max(slots.inventory(), key=lambda version: version.step)
        with slots.open(newest) as reader:
            if bytes(reader.payload) != _state(newest.step):
                raise WrongRestore(f"the bytes are not those of step {newest.step}")
        return Outcome("restored", "memory", newest.step)


def too_large(directory: Path) -> Outcome:
    """More than the file system has."""
    try:
        with SlotDirectory(directory) as slots:
            slots.hello("run", {"world_size": 1}, 0, 1 << 50)
    except BudgetError as error:
        return Outcome("refused", says=str(error))
    return Outcome("fresh")


def in_use(directory: Path) -> Outcome:
    """By another process that is alive."""
    with SlotDirectory(directory) as first, SlotDirectory(directory) as second:
        first.hello("run", {"world_size": 1}, 0, 1000)
        try:
            second.hello("run", {"world_size": 1}, 0, 1000)
        except ValueError as error:
            return Outcome("refused", says=str(error))
        return Outcome("fresh")


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected) -> Kind:
    return Kind(name, _GROUP, what, run, expected)


KINDS = (
    _kind("file, copying", "SIGKILL in the middle of the copy", partial(killed, at="copy"), restored("memory", 2)),
    _kind("file, before the header", "SIGKILL when all but the header is written", partial(killed, at="header"),
          restored("memory", 2)),
    _kind("file, after the header", "SIGKILL right after the header", partial(killed, at="sealed"),
          restored("memory", 3)),
    _kind("file altered", "one bit of the newest file", altered, restored("memory", 2)),
    _kind("file system too small", "a slot of 1 PiB", too_large, refused(r"has no room .* available are [\d,]+")),
    _kind("file in use", "a second process for the same shard", in_use, refused("another process that is alive")),
)  # fmt: skip
