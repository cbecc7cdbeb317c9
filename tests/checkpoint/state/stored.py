"""States that are stored and loaded."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.uint16,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return (
        tensor.resolve_conj()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        alike = isinstance(right, Tensor) and left.dtype == right.dtype and left.shape == right.shape
        return alike and bits(left) == bits(right)
    if isinstance(left, (np.ndarray, np.generic)):
        alike = type(left) is type(right) and left.dtype == right.dtype and left.shape == right.shape
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, complex):
        return type(right) is complex and all(map(same, (left.real, left.imag), (right.real, right.imag)))
    if isinstance(left, float):
        return type(right) is float and struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return type(right) is dict and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def any_number(draw: st.DrawFn, kinds: str = "bBhHiIlLefdFD?M") -> np.generic:
    dtype = np.dtype("M8[us]" if (kind := draw(st.sampled_from(kinds))) == "M" else kind)
    raw = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    (number,) = np.frombuffer(bytes(byte & 1 for byte in raw) if kind == "?" else raw, dtype)
    return number


@st.composite
def any_array(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    number = draw(any_number("bhilBHILefdFD?"))
    array = np.full(shape, number)
    array.flags.writeable = draw(st.booleans())
    return array.T if draw(st.booleans()) else array[..., ::-1] if shape else array


keys = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), any_number("bhilBHIL?"),
    st.tuples(st.integers() | st.booleans() | st.floats(allow_nan=False), st.text()),
)  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8),
    any_tensor(), any_number(), any_array(), st.complex_numbers(allow_nan=False), st.sets(keys, max_size=3),
    st.frozensets(keys, max_size=3), st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(slice, st.none() | st.integers(), st.integers()), st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3)]), st.lists(st.integers(0, 9)).map(torch.Size),
)  # fmt: skip
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def items(state: Any) -> list[Any]:
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [state, *(item for value in inner for item in items(value))]


def is_copied(value: Any) -> bool:
    if not isinstance(value, np.ndarray):
        return False
    return not (value.flags.c_contiguous and value.flags.writeable) or min(value.strides, default=0) < 0
