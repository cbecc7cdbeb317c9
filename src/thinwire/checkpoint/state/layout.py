"""A state as JSON and raw bytes: a tree of plain values beside one buffer of tensors. No pickle, no torch.save.

    state  <->  Layout(tree, slices)  +  [tensor 0][padding to 64 bytes][tensor 1] ...

In the tree a tensor is an index into the slices. Values that JSON lacks are tagged: floats in hexadecimal (exact),
bytes in base64, tuples, sets, numpy's numbers by dtype and bytes, and dicts as lists of pairs, so that keys keep their
types and order. ``encode`` makes layouts of states, ``decode`` states of layouts.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.errors import CorruptMessageError

ALIGNMENT_BYTES = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip

STORABLE = (
    "dict, list, tuple, set, tensor, numpy array or number, int, float, complex, str, bool, None, bytes, range, slice,"
    " torch.dtype, torch.device and torch.Size"
)


class Tag(NamedTuple):
    """Values that JSON lacks are stored under the name of a tag: all of ``kind``, as what ``write`` returns."""

    kind: type | tuple[type, ...]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _number(value: list[str]) -> Any:
    if not re.fullmatch(r"[<>|=][biufcmM]\d{1,2}(\[\w{1,16}\])?", value[0]):
        raise ValueError(f"{value[0]!r} is no dtype of a number")
    (made,) = np.frombuffer(bytes.fromhex(value[1]), np.dtype(value[0]))
    return made


def _complex(value: list[str]) -> complex:
    real, imag = map(float.fromhex, value)
    return complex(real, imag)


def _dtype(name: str) -> torch.dtype:
    if not isinstance(made := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"torch has no dtype {name}")
    return made


TAGS = {
    "numpy": Tag((np.number, np.bool_, np.datetime64), lambda v: [v.dtype.str, v.tobytes().hex()], _number),
    "float": Tag(float, lambda v: float(v).hex(), float.fromhex),
    "complex": Tag(complex, lambda v: [v.real.hex(), v.imag.hex()], _complex),
    "bytes": Tag(bytes, lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    "dtype": Tag(torch.dtype, lambda v: str(v).removeprefix("torch."), _dtype),
    "device": Tag(torch.device, str, lambda v: torch.device(str(v))),
}
COLLECTIONS = {
    "set": Tag(set, list, set),
    "frozenset": Tag(frozenset, list, frozenset),
    "range": Tag(range, lambda v: [v.start, v.stop, v.step], lambda items: range(*items)),
    "slice": Tag(slice, lambda v: [v.start, v.stop, v.step], lambda items: slice(*items)),
    "size": Tag(torch.Size, list, torch.Size),
}
"""Those that have items, which are stored as what they are."""


@dataclass(frozen=True)
class ShardPart:
    """A part of a tensor that several ranks hold in parts (a DTensor): the shape of the whole, and this part's offset
    in it.

    ``placements``, one for each dimension of its mesh, and ``mesh``, their names if they have any, serve to create such
    a tensor again.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    placements: tuple[str, ...] = ()
    mesh: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TensorSlice:
    """Position of a tensor in the payload: ``nbytes`` from ``offset``, contiguous. ``path`` is for people."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: ShardPart | None = None

    def to_json(self) -> dict[str, Any]:
        content = {"path": self.path, "dtype": self.dtype, "shape": self.shape}
        content |= {"offset": self.offset, "nbytes": self.nbytes}
        return content if self.part is None else {**content, "part": vars(self.part)}


@dataclass(frozen=True)
class StateLayout:
    """A state without the bytes of its tensors.

    ``payload_bytes`` is the size of the buffer for those bytes, ``about`` any JSON that identifies the state. ``codes``
    are there if the payload is coded (`thinwire.checkpoint.state.coding`). All ranks should have the slices that begin
    before ``shared_bytes`` alike.
    """

    tree: Any
    slices: tuple[TensorSlice, ...]
    payload_bytes: int
    about: dict[str, Any] = field(default_factory=dict)
    codes: tuple[tuple[int, int], ...] = ()
    shared_bytes: int = 0

    def to_bytes(self) -> bytes:
        """Return the layout as JSON, in ASCII."""
        slices = [item.to_json() for item in self.slices]
        content = {"tree": self.tree, "slices": slices, "payload_bytes": self.payload_bytes, "about": self.about}
        content |= {"codes": self.codes} if self.codes else {}
        content |= {"shared_bytes": self.shared_bytes} if self.shared_bytes else {}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes | memoryview) -> StateLayout:
        """Parse a layout. Raises CorruptMessageError for other texts, or if it points outside its payload."""
        try:
            content = json.loads(bytes(text))
            payload_bytes, about = content["payload_bytes"], content.get("about", {})
            slices = tuple(_checked(item, payload_bytes) for item in content["slices"])
            if not isinstance(about, dict):
                raise TypeError("'about' is no object")
            codes = tuple((size, crc) for size, crc in content.get("codes", ()))
            if any(type(number) is not int for code in codes for number in code):
                raise TypeError("a code without length or checksum")
            if type(shared_bytes := content.get("shared_bytes", 0)) is not int:
                raise TypeError("'shared_bytes' is no number")
            return cls(content["tree"], slices, payload_bytes, about, codes, shared_bytes)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptMessageError(f"not a layout: {type(error).__name__}: {error}") from error


def _checked(item: dict[str, Any], payload_bytes: int) -> TensorSlice:
    shape, part = tuple(item["shape"]), item.get("part")
    made = TensorSlice(
        str(item["path"]), item["dtype"], shape, item["offset"], item["nbytes"], part and _checked_part(part, shape)
    )
    numbers = (*made.shape, made.offset, made.nbytes, payload_bytes)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{made.path}: a length that is not a number of bytes or elements")
    if made.nbytes != math.prod(made.shape) * DTYPES[made.dtype].itemsize:
        raise ValueError(f"{made.path}: {made.nbytes} bytes are not {made.shape} of {made.dtype}")
    if made.offset % ALIGNMENT_BYTES or made.offset + made.nbytes > payload_bytes:
        raise ValueError(f"{made.path}: bytes {made.offset} and on are not in the payload of {payload_bytes}")
    return made


def _checked_part(item: dict[str, Any], shape: tuple[int, ...]) -> ShardPart:
    names = None if item["mesh"] is None else tuple(map(str, item["mesh"]))
    part = ShardPart(tuple(item["shape"]), tuple(item["offset"]), tuple(map(str, item["placements"])), names)
    if any(type(number) is not int or number < 0 for number in (*part.shape, *part.offset)):
        raise ValueError("a part with a length that is not a number of elements")
    bounds = zip(part.offset, shape, part.shape, strict=True)
    if any(start + length > size for start, length, size in bounds):
        raise ValueError(f"{shape} from {part.offset} on is no part of {part.shape}")
    return part


def aligned(num_bytes: int) -> int:
    """Return where the next tensor may begin."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def view_of(buffer: memoryview, where: TensorSlice, base: int = 0) -> Tensor:
    """Return the tensor of a slice, as a view of the payload from ``base`` on: writing to one writes to the other."""
    dtype = DTYPES[where.dtype]
    if where.nbytes == 0:
        return torch.empty(where.shape, dtype=dtype)
    # Of numpy, which keeps the memory mapped. Under a tensor of torch.frombuffer, release() and close() unmap it.
    memory = np.frombuffer(buffer, np.uint8, where.nbytes, where.offset - base)
    return torch.from_numpy(memory).view(dtype).view(where.shape)


def write(slices: Sequence[TensorSlice], tensors: Sequence[Tensor], buffer: memoryview) -> None:
    """Copy the tensors of these slices, from any device, into a payload. Raises ValueError if it is too small."""
    with torch.no_grad():
        for where, tensor in zip(slices, tensors, strict=True):
            view_of(buffer, where).copy_(tensor)
            reach("copy")
