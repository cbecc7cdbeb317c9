"""Decoding of a layout and tensors to a state, in place wherever the training has the tensor already."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.checkpoint.state.layout import DTYPES, StateLayout, TensorSlice
from thinwire.checkpoint.state.sharding import Meshes, local_of
from thinwire.errors import CorruptMessageError
from thinwire.holder.faultpoint import reach

Targets = list[tuple[int, Tensor]]  # index of a slice, and the tensor to fill from it
_Place = Callable[[int, Any], Any]
_MISSING = object()


def unflatten(layout: StateLayout, tensors: Sequence[Tensor]) -> Any:
    """Return the state with these tensors in it. Raises CorruptMessageError for a tree not made by ``flatten``."""
    return _guarded(layout, lambda number, _: tensors[number], None)


def load_into(state: Any, layout: StateLayout, tensors: Sequence[Tensor]) -> Any:
    """Copy the stored state into the tensors of ``state`` at the same keys, where shape and dtype match, and return it.

    The stored state determines the keys and items: others of ``state`` are not in the result. Other tensors are new
    ones, so nothing of the result is in the buffer. Values are returned, not changed in place: use the result for
    everything that is not a tensor.

    Raises ValueError for parts of a DTensor that ``state`` holds in other parts, or that it cannot make.

    Example: state = load_into(state, layout, views(layout, reader.payload))
    """
    loaded, targets = prepare(state, layout)
    for number, target in targets:
        local = local_of(target)
        if local.shape != tensors[number].shape:
            raise ValueError(f"{layout.slices[number].path}: this rank has another part of it than the one stored")
        with torch.no_grad():
            local.copy_(tensors[number])
        reach("load")
    return loaded


def prepare(state: Any, layout: StateLayout) -> tuple[Any, Targets]:
    """Return the stored state before its tensors are filled, and the target tensor of each slice.

    Targets are tensors of ``state`` where shape (of the whole, for parts) and dtype are the same, else new ones.
    """
    targets: Targets = []
    meshes = Meshes(_tensors(state))

    def place(number: int, existing: Any) -> Tensor:
        where = layout.slices[number]
        target = existing if _fits(existing, where) else _new(where, meshes)
        targets.append((number, target))
        return target

    return _guarded(layout, place, state), targets


def _guarded(layout: StateLayout, place: _Place, existing: Any) -> Any:
    try:
        return _decode(layout.tree, len(layout.slices), place, existing)
    except RecursionError as error:
        raise CorruptMessageError(f"a layout that is nested too deeply: {error}") from error


def _fits(existing: Any, where: TensorSlice) -> bool:
    if not isinstance(existing, Tensor) or isinstance(existing, DTensor) != (where.part is not None):
        return False
    shape = where.shape if where.part is None else where.part.shape
    return tuple(existing.shape) == shape and existing.dtype == DTYPES[where.dtype]


def _new(where: TensorSlice, meshes: Meshes) -> Tensor:
    dtype = DTYPES[where.dtype]
    return torch.empty(where.shape, dtype=dtype) if where.part is None else meshes.empty(where.part, dtype)


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for value in inner for tensor in _tensors(value)]


def _decode(node: Any, count: int, place: _Place, existing: Any) -> Any:
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, list):
        return [_decode(item, count, place, _item(existing, i)) for i, item in enumerate(node)]
    if not isinstance(node, dict) or len(node) != 1:
        raise CorruptMessageError(f"not a node of a layout: {str(node)[:40]}")
    ((tag, value),) = node.items()
    if tag == "tensor":
        if type(value) is not int or not 0 <= value < count:
            raise CorruptMessageError(f"no tensor {str(value)[:40]} in a layout")
        return place(value, existing)
    if tag == "tuple" and isinstance(value, list):
        return tuple(_decode(item, count, place, _item(existing, i)) for i, item in enumerate(value))
    if tag == "dict" and isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        pairs = [(_key(key, place), inner) for key, inner in value]
        return {key: _decode(inner, count, place, _item(existing, key)) for key, inner in pairs}
    return _plain(tag, value)


def _key(node: Any, place: _Place) -> Any:
    key = _decode(node, 0, place, None)
    try:
        hash(key)
    except TypeError as error:
        raise CorruptMessageError(f"not a key of a layout: {error}") from error
    return key


def _plain(tag: str, value: Any) -> Any:
    try:
        if tag == "float":
            return float.fromhex(value)
        if tag == "bytes":
            return base64.b64decode(value, validate=True)
    except (ValueError, TypeError) as error:
        raise CorruptMessageError(f"not a {tag} of a layout: {error}") from error
    raise CorruptMessageError(f"not a {str(tag)[:40]!r} of a layout: {str(value)[:40]}")


def _item(existing: Any, key: Any) -> Any:
    """The value at the same key of the existing state, if any."""
    if isinstance(existing, dict):
        return existing.get(key, _MISSING)
    if isinstance(existing, (list, tuple)) and isinstance(key, int) and key < len(existing):
        return existing[key]
    return _MISSING
