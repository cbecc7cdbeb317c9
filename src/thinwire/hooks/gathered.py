"""The states of all ranks in one, for frameworks that write a single file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.compress.state import redistribute
from thinwire.lane import Lane
from thinwire.sync.channel import Draft, Subject
from thinwire.wire import Format, Kind


class Gathered:
    """See `thinwire.Synchronizer.gathered`.

    Args:
        save: makes the state of this rank.
        load: takes it.
    """

    def __init__(self, lane: Lane, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        self._lane, self._save, self._load = lane, save, load

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks on rank 0, which writes them; no states on the others. All ranks call it."""
        mine = _packed(self._save())
        return {"ranks": self._lane.submit(lambda lane: _gather(lane, mine)).wait()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state of those that rank 0 wrote; all ranks call it.

        Where compression has another number of ranks than before, its memories are dealt out anew, see
        `thinwire.compress.redistribute`.

        Raises:
            ValueError: as `thinwire.Synchronizer.load_state_dict`; or a state that another rank than 0 wrote.
        """
        ranks, rank, world_size = state["ranks"], self._lane.rank, self._lane.world_size
        if not ranks:
            raise ValueError("no states in it: rank 0 writes those of all ranks, and this is what another rank wrote")
        if len(ranks) == world_size:
            self._load(_unpacked(ranks[rank]))
            return
        states = [_unpacked(entry) for entry in ranks]
        self._load(states[0] if states[0]["compress"] is None else redistribute(states, world_size)[rank])


def _gather(lane: Lane, mine: Tensor) -> list[Tensor]:
    """A job of the lane. Rank 0 keeps bytes, which it has no reason to read."""
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


def _packed(state: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(state: Tensor) -> dict[str, Any]:
    file = io.BytesIO(state.cpu().numpy().tobytes())
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return found
