"""Decoding of a layout and tensors to a state, in place wherever the training has the tensor already."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from thinwire.checkpoint.state.encode import kind_of
from thinwire.checkpoint.state.layout import COLLECTIONS, DTYPES, TAGS, StateLayout, TensorSlice
from thinwire.checkpoint.state.sharding import Targets, empty_of
from thinwire.errors import CorruptMessageError

_TensorFor = Callable[[int, Any], Any]
_MISSING = object()


def unflatten(layout: StateLayout, tensors: Sequence[Tensor]) -> Any:
    """Return the state with these tensors in it. Raises CorruptMessageError for a tree not made by ``flatten``."""
    return _guarded(layout, lambda number, _: tensors[number], None)


def prepare(state: Any, layout: StateLayout) -> tuple[Any, Targets]:
    """Return the stored state before its tensors are filled, and the target tensor of each slice.

    The stored state determines the keys and items: others of ``state`` are not in the result. Values are returned, not
    changed in place: use the result for everything that is not a tensor. Targets are tensors of ``state`` where shape
    (of the whole, for parts) and dtype are the same, and that can be written to (`is_writable`), else new ones.

    Raises ValueError for parts of a DTensor that it cannot make.
    """
    targets: Targets = []
    meshes = {tensor.device_mesh for tensor in _tensors(state) if isinstance(tensor, DTensor)}

    def tensor_for(number: int, existing: Any) -> Tensor:
        where = layout.slices[number]
        target = existing if _fits(existing, where) else _new(where, meshes)
        targets.append((number, target))
        return target

    return _guarded(layout, tensor_for, state), targets


def _guarded(layout: StateLayout, tensor_for: _TensorFor, existing: Any) -> Any:
    try:
        return _decode(layout.tree, len(layout.slices), tensor_for, existing)
    except RecursionError as error:
        raise CorruptMessageError(f"a layout that is nested too deeply: {error}") from error


def is_writable(tensor: Tensor) -> bool:
    """Return whether ``copy_`` takes the tensor: no two elements are one in memory, nor is it of inference mode."""
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not overlaps and not tensor.is_inference()


def _fits(existing: Any, where: TensorSlice) -> bool:
    if not isinstance(existing, Tensor) or isinstance(existing, DTensor) != (where.part is not None):
        return False
    shape = where.shape if where.part is None else where.part.shape
    return tuple(existing.shape) == shape and existing.dtype == DTYPES[where.dtype] and is_writable(existing)


def _new(where: TensorSlice, meshes: set[DeviceMesh]) -> Tensor:
    dtype = DTYPES[where.dtype]
    return torch.empty(where.shape, dtype=dtype) if where.part is None else empty_of(where.part, dtype, meshes)


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for value in inner for tensor in _tensors(value)]


def _decode(node: Any, count: int, tensor_for: _TensorFor, existing: Any) -> Any:
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, list):
        return [_decode(item, count, tensor_for, _item(existing, i)) for i, item in enumerate(node)]
    if not isinstance(node, dict) or len(node) != 1:
        raise CorruptMessageError(f"not a node of a layout: {str(node)[:40]}")
    ((tag, value),) = node.items()
    if tag == "tensor":
        if type(value) is not int or not 0 <= value < count:
            raise CorruptMessageError(f"no tensor {str(value)[:40]} in a layout")
        return tensor_for(value, existing)
    if tag == "tuple" and isinstance(value, list):
        return tuple(_decode(item, count, tensor_for, _item(existing, i)) for i, item in enumerate(value))
    if tag == "dict" and isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        pairs = [(_key(key, tensor_for), inner) for key, inner in value]
        return {key: _decode(inner, count, tensor_for, _item(existing, key)) for key, inner in pairs}
    if tag == "array":
        tensor = _decode(value, count, tensor_for, _shared(existing))
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
    if tag == "subclass" and isinstance(value, list) and len(value) == 2:
        return _subclass(value[0], value[1], count, tensor_for, existing)
    try:
        if tag in COLLECTIONS and isinstance(value, list):
            return COLLECTIONS[tag].read(_key(item, tensor_for) for item in value)
        if tag in TAGS:
            return TAGS[tag].read(value)
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        raise CorruptMessageError(f"not a {tag} of a layout: {error}") from error
    raise CorruptMessageError(f"not a {str(tag)[:40]!r} of a layout: {str(value)[:40]}")


def _shared(array: Any) -> Tensor | None:
    """The memory of an existing array as a tensor, to be filled in place."""
    if not isinstance(array, np.ndarray) or array.dtype.name not in DTYPES or not array.dtype.isnative:
        return None
    in_order = array.flags.c_contiguous and min(array.strides, default=0) >= 0  # of one element it may be negative
    return torch.from_numpy(array) if in_order and array.flags.writeable else None


def _subclass(kind: Any, parts: Any, count: int, tensor_for: _TensorFor, existing: Any) -> Any:
    """A tensor made of inner tensors: the existing one, filled in place, else a new one of a class that is loaded."""
    is_like = hasattr(existing, "__tensor_flatten__") and kind_of(existing) == kind
    try:
        module, name, shape, stride, context = kind
        inner = {
            part: _decode(node, count, tensor_for, getattr(existing, part, None) if is_like else None)
            for part, node in parts
        }
        made: Any = sys.modules.get(module)
        for each in name.split("."):
            made = getattr(made, each, None)
        size = torch.Size(shape), tuple(stride)
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptMessageError(f"not a tensor of a layout: {str(kind)[:40]}: {error}") from error
    if is_like and all(getattr(existing, part, None) is tensor for part, tensor in inner.items()):
        return existing
    if not (isinstance(made, type) and issubclass(made, Tensor) and hasattr(made, "__tensor_unflatten__")):
        raise ValueError(f"there is no class {module}.{name} to make a tensor of: import it before restore")
    if context is None:
        raise ValueError(f"a {name} can only be restored in place: make one optimizer step before restore")
    return made.__tensor_unflatten__(inner, _decode(context, 0, tensor_for, None), *size)


def _key(node: Any, tensor_for: _TensorFor) -> Any:
    key = _decode(node, 0, tensor_for, None)
    try:
        hash(key)
    except TypeError as error:
        raise CorruptMessageError(f"not a key of a layout: {error}") from error
    return key


def _item(existing: Any, key: Any) -> Any:
    """The value at the same key of the existing state, if any."""
    if isinstance(existing, dict):
        return existing.get(key, _MISSING)
    if isinstance(existing, (list, tuple)) and isinstance(key, int) and key < len(existing):
        return existing[key]
    return _MISSING
