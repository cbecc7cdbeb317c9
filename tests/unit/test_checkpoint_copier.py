"""What a slot holds is one state: what may change at once is copied at once, and the rest is watched until it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_staging import FakeDevice
from torch import Tensor

from thinwire.checkpoint.copier import LATER_BYTES, Copier, SlotStaging, copy_bytes, fills
from thinwire.checkpoint.state.encode import StateEncoder, flatten
from thinwire.checkpoint.state.layout import view_of, views, write

LARGE = LATER_BYTES // 4  # elements of float32


def payload_of(state: object) -> bytes:
    layout, tensors = flatten(state)
    payload = bytearray(layout.payload_bytes)
    write(layout, tensors, memoryview(payload))
    return bytes(payload)


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1, 70))
def test_sub_buffers_take_all_bytes_once_and_no_more_than_fits(sizes: list[int], sub_buffer_bytes: int) -> None:
    tensors = [(1000 * number, torch.empty(size, dtype=torch.uint8)) for number, size in enumerate(sizes)]
    taken = list(fills(tensors, sub_buffer_bytes))
    assert all(piece.source.numel() > 0 and piece.end <= sub_buffer_bytes for pieces in taken for piece in pieces)
    assert len(taken) == math.ceil(sum(sizes) / sub_buffer_bytes)
    where = [piece.offset + i for pieces in taken for piece in pieces for i in range(piece.source.numel())]
    assert where == [offset + i for offset, tensor in tensors for i in range(tensor.numel())]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=7), st.integers(1, 100), st.integers(1, 4))
def test_bytes_of_a_device_arrive_through_the_ring(sizes: list[int], sub_buffer_bytes: int, count: int) -> None:
    """Each waits for its own copy: the device here delivers garbage to whoever does not."""
    device = FakeDevice()
    staging = SlotStaging(device, sub_buffer_bytes, count)
    state = {str(number): torch.randn(size)[::2] for number, size in enumerate(sizes)}
    layout, tensors = flatten(state)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    written = staging.record()
    staging.copy([(item.offset, t) for item, t in zip(layout.slices, tensors, strict=True)], written, payload)
    assert payload.numpy().tobytes() == payload_of(state)
    assert device.log.count(f"pin {sub_buffer_bytes}") == count
    assert "wait for training" in device.log


def begun(later: bool = True) -> tuple[Copier, dict[str, Tensor], bytearray]:
    state = {"large": torch.randn(LARGE), "small": torch.randn(10), "turned": torch.randn(LARGE // 8, 8).t()}
    return Copier(lambda where, tensor: later), state, bytearray(1 << 20)


@pytest.mark.parametrize("later", [False, True])
def test_what_is_copied_is_the_state(later: bool) -> None:
    copier, state, slot = begun(later)
    encoder = StateEncoder()
    for _ in range(3):  # the views of the slot are kept
        for tensor in state.values():
            tensor.normal_()
        expected = payload_of(state)
        copy = copier.begin(encoder.encode(state), memoryview(slot), "slot")
        assert copy.is_done is not later
        state["small"].zero_()
        assert copy.finish()
        assert bytes(slot[: len(expected)]) == expected
        assert copy.seconds > 0


def test_a_state_that_is_written_to_while_it_is_copied_is_none() -> None:
    copier, state, slot = begun()
    copy = copier.begin(StateEncoder().encode(state), memoryview(slot), "slot")
    state["large"].add_(1)
    assert not copy.finish()
    with torch.inference_mode():  # has no versions to compare
        state["large"] = torch.randn(LARGE)
    expected = payload_of(state)
    copy = copier.begin(StateEncoder().encode(state), memoryview(slot), "slot")
    state["large"] = torch.zeros(LARGE)
    assert copy.finish()
    assert bytes(slot[: len(expected)]) == expected


def test_data_that_is_exchanged_while_it_is_copied_does_not_get_in() -> None:
    """As code does that evaluates averaged weights; torch does not count it."""
    copier, state, slot = begun()
    expected, weights = payload_of(state), state["large"].data
    copy = copier.begin(StateEncoder().encode(state), memoryview(slot), "slot")
    state["large"].data = torch.zeros(LARGE)
    assert copy.finish()
    assert bytes(slot[: len(expected)]) == expected
    state["large"].data = weights


def test_a_slot_that_is_too_small_is_refused() -> None:
    copier, state, _ = begun()
    with pytest.raises(ValueError, match="a slot of 9 bytes"):
        copier.begin(StateEncoder().encode(state), memoryview(bytearray(9)), "slot")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float8_e5m2, torch.complex128, torch.int64])
def test_copies_without_a_lock_are_bit_for_bit(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype).t()
    layout, _ = flatten([source])
    buffer = memoryview(bytearray(layout.payload_bytes))
    copy_bytes(view_of(buffer, layout.slices[0]), source)
    assert views(layout, buffer)[0].view(torch.uint8).equal(source.contiguous().view(torch.uint8))
