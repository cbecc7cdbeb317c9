"""The code of floats: every bit comes back, nothing grows, and what is malformed is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import float_codes
from tests.rows.kinds import SIZES, bytes_of, every_dtype, kinds
from thinwire import kernels
from thinwire.errors import CorruptMessageError, MissingPackageError
from thinwire.kernels import dispatch
from thinwire.rows import floats
from thinwire.rows.floats import CHUNK_VALUES, bits_per_value, decode, encode


def check_round_trip(values: Tensor) -> Tensor:
    message = encode(values)
    assert message.dtype == torch.uint8
    assert message.numel() <= values.nbytes, "a code is never larger"
    out = torch.full_like(values, 7)
    decode(message, out)
    assert torch.equal(bytes_of(out), bytes_of(values))
    return message


@every_dtype
@pytest.mark.parametrize("size", SIZES)
def test_every_bit_comes_back(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for values in kinds(size, dtype, generator).values():
        check_round_trip(values)


@every_dtype
@settings(max_examples=min(40, settings.default.max_examples), deadline=None)
@given(size=st.integers(0, 3000), seed=st.integers(0, 1 << 30))
def test_every_bit_comes_back_of_any_size(dtype: torch.dtype, size: int, seed: int) -> None:
    values = kinds(size, dtype, torch.Generator().manual_seed(seed))
    for name in sorted(values)[seed % 4 :: 4]:
        check_round_trip(values[name])


@every_dtype
def test_slices_at_boundaries_of_chunks_are_parts_of_the_code(dtype: torch.dtype) -> None:
    values = torch.randn(3 * CHUNK_VALUES + 5000).to(dtype)
    parts = [encode(values[:CHUNK_VALUES]), encode(values[CHUNK_VALUES:])]
    assert torch.equal(torch.cat(parts), encode(values))


def test_gradients_are_close_to_their_entropy() -> None:
    """Of bfloat16 within 4 % of 8 bits and the entropy of exponents; of float32 with zero low bits as many bits."""
    values = torch.randn(4 * CHUNK_VALUES).bfloat16()
    counts = (values.view(torch.int16) >> 7 & 255).bincount().double() / values.numel()
    ideal = 8 - float((counts * counts.clamp(min=1e-30).log2()).sum())
    for same in (values, values.float()):
        assert 8 * check_round_trip(same).numel() / values.numel() < 1.04 * ideal


@every_dtype
def test_bits_are_estimated_within_two_percent(dtype: torch.dtype) -> None:
    """Of what is alike everywhere."""
    generator = torch.Generator().manual_seed(0)
    for name, values in kinds(8 * CHUNK_VALUES, dtype, generator).items():
        if name not in ("sorted", "zeros", "negative zeros", "constant", "one of another kind"):
            exact = 8 * encode(values).numel() / values.numel()
            assert bits_per_value(values) == pytest.approx(exact, rel=0.02), name


@pytest.mark.parametrize("columns", [128, 1024, 144, 768])
def test_the_sample_sees_all_columns(columns: int) -> None:
    """Where the first columns of every 128 or 144 are zero, such as those of features that do not occur."""
    values = torch.randn(4 * CHUNK_VALUES // columns, columns)
    values[:, torch.arange(columns) % (144 if columns == 144 else 128) < 16] = 0.0
    values = values.bfloat16()
    exact = 8 * check_round_trip(values).numel() / values.numel()
    assert exact < 11.5
    assert bits_per_value(values) == pytest.approx(exact, rel=0.03)


def test_the_shape_does_not_matter() -> None:
    values = torch.randn(40, 50, requires_grad=True)
    assert torch.equal(encode(values), encode(values.reshape(-1)))
    out = torch.empty(50, 40)
    decode(encode(values), out)
    assert torch.equal(out.view(40, 50), values)
    decode(encode(torch.tensor(3.0)), scalar := torch.tensor(0.0))
    assert scalar == 3.0
    assert encode(torch.empty(0, 3)).shape == (0,)
    assert bits_per_value(torch.empty(0)) == 0.0


def test_what_cannot_be_coded_is_refused() -> None:
    for values in (torch.ones(4, 4).t()[1:], torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.complex64)):
        for call in (encode, bits_per_value, lambda out: decode(torch.zeros(1, dtype=torch.uint8), out)):
            with pytest.raises(ValueError, match="expected contiguous values of a float dtype"):
                call(values)


def decodes(message: Tensor, out: Tensor) -> bool:
    try:
        decode(message, out)
    except CorruptMessageError:
        return False
    return True


@every_dtype
def test_every_truncation_is_refused(dtype: torch.dtype) -> None:
    for values in kinds(1500, dtype, torch.Generator().manual_seed(1)).values():
        message, out = encode(values), torch.empty_like(values)
        for size in (*range(0, message.numel(), 41), message.numel() - 1):
            assert not decodes(message[:size], out)
        longer = torch.cat([message, message[:3]])
        assert not decodes(longer, out)


@every_dtype
@settings(max_examples=min(30, settings.default.max_examples), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_changed_bits_are_refused_or_give_other_values(dtype: torch.dtype, seed: int) -> None:
    """And nothing else is written to than the values."""
    generator = torch.Generator().manual_seed(seed)
    values = kinds(1 + seed % 2500, dtype, generator)
    for name in sorted(values)[seed % 3 :: 3]:
        message = encode(values[name]).clone()
        for place in torch.randint(0, message.numel(), (3,), generator=generator).tolist():
            message[place if seed % 2 else place % 30 % message.numel()] ^= 1 << seed % 8
        guarded = torch.full((values[name].numel() + 128,), 3.0, dtype=dtype)
        decodes(message, guarded[64:-64])
        assert (guarded[:64] == 3).all()
        assert (guarded[-64:] == 3).all()


def test_a_code_is_read_into_memory_of_any_address() -> None:
    values = torch.randn(5000).bfloat16().float()
    out = torch.frombuffer(bytearray(values.nbytes + 1), dtype=torch.float32, offset=1)
    decode(encode(values), out)
    assert torch.equal(out, values)


def test_other_tensors_are_refused() -> None:
    message = encode(torch.randn(5000).bfloat16())
    for out in (
        torch.empty(4999, dtype=torch.bfloat16),
        torch.empty(70000, dtype=torch.bfloat16),
        torch.empty(5000).double(),
    ):
        assert not decodes(message, out)
    assert not decodes(torch.zeros(3, dtype=torch.uint8), torch.empty(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("twin", [decodes, float_codes.decode_floats])
def test_positions_that_do_not_increase_are_refused(twin: Callable[[Tensor, Tensor], bool]) -> None:
    """Of two patches of one value the last one would count, or either, where they are written side by side."""
    values = torch.randn(2000).bfloat16().float()
    values[:1900:100] *= 2.0**60  # too few for the window
    values[50:1900:100] += 2.0**-20
    message, out = encode(values), torch.empty_like(values)
    patches, lows = message[8:12].view(torch.int16).tolist()
    assert patches == 19
    assert lows > 5
    streams = 20 + 2 * 2 + int(message[20:24].view(torch.int16).sum())
    assert twin(message, out)
    for start in (streams, streams + 4 * patches):
        for one, other in ((0, 1), (3, 2)):
            changed = message.clone()
            changed[start + 2 * one : start + 2 * one + 2] = message[start + 2 * other : start + 2 * other + 2]
            assert not twin(changed, out)


def test_without_compiled_kernels_values_are_their_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have coded cannot be read, and the error says what to install."""
    values = torch.randn(5000).bfloat16().float()
    coded, out = encode(values), torch.empty_like(values)
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    assert torch.equal(encode(values), bytes_of(values))
    assert bits_per_value(values) == 32.0
    decode(encode(values), out)
    assert torch.equal(out, values)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[cpu\]' in a checkout"):
        decode(coded, out)


def test_a_code_that_comes_before_kernels_are_compiled_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5000).bfloat16().float()
    coded, out, ready = encode(values), torch.empty_like(values), []
    monkeypatch.setattr(dispatch, "is_compiled", lambda name: bool(ready))
    monkeypatch.setattr(kernels, "warm_up", lambda: ready.append(True))
    assert encode(values).numel() == values.nbytes
    decode(coded, out)
    assert torch.equal(out, values)


def test_nothing_is_coded_before_it_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled one after the other: a rank that can code would be taken for one that can read codes."""
    values = torch.randn(5000).bfloat16().float()
    coded, out, ready = encode(values), torch.empty_like(values), []
    monkeypatch.setattr(dispatch, "is_compiled", lambda name: name == "encode_floats" or bool(ready))
    monkeypatch.setattr(kernels, "warm_up", lambda: ready.append(True))
    assert encode(values).numel() == values.nbytes
    assert not floats.is_compiled()
    decode(coded, out)
    assert torch.equal(out, values)
    assert ready
