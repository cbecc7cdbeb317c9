"""Elias-Fano coding and the checksum on a GPU.

Elias-Fano is whole tensor operations of torch around the bitmap kernels, step for step the reference: some 15 launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.gpu_bits import pack_bits, unpack_bits
from thinwire.kernels.gpu_jit import jit, launch, num_blocks, tl
from thinwire.kernels.reference_codes import CHECKSUM_CHUNK_WORDS, elias_fano_high_bits, elias_fano_low_bits


def elias_fano_encode(positions: Tensor, size: int) -> Tensor:
    """As the reference; never waits, since the size of the code follows from the number of positions."""
    count = positions.numel()
    if count == 0:
        return positions.new_empty(0, dtype=torch.uint8)
    low_bits = elias_fano_low_bits(count, size)
    index = torch.arange(count, device=positions.device)
    gaps = positions - index
    high = pack_bits((gaps >> low_bits) + index, elias_fano_high_bits(count, size, low_bits))
    return torch.cat([_pack_integers(gaps & ((1 << low_bits) - 1), low_bits), high])


def elias_fano_decode(data: Tensor, count: int, size: int) -> Tensor:
    """As the reference. Waits for the number of ones, and to know that spare bits are zero."""
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
    """As the reference. Waits for the sum; `checksum_on_device` does not."""
    return int(checksum_on_device(buffer)) % 2**64


def checksum_on_device(buffer: Tensor) -> Tensor:
    """The 64 bits of `checksum` as int64 [], on the device."""
    aligned = buffer.is_contiguous() and buffer.data_ptr() % 8 == 0 and buffer.storage_offset() % 8 == 0
    words = (buffer if aligned else buffer.clone(memory_format=torch.contiguous_format)).view(torch.int64)
    sums = torch.empty(num_blocks(words.numel(), CHECKSUM_CHUNK_WORDS), dtype=torch.int64, device=buffer.device)
    launch(_weigh_chunk, sums.numel(), words, words, sums, words.numel(), CHECKSUM_CHUNK_WORDS)
    return sums.sum()


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
def _weigh_chunk(words, sums, num_words, CHUNK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(sums + chunk, tl.sum(tl.load(words + place, mask=place < num_words, other=0), axis=0) * (2 * chunk + 1))
