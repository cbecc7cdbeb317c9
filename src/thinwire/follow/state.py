"""The state of a synchronization that survives a restart, also of all ranks in one file.

See `thinwire.Synchronizer.state_dict` and `thinwire.Synchronizer.gathered`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.agree import gather_bytes
from thinwire.comm.channel import Draft, Subject
from thinwire.comm.lane import Lane
from thinwire.compress.state import redistribute
from thinwire.follow.dense import DenseChoice
from thinwire.follow.execution import Execution
from thinwire.gradients.compressed import CompressedSync
from thinwire.gradients.exact import GradientSync
from thinwire.wire import Format, Kind


class Gathered:
    """The states of all ranks as one object with a state dict, see `thinwire.Synchronizer.gathered`.

    Args:
        save: returns the state of this rank.
        load: restores it.
    """

    def __init__(self, lane: Lane, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        self._lane, self._save, self._load = lane, save, load

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, which writes them, and none on the others. All ranks call it."""
        mine = packed(self._save())
        return {"ranks": self._lane.submit(lambda lane: _gather(lane, mine)).wait()}

    def of_rank_0(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict that rank 0 passes, for nodes that do not share a disk. All ranks call it."""
        data = bytes(packed(state).numpy()) if self._lane.rank == 0 else b""
        job = self._lane.submit(lambda lane: gather_bytes(lane.exchange, "states that rank 0 read", data, sys.maxsize))
        return unpacked(torch.frombuffer(bytearray(job.wait()[0]), dtype=torch.uint8))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state from those that rank 0 wrote; all ranks call it.

        Where compression has another number of ranks than before, its memories are redistributed, see
        `thinwire.compress.redistribute`.

        Raises:
            ValueError: as `thinwire.Synchronizer.load_state_dict`; or a state that another rank than 0 wrote.
        """
        ranks, rank, world_size = state["ranks"], self._lane.rank, self._lane.world_size
        if not ranks:
            raise ValueError("no states in it: rank 0 writes those of all ranks, and this is what another rank wrote")
        if len(ranks) == world_size:
            self._load(unpacked(ranks[rank]))
            return
        states = [unpacked(entry) for entry in ranks]
        parts = [state.get("averager", state) for state in states]  # that of an outer loop is a part
        mine = parts[0] if parts[0]["compress"] is None else redistribute(parts, world_size)[rank]
        self._load({**states[0], "averager": mine} if "averager" in states[0] else mine)


def _gather(lane: Lane, mine: Tensor) -> list[Tensor]:
    """Gather states in a job of the lane. Rank 0 keeps bytes, which it has no reason to read."""
    told = lane.channel(Subject("bytes of states", "1 number")).gather_numbers([mine.numel()])
    sizes = [int(size) for (size,) in told]
    channel = lane.channel(Subject("the states of all ranks", f"{len(sizes)} states"))

    def drafts() -> list[Draft]:
        whole = nn.functional.pad(mine, (0, -mine.numel() % 8))  # payloads are words of 8 bytes
        return [Draft(Format.COO, 0, whole), *[Draft(Format.COO, 0, mine[:0])] * (channel.world_size - 1)]

    found = []
    for message, size in zip(channel.swap(Kind.GATHER, drafts, max(sizes) + 7), sizes, strict=True):
        with channel.reading(message):
            found.append(message.payload[:size].clone())
    return found if channel.rank == 0 else []


def packed(state: dict[str, Any]) -> Tensor:
    """Return a state as bytes, for `unpacked`."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(state: Tensor) -> dict[str, Any]:
    """Return the state of `packed`, which may come from elsewhere: numbers, texts and tensors, on the host."""
    file = io.BytesIO(state.cpu().numpy().tobytes())
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return found


VERSION = 3


def saved(
    steps: int,
    names: Iterable[str],
    gradients: GradientSync,
    compressed: CompressedSync | None,
    execution: Execution | None,
    choice: DenseChoice | None = None,
) -> dict[str, Any]:
    """Return the state; ``names`` are those of all parameters of the model."""
    return {
        "version": VERSION,
        "steps": steps,
        "parameters": sorted(names),
        "choices": dict(gradients.choices),
        "pauses": dict(gradients.pauses),
        "unions": dict(gradients.unions),
        "auto": gradients.learned(),
        "compress": None if compressed is None else compressed.memories.state_dict(),
        "plan": None if execution is None else execution.state_dict(),
        "dense": None if choice is None else choice.state_dict(),
    }


def check(
    state: Mapping[str, Any], names: Iterable[str], compressed: CompressedSync | None, execution: Execution | None
) -> None:
    """Raise ValueError if `restore` cannot restore the state."""
    if state.get("version") != VERSION:
        raise ValueError(f"a state of version {state.get('version')!r}; this thinwire reads {VERSION}")
    unknown = set(state["parameters"]) ^ set(names)
    if unknown:
        raise ValueError(f"the state belongs to a model with other parameters; {min(unknown)!r} is only in one of them")
    if (state["compress"] is None) != (compressed is None):
        before, here = ("without", "with") if state["compress"] is None else ("with", "without")
        raise ValueError(f"the state was saved {before} compression, and attach was called {here} it")
    if compressed is not None:
        compressed.memories.check_state(state["compress"])
    if execution is not None and state["plan"] is not None:
        execution.check_state(state["plan"])


def restore(
    state: Mapping[str, Any],
    gradients: GradientSync,
    compressed: CompressedSync | None,
    execution: Execution | None,
    choice: DenseChoice | None = None,
) -> None:
    """Restore the result of `saved`, after `check`."""
    if execution is not None and state["plan"] is not None:
        execution.load_state_dict(state["plan"])
    if compressed is not None:
        compressed.memories.load_state_dict(state["compress"])
    gradients.choices = {name: str(scheme) for name, scheme in state["choices"].items()}
    gradients.pauses = {name: int(steps) for name, steps in state["pauses"].items()}
    gradients.unions = {name: int(rows) for name, rows in state["unions"].items()}
    gradients.recall(state.get("auto"))
    if choice is not None and state.get("dense") is not None:
        choice.load_state_dict(state["dense"])
