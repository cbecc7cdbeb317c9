"""A payload of codes gives every bit back, or an error; slots never need more room for it."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoint.state.states import load_into
from thinwire.checkpoint.state import coding
from thinwire.checkpoint.state.coding import pack, pieces_of, tensors_of
from thinwire.checkpoint.state.encode import Encoded, StateEncoder
from thinwire.checkpoint.state.layout import DTYPES, StateLayout, aligned, view_of, write
from thinwire.errors import CorruptMessageError, MissingPackageError
from thinwire.kernels import dispatch
from thinwire.rows import floats

ODD = 3 * floats.CHUNK_VALUES + 77


def _deflate(values: Tensor) -> Tensor:
    raw = values.reshape(-1).view(torch.uint8)
    code = torch.from_numpy(np.frombuffer(bytearray(zlib.compress(raw.numpy().tobytes(), 1)), np.uint8))
    return code if code.numel() < raw.numel() else raw


def _inflate(message: Tensor, out: Tensor) -> None:
    try:
        found = zlib.decompress(message.numpy().tobytes())
    except zlib.error as error:
        raise CorruptMessageError(str(error)) from error
    if len(found) != out.nbytes:
        raise CorruptMessageError("another length")
    out.view(torch.uint8).copy_(torch.from_numpy(np.frombuffer(bytearray(found), np.uint8)))


@pytest.fixture(params=["floats", "another"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The code of the house, and one with lengths of all kinds."""
    if request.param == "another":
        monkeypatch.setattr(floats, "encode", _deflate)
        monkeypatch.setattr(floats, "decode", _inflate)
    return request.param


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "PIECE_VALUES", floats.CHUNK_VALUES)


def _state(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), generator=draw, dtype=torch.int64).to(torch.int32)
    weight = torch.randn(ODD, generator=draw)
    return {
        "any bits": bits.view(torch.float32),  # NaN with payloads, inf, subnormals
        "weight": weight,
        "tied": weight,
        "half": torch.randn(ODD, generator=draw).bfloat16(),
        "zeros": torch.zeros(2000, dtype=torch.float64),
        "minus": -torch.zeros(1500, dtype=torch.float16),
        "short": torch.randn(7, generator=draw),
        "number": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "ids": torch.arange(40_000),
        "flags": torch.ones(3000, dtype=torch.bool),
        "complex": torch.randn(900, generator=draw, dtype=torch.complex64).conj(),
        "turned": torch.randn(70, 50, generator=draw).t(),
        "step": seed,
    }


def _coded(state: Any, replicated: Any = lambda path, tensor: False) -> tuple[Encoded, StateLayout, bytearray, Any]:
    encoded = StateEncoder(replicated).encode(state)
    slot = bytearray(encoded.payload_bytes)
    for where, tensor in zip(encoded.slices, encoded.tensors, strict=True):
        view_of(memoryview(slot), where).copy_(tensor)
    codes = pack(encoded, memoryview(slot))
    return encoded, StateLayout.from_bytes(encoded.to_bytes({}, codes.pieces)), slot[: codes.payload_bytes], codes


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_without_numba_a_coded_version_is_an_error_and_an_uncoded_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layout, payload, _ = _coded(_state(1))
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    with pytest.raises(MissingPackageError, match=r"arrived or was stored takes compiled kernels.*pip install"):
        list(tensors_of(layout, memoryview(payload)))
    encoded, layout, payload, codes = _coded(_state(1))
    assert codes.payload_bytes == sum(where.nbytes for where in encoded.slices)
    for found, tensor in zip(tensors_of(layout, memoryview(payload)), encoded.tensors, strict=True):
        assert _bits(found) == _bits(tensor)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_bit_comes_back(code: str, seed: int) -> None:
    encoded, layout, payload, codes = _coded(_state(seed))
    assert len(payload) <= encoded.payload_bytes
    tensors = tensors_of(layout, memoryview(payload))
    assert len(tensors) == len(encoded.slices)
    for where, tensor, original in zip(layout.slices, tensors, encoded.tensors, strict=True):
        assert tensor.dtype is DTYPES[where.dtype]
        assert tensor.shape == original.shape
        assert _bits(tensor) == _bits(original), where.path
    loaded = load_into(_state(seed + 1), layout, tensors)
    assert loaded["step"] == seed
    assert all(_bits(loaded[name]) == _bits(value) for name, value in _state(seed).items() if isinstance(value, Tensor))
    coded = {number for (number, _, nbytes), (size, _) in zip(pieces_of(layout.slices), codes.pieces, strict=True)
             if size < nbytes}  # fmt: skip
    paths = {layout.slices[number].path for number in coded}
    assert not paths & {"ids", "flags", "complex", "short", "number", "any bits"}
    if code == "another":
        assert paths >= {"zeros", "minus", "half"}
        assert len(payload) < 0.97 * encoded.payload_bytes


def test_pieces_cover_each_tensor_once() -> None:
    encoded = StateEncoder(lambda path, tensor: path == "half").encode(_state(1))
    covered = dict.fromkeys(range(len(encoded.slices)), 0)
    begun = -1
    for number, start, nbytes in pieces_of(encoded.slices):
        where = encoded.slices[number]
        assert start == covered[number]
        assert begun < where.offset + start, "pieces are in the order of the payload"
        begun, covered[number] = where.offset + start, start + nbytes
    assert covered == {number: where.nbytes for number, where in enumerate(encoded.slices)}


def test_what_ranks_have_in_common_stays_as_it_is(code: str) -> None:
    del code
    encoded = StateEncoder(lambda path, _: path == "weight").encode({**_state(1), "tied": None})
    base, payload = aligned(encoded.shared_bytes), bytearray(encoded.payload_bytes)
    write(encoded.slices, encoded.tensors, memoryview(payload))
    common, rest = bytes(payload[: encoded.shared_bytes]), payload[base:]
    codes = pack(encoded, memoryview(rest), base)
    layout = StateLayout.from_bytes(encoded.to_bytes(codes=codes.pieces))
    back = tensors_of(layout, memoryview(rest)[: codes.payload_bytes], memoryview(bytearray(common)))
    for one, other in zip(back, encoded.tensors, strict=True):
        assert _bits(one) == _bits(other)
    with pytest.raises(CorruptMessageError, match="in common with other ranks, expected"):
        tensors_of(layout, memoryview(rest), memoryview(bytearray(common))[1:])


def test_altered_bytes_are_an_error_or_mean_the_same(code: str) -> None:
    """Also where the digests of the holder would not have told: in a codec that goes wrong."""
    del code
    encoded, layout, payload, _ = _coded(_state(3))
    draw, refused = random.Random(4), 0
    for _ in range(60):
        altered = bytearray(payload)
        altered[draw.randrange(len(payload))] ^= 1 << draw.randrange(8)
        tensors = tensors_of(layout, memoryview(altered))
        try:
            found = [_bits(tensor) for tensor in tensors]
        except CorruptMessageError:
            refused += 1
        else:
            assert found == [_bits(tensor) for tensor in encoded.tensors]
    assert refused > 50


def test_a_layout_with_codes_of_anything_else_is_refused() -> None:
    _, layout, payload, _ = _coded(_state(5))
    assert StateLayout.from_bytes(layout.to_bytes()) == layout
    first, *rest = layout.codes
    for codes in (
        layout.codes[:-1], (*layout.codes, first), ((0, 1), *rest), ((-first[0], 1), *rest),
        ((first[0] + 1, 1), *rest), tuple((2 * size, crc) for size, crc in layout.codes),
    ):  # fmt: skip
        with pytest.raises(CorruptMessageError, match="codes"):
            tensors_of(dataclasses.replace(layout, codes=codes), memoryview(payload))
    with pytest.raises(CorruptMessageError, match="codes"):
        tensors_of(layout, memoryview(payload)[:-1])
    content = json.loads(layout.to_bytes())
    for codes in ([[1]], [[1, 2, 3]], [["1", 2]], [[True, 2]], [[1.5, 2]], 7, [7], {"a": 1}):
        with pytest.raises(CorruptMessageError, match="not a layout"):
            StateLayout.from_bytes(json.dumps({**content, "codes": codes}).encode())
