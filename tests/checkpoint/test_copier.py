"""What a slot holds is one state: what may change at once is copied at once, and the rest is watched until it is."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fake_device import FakeDevice
from thinwire.checkpoint.copier import LATER_BYTES, Copier, SlotStaging, Target, fills
from thinwire.checkpoint.holder.version import CHUNK_BYTES
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.encode import StateEncoder, flatten
from thinwire.checkpoint.state.layout import StateLayout, aligned, write

LARGE = LATER_BYTES // 4  # elements of float32


def payload_of(state: object) -> bytes:
    layout, tensors = flatten(state)
    payload = bytearray(layout.payload_bytes)
    write(layout.slices, tensors, memoryview(payload))
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

    def take(offset: int, data: np.ndarray) -> None:
        payload[offset : offset + len(data)] = torch.from_numpy(data)

    staging.copy([(item.offset, t) for item, t in zip(layout.slices, tensors, strict=True)], written, take)
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
        copy = copier.begin(encoder.encode(state), Target(memoryview(slot)))
        assert bool(copy._later or copy._downloads) is later
        if not later:
            state["small"].zero_()
        assert copy.finish()
        assert bytes(slot[: len(expected)]) == expected
        assert copy.seconds > 0


def test_a_state_that_is_written_to_while_it_is_copied_is_none() -> None:
    copier, state, slot = begun()
    copy = copier.begin(StateEncoder().encode(state), Target(memoryview(slot)))
    state["large"].add_(1)
    assert not copy.finish()
    with torch.inference_mode():  # has no versions to compare
        state["large"] = torch.randn(LARGE)
    expected = payload_of(state)
    copy = copier.begin(StateEncoder().encode(state), Target(memoryview(slot)))
    state["large"] = torch.zeros(LARGE)
    assert copy.finish()
    assert bytes(slot[: len(expected)]) == expected


def test_data_that_is_exchanged_while_it_is_copied_does_not_get_in() -> None:
    """As code does that evaluates averaged weights; torch does not count it."""
    copier, state, slot = begun()
    expected, weights = payload_of(state), state["large"].data
    copy = copier.begin(StateEncoder().encode(state), Target(memoryview(slot)))
    state["large"].data = torch.zeros(LARGE)
    assert copy.finish()
    assert bytes(slot[: len(expected)]) == expected
    state["large"].data = weights


def test_a_slot_that_is_too_small_is_refused() -> None:
    copier, state, _ = begun()
    with pytest.raises(ValueError, match="a slot of 9 bytes"):
        copier.begin(StateEncoder().encode(state), Target(memoryview(bytearray(9))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float8_e5m2, torch.complex128, torch.int64])
def test_copies_without_a_lock_are_bit_for_bit(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype).t()
    encoded = StateEncoder().encode([source])
    buffer = memoryview(bytearray(encoded.payload_bytes))
    assert Copier(lambda where, tensor: False).begin(encoded, Target(buffer)).finish()
    back = tensors_of(StateLayout.from_bytes(encoded.to_bytes()), buffer)[0]
    assert back.view(torch.uint8).equal(source.contiguous().view(torch.uint8))


def state_of(sizes: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return {
        f"{'own' if number % 3 == 2 else 'alike'} {number}": torch.randint(
            0, 256, (size,), dtype=torch.uint8, generator=generator
        )
        for number, size in enumerate(sizes)
    }


SIZES = st.lists(
    st.one_of(st.integers(0, 200), st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 70])), max_size=6
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 4), st.data())
def test_ranks_of_a_host_write_a_state_once_and_each_digests_all_of_its_own(
    sizes: list[int], ranks: int, data: st.DataObject
) -> None:
    """Whatever is copied at once or later. Digests are those of the bytes as they lie in the slot, gaps included; and
    one bit that is other on one rank, wherever it is, changes that rank's."""
    state = state_of(sizes)
    whole, replicated = payload_of(dict(sorted(state.items()))), lambda path, tensor: path.startswith("alike")
    later = {name for name in state if data.draw(st.booleans())}
    encoded = StateEncoder(replicated).encode(dict(sorted(state.items())))
    shared, base = encoded.shared_bytes, aligned(encoded.shared_bytes)
    chunks = -(-shared // CHUNK_BYTES)
    common = bytearray(b"\xff" * shared)
    expected = tuple(zlib.crc32(whole[i : min(i + CHUNK_BYTES, shared)]) for i in range(0, shared, CHUNK_BYTES))
    for rank in range(ranks):
        own = bytearray(b"\xff" * (encoded.payload_bytes - base if encoded.payload_bytes > base else 0))
        bounds = (chunks * rank // ranks * CHUNK_BYTES, chunks * (rank + 1) // ranks * CHUNK_BYTES)
        copier = Copier(lambda where, tensor: where.path in later)
        copy = copier.begin(encoded, Target(memoryview(own), memoryview(common), *bounds))
        assert copy.finish()
        assert copy.crcs == expected
        assert bytes(own) == whole[base:]
    assert bytes(common) == whole[:shared]
    alone = bytearray(encoded.payload_bytes)
    copy = Copier(lambda where, tensor: where.path in later).begin(encoded, Target(memoryview(alone)))
    assert (copy.finish(), copy.crcs, bytes(alone)) == (True, expected, whole)
    flipped = [name for name, tensor in state.items() if name.startswith("alike") and tensor.numel()]
    if flipped:
        state[data.draw(st.sampled_from(flipped))][data.draw(st.integers(0, 0))] ^= 1 << data.draw(st.integers(0, 7))
        other = Copier(lambda where, tensor: where.path in later)
        again = other.begin(encoded, Target(memoryview(own), memoryview(common), *bounds))
        assert again.finish()
        assert again.crcs != expected


def test_a_tensor_between_two_that_are_copied_before_it_has_its_digest() -> None:
    state = {name: torch.full((size,), 7, dtype=torch.uint8) for name, size in (("a", 64), ("b", 10), ("c", 64))}
    encoded = StateEncoder(lambda path, tensor: True).encode(state)
    payload = bytearray(encoded.payload_bytes)
    copy = Copier(lambda where, tensor: where.path == "b").begin(encoded, Target(memoryview(payload)))
    assert copy.finish()
    assert copy.crcs == (zlib.crc32(payload),)
