"""A state as JSON and raw bytes: a tree of plain values beside one buffer of tensors. No pickle, no torch.save.

    state  <->  Layout(tree, slices)  +  [tensor 0][padding to 64 bytes][tensor 1] ...

In the tree a tensor is a number into the slices. What JSON cannot say is tagged: floats in hexadecimal (exact), bytes
in base64, tuples, and dicts as lists of pairs, so that keys keep their types and order.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import CorruptMessageError

ALIGNMENT_BYTES = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


@dataclass(frozen=True)
class TensorSlice:
    """Where a tensor is in the payload: ``nbytes`` from ``offset``, contiguous. ``path`` is for people."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """All of a state but the bytes of its tensors. ``payload_bytes`` is the size of the buffer for those."""

    tree: Any
    slices: tuple[TensorSlice, ...]
    payload_bytes: int

    def to_bytes(self) -> bytes:
        """JSON, in ASCII."""
        slices = [asdict(item) for item in self.slices]
        content = {"tree": self.tree, "slices": slices, "payload_bytes": self.payload_bytes}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes | memoryview) -> Layout:
        """Raises CorruptMessageError for a text that is no layout, or points outside its payload."""
        try:
            content = json.loads(bytes(text))
            payload_bytes = content["payload_bytes"]
            slices = tuple(_checked(item, payload_bytes) for item in content["slices"])
            return cls(content["tree"], slices, payload_bytes)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptMessageError(f"not a layout: {type(error).__name__}: {error}") from error


def _checked(item: dict[str, Any], payload_bytes: int) -> TensorSlice:
    made = TensorSlice(str(item["path"]), item["dtype"], tuple(item["shape"]), item["offset"], item["nbytes"])
    numbers = (*made.shape, made.offset, made.nbytes, payload_bytes)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{made.path}: a length that is not a number of bytes or elements")
    if made.nbytes != math.prod(made.shape) * _DTYPES[made.dtype].itemsize:
        raise ValueError(f"{made.path}: {made.nbytes} bytes are not {made.shape} of {made.dtype}")
    if made.offset % ALIGNMENT_BYTES or made.offset + made.nbytes > payload_bytes:
        raise ValueError(f"{made.path}: bytes {made.offset} and on are not in the payload of {payload_bytes}")
    return made


def flatten(state: Any) -> tuple[Layout, list[Tensor]]:
    """Layout of a state, and its tensors in the order of the layout's slices; nothing is copied.

    The state is made of dict, list, tuple, Tensor, int, float, str, bool, None and bytes; subclasses of dict and tuple
    come back as dict and tuple. The same view of the same memory twice (tied weights) is stored once. Raises
    ValueError, with the path, for anything else.

    Example: layout, tensors = flatten({"model": model.state_dict(), "step": 7})
    """
    collected = _Collected()
    tree = _encode(state, "", collected)
    return Layout(tree, tuple(collected.slices), collected.payload_bytes), collected.tensors


@dataclass
class _Collected:
    slices: list[TensorSlice] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    payload_bytes: int = 0
    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def add(self, path: str, tensor: Tensor) -> int:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or name not in _DTYPES or tensor.device.type == "meta":
            raise ValueError(f"{path}: a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be stored")
        if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise ValueError(f"{path}: a {type(tensor).__name__} cannot be stored; give the local tensor")
        nbytes = tensor.numel() * tensor.itemsize
        flags = (tensor.is_conj(), tensor.is_neg())
        view = (tensor.device, tensor.data_ptr(), name, tuple(tensor.shape), tensor.stride(), flags)
        if nbytes and view in self.seen:
            return self.seen[view]
        offset = -(-self.payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.slices.append(TensorSlice(path, name, tuple(tensor.shape), offset, nbytes))
        self.tensors.append(tensor.detach())
        self.payload_bytes = offset + nbytes
        self.seen[view] = len(self.slices) - 1
        return len(self.slices) - 1


def _encode(value: Any, path: str, collected: _Collected) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {"tensor": collected.add(path, value)}
    if isinstance(value, dict):
        pairs = [[_encode_key(k, path), _encode(v, _join(path, k), collected)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, _join(path, i), collected) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    raise ValueError(
        f"{path or 'the state'}: a {type(value).__name__} cannot be stored; make it of dict, list, tuple, tensor, int,"
        " float, str, bool, None and bytes"
    )


def _encode_key(key: Any, path: str) -> Any:
    collected = _Collected()
    encoded = _encode(key, f"{path}, key", collected)
    if collected.slices:
        raise ValueError(f"{path or 'the state'}: a tensor cannot be a key")
    return encoded


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def view_of(buffer: memoryview, where: TensorSlice) -> Tensor:
    """The tensor of a slice, as a view of the payload: writing to one writes to the other."""
    dtype = _DTYPES[where.dtype]
    if where.nbytes == 0:
        return torch.empty(where.shape, dtype=dtype)
    count = where.nbytes // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=where.offset).view(where.shape)


def write(layout: Layout, tensors: Sequence[Tensor], buffer: memoryview) -> None:
    """Copy the tensors, from whatever device, into a payload of at least ``layout.payload_bytes`` bytes."""
    if len(buffer) < layout.payload_bytes:
        raise ValueError(f"the buffer of {len(buffer)} bytes is smaller than the payload of {layout.payload_bytes}")
    for where, tensor in zip(layout.slices, tensors, strict=True):
        view_of(buffer, where).copy_(tensor)


def views(layout: Layout, buffer: memoryview) -> list[Tensor]:
    """The tensors of a payload, without a copy. Raises CorruptMessageError if the buffer is too small."""
    if len(buffer) < layout.payload_bytes:
        raise CorruptMessageError(f"the buffer of {len(buffer)} bytes has no payload of {layout.payload_bytes}")
    return [view_of(buffer, where) for where in layout.slices]


def unflatten(layout: Layout, tensors: Sequence[Tensor]) -> Any:
    """The state, with these tensors in it. Raises CorruptMessageError for a tree that ``flatten`` did not make."""
    return _decode(layout.tree, tensors, lambda stored, _: stored, None)


def load_into(state: Any, layout: Layout, tensors: Sequence[Tensor]) -> Any:
    """The stored state, copied into the tensors of ``state`` wherever one of the same shape and dtype is in its place.

    What is stored decides what is there: keys and items that ``state`` has besides are not in the result. Other
    tensors are clones, so nothing of the result is in the buffer. Values are returned, not changed in place: take the
    result for everything that is not a tensor.

    Example: state = load_into(state, layout, views(layout, reader.payload))
    """

    def place(stored: Tensor, existing: Any) -> Tensor:
        fits = isinstance(existing, Tensor) and existing.shape == stored.shape and existing.dtype == stored.dtype
        if not fits:
            return stored.clone()
        with torch.no_grad():
            existing.copy_(stored)
        return existing

    return _decode(layout.tree, tensors, place, state)


_MISSING = object()


def _decode(node: Any, tensors: Sequence[Tensor], place: Callable[[Tensor, Any], Tensor], existing: Any) -> Any:
    if node is None or isinstance(node, (bool, int, str)):
        return node
    if isinstance(node, list):
        return [_decode(item, tensors, place, _item(existing, i)) for i, item in enumerate(node)]
    if not isinstance(node, dict) or len(node) != 1:
        raise CorruptMessageError(f"not a node of a layout: {str(node)[:40]}")
    ((tag, value),) = node.items()
    try:
        if tag == "float":
            return float.fromhex(value)
        if tag == "bytes":
            return base64.b64decode(value, validate=True)
        if tag == "tensor":
            if type(value) is not int or not 0 <= value < len(tensors):
                raise ValueError(f"no tensor {value}")
            return place(tensors[value], existing)
        if tag == "tuple":
            return tuple(_decode(item, tensors, place, _item(existing, i)) for i, item in enumerate(value))
        if tag == "dict":
            pairs = [(_decode(key, (), place, None), inner) for key, inner in value]
            return {key: _decode(inner, tensors, place, _item(existing, key)) for key, inner in pairs}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptMessageError(f"not a {tag} of a layout: {error}") from error
    raise CorruptMessageError(f"unknown tag {tag!r} in a layout")


def _item(existing: Any, key: Any) -> Any:
    """What is in the same place of the existing state, if anything."""
    if isinstance(existing, dict):
        return existing.get(key, _MISSING)
    if isinstance(existing, (list, tuple)) and isinstance(key, int) and key < len(existing):
        return existing[key]
    return _MISSING
