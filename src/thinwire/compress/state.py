"""States of compressors by parameter name: copied, compared, and redistributed to other ranks.

The residuals of gradients are kept element by element, so they move with their elements. Settings that a method adapts
(steps, stages of a search) have no elements. Everything else (ids of the last step, regions) is computed again.

Pure: no communication is needed. In two shots the owner of a piece has a memory of the *mean*; there is one such
memory where all ranks have one of their own gradients, so it is multiplied by the number of ranks when it joins those
of its rank.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.base import State


def mapped(change: Callable[..., Any], *states: Mapping[str, Any]) -> State:
    """Return a state of ``change(name, *entries)`` for the entries of states that have one structure."""
    result: State = {}
    for name, first in states[0].items():
        entries = [state[name] for state in states]
        result[name] = mapped(change, *entries) if isinstance(first, Mapping) else change(name, *entries)
    return result


def copied(state: Mapping[str, Any]) -> State:
    """Return a deep copy."""
    return mapped(lambda name, entry: entry.clone() if isinstance(entry, Tensor) else entry, state)


def salted(state: Mapping[str, Any], rank: int) -> State:
    """Return the state with every ``salt`` in it set to the rank, so that ranks draw different random numbers."""
    return mapped(lambda name, entry: rank if name == "salt" else entry, state)


def check_fits(state: Mapping[str, Any], pattern: Mapping[str, Any], where: str) -> None:
    """Raise ValueError, naming the entry, unless ``state`` has the names, types, shapes and dtypes of ``pattern``."""
    if unknown := set(state) ^ set(pattern):
        raise ValueError(f"{where}: {min(unknown)!r} is in one of the states only, so they are of different methods")
    for name, entry in pattern.items():
        saved = state[name]
        if isinstance(entry, Mapping) and isinstance(saved, Mapping):
            check_fits(saved, entry, f"{where}, {name}")
        elif isinstance(entry, Tensor) and entry.numel() == 0 and isinstance(saved, Tensor):
            continue  # grows with the first step
        elif _kind(saved) != _kind(entry):
            raise ValueError(f"{where}: {name!r} is {_kind(saved)} in the state, and {_kind(entry)} here")


def redistribute(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Return states of a synchronization for another number of ranks, from the states of all its ranks.

    Every new rank gets the mean of the memories of the old ones. The mean over the ranks is what the memories will
    add to coming gradients, so it is conserved (up to the rounding of the mean): nothing that was not sent is lost.
    In two shots, pieces and their owners' memories are cut again. Counters are copied, ``salt`` entries set to the new
    rank. Pure: nothing is communicated, and the states given are not changed.

    Args:
        states: results of `Synchronizer.state_dict` of each rank, in rank order.
        world_size: number of ranks of the synchronization that will load them.

    Returns:
        The states for `Synchronizer.load_state_dict` of each new rank.

    Raises:
        ValueError: states that are not of all ranks of one synchronization, or have no compression in them.

    Example:
        >>> states = [torch.load(f"sync-{rank}.pt") for rank in range(8)]                # doctest: +SKIP
        >>> sync.load_state_dict(thinwire.compress.redistribute(states, 4)[sync_rank])   # doctest: +SKIP
    """
    if world_size < 1:
        raise ValueError(f"a state for {world_size} ranks; give 1 or more")
    parts = [state["compress"] for state in states if state.get("compress") is not None]
    if not parts or len(parts) < len(states):
        raise ValueError("these states have no compression in them, and exact ones fit any number of ranks as they are")
    ranks = [(part["rank"], part["world_size"]) for part in parts]
    if ranks != [(rank, len(parts)) for rank in range(len(parts))]:
        raise ValueError(f"states of (rank, world_size) {ranks}: pass all states of a run, in rank order")
    old = [part["states"] for part in parts]
    if any(set(each) != set(old[0]) for each in old):
        raise ValueError("states with different parameters are not of one synchronization")
    if any(set(entry) == {"pieces"} for entry in old[0].values()):
        raise ValueError(
            "memories of FSDP's reduce-scatter belong to shards, which other ranks cut in another way: load such states"
            " on as many ranks as saved them, or start without them"
        )
    dealt = {name: _dealt([each[name] for each in old], world_size) for name in old[0]}

    def of_rank(rank: int) -> dict[str, Any]:
        own = {name: of_ranks[rank] for name, of_ranks in dealt.items()}
        return {**states[0], "compress": {**parts[0], "rank": rank, "world_size": world_size, "states": own}}

    return [of_rank(rank) for rank in range(world_size)]


def _dealt(states: Sequence[State], world_size: int) -> list[State]:
    if "pieces" not in states[0]:
        return [_merged(states, _mean, rank) for rank in range(world_size)]
    whole = [_merged(list(state["pieces"].values()), _joined, 0) for state in states]
    server = _merged([state["server"] for state in states], _joined, 0)

    def of_rank(rank: int) -> State:
        own = _merged(whole, _mean, rank)
        pieces = {str(owner): _cut(own, owner, world_size, rank) for owner in range(world_size)}
        return {"pieces": pieces, "server": _cut(server, rank, world_size, world_size + rank)}

    return [of_rank(rank) for rank in range(world_size)]


def _merged(states: Sequence[State], merge: Callable[[list[Any], int], Any], rank: int) -> State:
    """Merge several states of one structure into one, for a new rank."""
    return mapped(lambda name, *entries: rank if name == "salt" else merge([*entries], rank), *states)


def _mean(entries: list[Any], rank: int) -> Any:
    """Return an equal entry, the mean of real entries, or one of other entries, taken in turn."""
    one = entries[rank % len(entries)]
    if isinstance(one, Tensor):
        is_mean = one.is_floating_point() and not all(torch.equal(one, entry) for entry in entries)
        return torch.stack([entry.double() for entry in entries]).mean(0).to(one.dtype) if is_mean else one.clone()
    is_mean = isinstance(one, float) and any(entry != one for entry in entries)
    return sum(entries) / len(entries) if is_mean else one


def _joined(entries: list[Any], rank: int) -> Any:
    """Concatenate vectors of consecutive pieces; return the mean of anything else."""
    return torch.cat(entries) if isinstance(entries[0], Tensor) and entries[0].dim() == 1 else _mean(entries, rank)


def _cut(state: State, owner: int, world_size: int, rank: int) -> State:
    """Return the state of a piece."""

    def cut(name: str, entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return rank if name == "salt" else entry
        return entry[slice(*span(entry.numel(), owner, world_size))].clone() if entry.dim() == 1 else entry.clone()

    return mapped(cut, state)


def _kind(entry: object) -> str:
    if isinstance(entry, Tensor):
        return f"a tensor of {str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"
    return "a state" if isinstance(entry, Mapping) else type(entry).__name__


def outstanding(state: Mapping[str, Any], rank: int, world_size: int) -> Tensor | None:
    """Return the unsent rest of one gradient on a rank, or None without a memory.

    Its mean over the ranks is the part that has not arrived. It is the memory itself, or a new tensor [numel] if it was
    kept in pieces.
    """
    if "pieces" not in state:
        return _memory(state)
    memories = [memory for piece in state["pieces"].values() if (memory := _memory(piece)) is not None]
    if len(memories) < len(state["pieces"]):
        return None
    whole = torch.cat(memories)
    server = _memory(state.get("server", {}))  # an owner remembers nothing of what loses nothing on average
    if server is not None:
        start, stop = span(whole.numel(), rank, world_size)
        whole[start:stop].add_(server, alpha=world_size)
    return whole


def owe(state: Mapping[str, Any], rest: Tensor) -> None:
    """Make ``rest`` what `outstanding` returns for a new state of the same method, whatever reduces it."""
    memories = {int(owner): _memory(piece) for owner, piece in state.get("pieces", {"0": state}).items()}
    for owner, memory in memories.items():
        assert memory is not None, "a method that has a memory has it for any number of ranks"
        start, stop = span(rest.numel(), owner, len(memories))
        memory.copy_(rest.reshape(-1)[start:stop].view(memory.shape))


def _memory(state: Mapping[str, Any]) -> Tensor | None:
    """Return the memory of `ErrorFeedback`, `MomentumCorrection`, or a method with its own."""
    for name in ("velocity", "error"):
        if isinstance(state.get(name), Tensor):
            return state[name]
    inner = (_memory(entry) for entry in state.values() if isinstance(entry, Mapping))
    return next((memory for memory in inner if memory is not None), None)


def span(numel: int, owner: int, world_size: int) -> tuple[int, int]:
    """Return where the piece of a flat gradient that an owner has begins and ends."""
    return numel * owner // world_size, numel * (owner + 1) // world_size
