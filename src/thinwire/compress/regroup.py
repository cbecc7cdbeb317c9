"""Memories of gradients that are compressed as one flat tensor: cut into those of its members, joined for other groups.

What ranks have not sent yet is in their memories, element by element, so it moves with its elements. Settings that a
method adapts (steps, stages of a search) have no elements; a new group takes those of its first member. Whatever else
there is (ids of the last step, regions) is found anew.

Pure: no rank needs another for it. In two shots the owner of a piece has a memory of the *mean*; there is one such
memory where all ranks have one of their own gradients, so it counts as many times as there are ranks when it joins
those of its rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.base import State

_TWO_SHOT = {"pieces", "server"}


def outstanding(state: Mapping[str, Any], rank: int, world_size: int) -> Tensor | None:
    """What a rank has not sent of one gradient: its mean over the ranks is what has not arrived. None without a memory.

    The memory itself, or a new tensor [numel] if it was kept in pieces.
    """
    if set(state) != _TWO_SHOT:
        return _memory(state)
    memories = [_memory(piece) for piece in state["pieces"].values()]
    server = _memory(state["server"])
    if server is None or any(memory is None for memory in memories):
        return None
    whole = torch.cat([memory for memory in memories if memory is not None])
    start, stop = _span(whole.numel(), rank, world_size)
    whole[start:stop].add_(server, alpha=world_size)
    return whole


def dissolved(state: Mapping[str, Any], sizes: Sequence[int], rank: int, world_size: int) -> list[State]:
    """The state of each member, for `fused`, of a gradient that was compressed as one.

    Args:
        state: of the flat gradient, as `Reduction.init` made it.
        sizes: elements of each member, in order.
    """
    worker, server = state, {}
    if set(state) == _TWO_SHOT:
        worker, server = _joined(list(state["pieces"].values())), state["server"]
        memory, whole = _memory(worker), outstanding(state, rank, world_size)
        if memory is not None and whole is not None:
            memory.copy_(whole)
    numel = sum(sizes)
    return [
        {"worker": _sliced(worker, start, stop, numel), "server": _sliced(server, 0, 0, -1)}
        for start, stop in pairwise(accumulate(sizes, initial=0))
    ]


def fused(members: Sequence[State | None], sizes: Sequence[int], pattern: State) -> State:
    """The state of a flat gradient, of what `dissolved` gave for its members; None for one that has none yet.

    Args:
        pattern: a new state of the flat gradient; it is used up.
    """
    worker, server = ([None if member is None else member[side] for member in members] for side in ("worker", "server"))
    numel = sum(sizes)
    if set(pattern) != _TWO_SHOT:
        return _filled(pattern, worker, sizes, (0, numel))
    world_size = len(pattern["pieces"])
    pieces = {
        owner: _filled(piece, worker, sizes, _span(numel, int(owner), world_size))
        for owner, piece in pattern["pieces"].items()
    }
    return {"pieces": pieces, "server": _filled(pattern["server"], server, sizes, (0, 0))}


def _memory(state: Mapping[str, Any]) -> Tensor | None:
    """What `ErrorFeedback` or `MomentumCorrection`, or a method of its own, keeps of gradients."""
    for name in ("velocity", "error"):
        if isinstance(state.get(name), Tensor):
            return state[name]
    inner = (_memory(entry) for entry in state.values() if isinstance(entry, Mapping))
    return next((memory for memory in inner if memory is not None), None)


def _is_elementwise(entry: object, numel: int) -> bool:
    return isinstance(entry, Tensor) and entry.is_floating_point() and entry.dim() == 1 and entry.numel() == numel


def _sliced(state: Mapping[str, Any], start: int, stop: int, numel: int) -> State:
    """Of tensors [numel] a slice, of others nothing."""
    found: State = {}
    for name, entry in state.items():
        if isinstance(entry, Mapping):
            found[name] = _sliced(entry, start, stop, numel)
        elif _is_elementwise(entry, numel):
            found[name] = entry[start:stop].clone()
        elif not isinstance(entry, Tensor):
            found[name] = entry
    return found


def _joined(states: Sequence[Mapping[str, Any]]) -> State:
    """Pieces as one state: vectors one after the other, what else there is from the first."""
    found: State = {}
    for name, first in states[0].items():
        entries = [state[name] for state in states]
        if isinstance(first, Mapping):
            found[name] = _joined(entries)
        elif isinstance(first, Tensor) and first.dim() == 1:
            found[name] = torch.cat(entries)
        else:
            found[name] = first
    return found


def _filled(pattern: State, sources: Sequence[Any], sizes: Sequence[int], span: tuple[int, int]) -> State:
    filled: State = {}
    for name, entry in pattern.items():
        found = [source.get(name) if isinstance(source, Mapping) else None for source in sources]
        if isinstance(entry, Mapping):
            filled[name] = _filled(dict(entry), found, sizes, span)
        elif isinstance(entry, Tensor) and any(isinstance(part, Tensor) for part in found):
            parts = [
                part if isinstance(part, Tensor) else entry.new_zeros(size)
                for part, size in zip(found, sizes, strict=True)
            ]
            filled[name] = torch.cat(parts)[slice(*span)].clone()
        elif isinstance(entry, Tensor) or name == "salt":
            filled[name] = entry
        else:
            filled[name] = next((part for part in found if type(part) is type(entry)), entry)
    return filled


def _span(numel: int, owner: int, world_size: int) -> tuple[int, int]:
    return numel * owner // world_size, numel * (owner + 1) // world_size
