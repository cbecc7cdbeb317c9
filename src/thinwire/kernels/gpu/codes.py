"""Elias-Fano coding and the checksum on a GPU.

Elias-Fano is torch operations on whole tensors around the bitmap kernels, step by step as the reference: 15 launches.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.gpu.bits import pack_bits, unpack_bits
from thinwire.kernels.gpu.jit import jit, launch, num_blocks, tl
from thinwire.kernels.reference.codes import (
    CHECKSUM_CHUNK_WORDS,
    CHECKSUM_SHIFT,
    CHECKSUM_WEIGHTS,
    elias_fano_high_bits,
    elias_fano_low_bits,
)


def elias_fano_encode(positions: Tensor, size: int) -> Tensor:
    """Encode as the reference, without waiting, since the size of the code follows from the number of positions."""
    count = positions.numel()
    if count == 0:
        return positions.new_empty(0, dtype=torch.uint8)
    low_bits = elias_fano_low_bits(count, size)
    index = torch.arange(count, device=positions.device)
    gaps = positions - index
    high = pack_bits((gaps >> low_bits) + index, elias_fano_high_bits(count, size, low_bits))
    return torch.cat([_pack_integers(gaps & ((1 << low_bits) - 1), low_bits), high])


def elias_fano_decode(data: Tensor, count: int, size: int) -> Tensor:
    """Decode as the reference, after waiting for the number of ones and the check that spare bits are zero."""
    nothing = data.new_empty(0, dtype=torch.int64)
    if count == 0:
        return nothing
    low_bits = elias_fano_low_bits(count, size)
    low_bytes = (count * low_bits + 7) // 8
    ones = unpack_bits(data[low_bytes:])
    low, spare = _unpack_integers(data[:low_bytes], count, low_bits)
    if ones.numel() != count or bool(spare.any()):
        return nothing
    index = torch.arange(count, device=data.device)
    return (((ones - index) << low_bits) | low) + index


def checksum(buffer: Tensor) -> int:
    """Return the checksum of the reference; it waits for the sum, which `checksum_on_device` does not."""
    return int(checksum_on_device(buffer)) % 2**64


def checksum_on_device(buffer: Tensor) -> Tensor:
    """Return the 64 bits of `checksum` as int64 [], on the device."""
    aligned = buffer.is_contiguous() and buffer.data_ptr() % 8 == 0 and buffer.storage_offset() % 8 == 0
    words = (buffer if aligned else buffer.clone(memory_format=torch.contiguous_format)).view(torch.int64)
    while words.numel() > 1:
        combined = words.new_empty(num_blocks(words.numel(), CHECKSUM_CHUNK_WORDS))
        weights = _weights(buffer.device)
        launch(
            _combine_chunk, combined.numel(), words, words, weights, combined, words.numel(),
            CHECKSUM_SHIFT, CHECKSUM_CHUNK_WORDS,
        )  # fmt: skip
        words = combined
    return words.sum()  # of one word or none


@cache
def _weights(device: torch.device) -> Tensor:
    return torch.from_numpy(CHECKSUM_WEIGHTS.view(np.int64)).to(device)


def _pack_integers(values: Tensor, bits: int) -> Tensor:
    whole, rest = divmod(bits, 8)
    eights = values.new_zeros(-(-values.numel() // 8), 8)
    eights.view(-1)[: values.numel()] = values & ((1 << rest) - 1)
    words = (eights << _shifts(rest, values)).sum(1)  # bits are apart, so their sum is their union
    stream = _bytes(words)[:, :rest].reshape(-1)[: (values.numel() * rest + 7) // 8]
    return torch.cat([stream, _bytes(values >> rest)[:, :whole].reshape(-1)]) if whole else stream


def _unpack_integers(data: Tensor, count: int, bits: int) -> tuple[Tensor, Tensor]:
    whole, rest = divmod(bits, 8)
    stream = (count * rest + 7) // 8
    num_eights = -(-count // 8)
    padded = data.new_zeros(num_eights * rest)
    padded[:stream] = data[:stream]
    words = data.new_zeros(num_eights, 8)
    words[:, :rest] = padded.view(num_eights, rest)
    whole_words = words.view(torch.int64)
    eights = (whole_words >> _shifts(rest, whole_words)) & ((1 << rest) - 1)
    values, spare = eights.view(-1)[:count], eights.view(-1)[count:]
    if whole:
        above = data.new_zeros(count, 8)
        above[:, :whole] = data[stream:].view(count, whole)
        values = values | (above.view(torch.int64).view(-1) << rest)
    return values, spare


def _shifts(bits: int, like: Tensor) -> Tensor:
    return bits * torch.arange(8, device=like.device)


def _bytes(words: Tensor) -> Tensor:
    return words.view(torch.uint8).view(-1, 8)


@jit
def _combine_chunk(words, weights, combined, num_words, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Combine a chunk in int64, which gives the bits of uint64 once the sign that a shift copies is masked."""
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK)
    word = tl.load(words + chunk * CHUNK + place, mask=chunk * CHUNK + place < num_words, other=0)
    folded = word ^ ((word >> SHIFT) & ((1 << (64 - SHIFT)) - 1))
    tl.store(combined + chunk, tl.sum(folded * tl.load(weights + place), axis=0))
