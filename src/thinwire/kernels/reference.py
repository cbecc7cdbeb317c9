"""Every kernel in plain torch and numpy: the definition of correct, for CPU tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

_ROW_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_CHECKSUM_CHUNK_WORDS = 512
_DENSE_BITS_PER_POSITION = 32  # below, a byte for each bit is faster than to group positions by byte
_DENSE_BYTES_PER_OCCUPIED = 8  # the same, for unpacking; it bounds the memory too
_UINT32_MASK = 0xFFFFFFFF
_ACCUMULATE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def nonzero_rows(dense: Tensor) -> Tensor:
    """Ids of the rows of ``dense`` [num_rows, width] that hold any non-zero bit, as sorted int64 [k].

    Rows are compared as integers, so nan, inf and denormals count, and a row of negative zeros counts too:
    that costs bytes and never a value. One pass over the memory: 7 ms for 82 MB on one core, where
    ``(dense != 0).any(1)`` takes 29 ms.
    """
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    row_bytes = dense.shape[1] * dense.element_size()
    start_bytes = dense.storage_offset() * dense.element_size()
    word = next(dtype for size, dtype in _ROW_WORDS if row_bytes % size == 0 and start_bytes % size == 0)
    words = dense.view(word)
    if words.shape[1] == 1:
        return words.flatten().nonzero().flatten()
    low, high = words.aminmax(dim=1)
    return (low != 0).logical_or_(high != 0).nonzero().flatten()


def sum_rows(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sum pieces of (ids int64 [k_i], values [k_i, width]) by id, in the order given.

    Ids of one piece may repeat and be unsorted. Returns (sorted unique ids [u], values [u, width]) in the
    dtype of the pieces. Sixteen-bit values are summed in float32 and rounded once, and ``scale`` is
    applied before that rounding. The order of additions is the order of the pieces, so equal inputs give
    equal bits on every rank and in every run.
    """
    values = pieces[0][1]
    ids, places = torch.unique(torch.cat([ids for ids, _ in pieces]), return_inverse=True)
    placed = zip(places.split([piece.numel() for piece, _ in pieces]), (values for _, values in pieces), strict=True)
    return ids, sum_rows_at(placed, ids.numel(), values.shape[1], values.dtype, scale)


def sum_rows_at(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """The second half of `sum_rows`, for pieces of (places int64 [k_i] in the sum, values [k_i, width]).

    Pieces are taken from the iterable one by one, so that they can still be arriving. Returns [num_rows, width].
    """
    total = torch.zeros(num_rows, width, dtype=_ACCUMULATE.get(dtype, dtype))
    for places, values in pieces:
        total.index_add_(0, places, values.to(total.dtype))
    if scale != 1.0:
        total.mul_(scale)
    return total.to(dtype)


def pack_bits(positions: Tensor, size: int) -> Tensor:
    """Bitmap of ``size`` bits, least significant first, with ones at the sorted unique ``positions``.

    Returns uint8 [ceil(size / 8)]. Work and memory are proportional to the positions, not to the size. One million
    positions at a density of 46 % take 1.3 ms by a byte for each bit, 20 ms by groups of equal bytes.
    """
    where = positions.numpy()
    if size <= _DENSE_BITS_PER_POSITION * where.size:
        flags = np.zeros(size, dtype=np.uint8)
        flags[where] = 1
        return torch.from_numpy(np.packbits(flags, bitorder="little"))
    bitmap = np.zeros((size + 7) // 8, dtype=np.uint8)
    if where.size:
        byte = where >> 3
        first = np.flatnonzero(np.diff(byte, prepend=-1))
        bitmap[byte[first]] = np.bitwise_or.reduceat(np.left_shift(1, where & 7).astype(np.uint8), first)
    return torch.from_numpy(bitmap)


def unpack_bits(bitmap: Tensor) -> Tensor:
    """Sorted positions int64 of the ones in a uint8 bitmap, least significant bit first."""
    packed = bitmap.numpy()
    if packed.size <= _DENSE_BYTES_PER_OCCUPIED * np.count_nonzero(packed):
        return torch.from_numpy(np.flatnonzero(np.unpackbits(packed, bitorder="little").view(np.bool_)))
    occupied = np.flatnonzero(packed)
    byte, bit = np.nonzero(np.unpackbits(packed[occupied, None], axis=1, bitorder="little"))
    return torch.from_numpy(occupied[byte] * 8 + bit)


def elias_fano_bytes(count: int, size: int) -> int:
    """Exact bytes of ``count`` positions below ``size`` in Elias-Fano coding; at most those of a bitmap."""
    return _elias_fano_bytes(count, size, _elias_fano_low_bits(count, size)) if count else 0


def elias_fano_encode(positions: Tensor, size: int) -> Tensor:
    """Strictly increasing ``positions`` int64 [count] below ``size`` in Elias-Fano coding.

    Coded is gap_i = position_i - i, the absent positions before the i-th, which does not decrease: its low l bits as
    they are, and gap_i >> l in unary, as a one at bit (gap_i >> l) + i. That is l + 1 + (1 - d) / (d 2^l) bits a
    position at density d = count / size (Elias 1974 and Fano 1971, with gaps for positions), within 0.6 bits of the
    entropy below d = 1/3, where a bitmap begins to be smaller. docs/wire-format.md has the layout.

    Returns uint8 [elias_fano_bytes(count, size)].

    Example:
        >>> elias_fano_encode(torch.tensor([2, 3, 77]), 100).tolist()
        [66, 44, 19]
    """
    count = positions.numel()
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    low_bits = _elias_fano_low_bits(count, size)
    index = np.arange(count)
    gaps = positions.numpy() - index
    high = pack_bits(torch.from_numpy((gaps >> low_bits) + index), _elias_fano_high_bits(count, size, low_bits))
    return torch.cat([torch.from_numpy(_pack_integers(gaps & ((1 << low_bits) - 1), low_bits)), high])


def elias_fano_decode(data: Tensor, count: int, size: int) -> Tensor:
    """Positions int64 of what `elias_fano_encode` gave: uint8 [elias_fano_bytes(count, size)].

    Of other bytes it gives an empty tensor, or ``count`` integers that need not increase nor lie below ``size``: where
    they do, these bytes are the one encoding of them. No more memory is used than for ``8 * data.numel()`` positions.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    low_bits = _elias_fano_low_bits(count, size)
    low_bytes = (count * low_bits + 7) // 8
    ones = unpack_bits(data[low_bytes:]).numpy()
    low, spare = _unpack_integers(data[:low_bytes].numpy(), count, low_bits)
    if ones.size != count or spare:
        return torch.empty(0, dtype=torch.int64)
    index = np.arange(count)
    ones -= index
    ones <<= low_bits
    ones |= low
    ones += index
    return torch.from_numpy(ones)


def _elias_fano_low_bits(count: int, size: int) -> int:
    """The l of fewest bytes, the smallest of equals: never more than 2 above log2 of the mean gap, which tests hold."""
    mean_gap = max((size - count) // count, 1)
    return min(range(mean_gap.bit_length() + 2), key=lambda low_bits: _elias_fano_bytes(count, size, low_bits))


def _elias_fano_bytes(count: int, size: int, low_bits: int) -> int:
    return (count * low_bits + 7) // 8 + (_elias_fano_high_bits(count, size, low_bits) + 7) // 8


def _elias_fano_high_bits(count: int, size: int, low_bits: int) -> int:
    return count + (max(size - count, 0) >> low_bits)


def _pack_integers(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers int64 below 2^bits in ceil(size * bits / 8) bytes: the low bits % 8 of all, then the whole bytes above.

    The low parts are a dense bit stream, least significant first, made of eight at a time: they fill bits % 8 bytes.
    """
    whole, rest = divmod(bits, 8)
    eights = np.zeros((-(-values.size // 8), 8), dtype=np.int64)
    eights.reshape(-1)[: values.size] = values & ((1 << rest) - 1)
    words = eights @ (1 << rest * np.arange(8))
    stream = words.view(np.uint8).reshape(-1, 8)[:, :rest].reshape(-1)[: (values.size * rest + 7) // 8]
    if not whole:
        return stream
    above = (values >> rest).view(np.uint8).reshape(-1, 8)[:, :whole]
    return np.concatenate([stream, above.reshape(-1)])


def _unpack_integers(data: np.ndarray, count: int, bits: int) -> tuple[np.ndarray, bool]:
    """``count`` integers int64 from `_pack_integers`, and whether the bits that round up to a byte are not zero."""
    whole, rest = divmod(bits, 8)
    stream = (count * rest + 7) // 8
    num_eights = -(-count // 8)
    padded = np.zeros(num_eights * rest, dtype=np.uint8)
    padded[:stream] = data[:stream]
    words = np.zeros((num_eights, 8), dtype=np.uint8)
    words[:, :rest] = padded.reshape(num_eights, rest)
    eights = (words.view(np.int64) >> rest * np.arange(8)) & ((1 << rest) - 1)
    values, spare = eights.reshape(-1)[:count], eights.reshape(-1)[count:]
    if whole:
        above = np.zeros((count, 8), dtype=np.uint8)
        above[:, :whole] = data[stream:].reshape(count, whole)
        values |= above.view(np.int64).reshape(-1) << rest
    return values, bool(spare.any())


def checksum(buffer: Tensor) -> int:
    """64-bit checksum of a uint8 buffer whose length is a multiple of 8.

    The words of each 4 KiB chunk are summed, and the chunk sums are added with odd weights 1, 3, 5 ...
    modulo 2^64. Every change confined to one word is detected, because an odd weight is invertible; chunks
    that change places are detected too. It reads memory at full speed: 0.3 ms for 8 MB, CRC-32 3.4 ms.
    """
    words = buffer.numpy().view(np.uint64)
    whole = words.size // _CHECKSUM_CHUNK_WORDS * _CHECKSUM_CHUNK_WORDS
    sums = words[:whole].reshape(-1, _CHECKSUM_CHUNK_WORDS).sum(axis=1)
    weights = np.arange(1, 2 * sums.size + 1, 2, dtype=np.uint64)
    tail = int(words[whole:].sum()) * (2 * sums.size + 1)
    return (int((sums * weights).sum()) + tail) % 2**64


def mix(ids: Tensor, seed: int) -> Tensor:
    """Hash int64 ids to 32 well-mixed bits (int64 in [0, 2^32)).

    Two rounds of the MurmurHash3 32-bit finalizer, the high word folded in between; ``seed`` picks the function.
    """
    hashed = _finalize((ids ^ (seed & _UINT32_MASK)) & _UINT32_MASK)
    return _finalize(hashed ^ ((ids >> 32) & _UINT32_MASK) ^ ((seed >> 32) & _UINT32_MASK))


def _finalize(word: Tensor) -> Tensor:
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B) & _UINT32_MASK
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35) & _UINT32_MASK
    return word ^ (word >> 16)


def hierarchical_hash(
    ids: Tensor, world_size: int, seed: int, *, hashes: int = 3, parallel_slots: int, serial_slots: int
) -> list[Tensor]:
    """Partition unique ids by the two-level hash of ZEN (OSDI'25, Algorithm 1, section 3.2).

    The first level, the same on all ranks, gives the owner; the second tries ``hashes`` slots in the
    owner's parallel memory and appends what finds none to its serial memory.

    Args:
        ids: unique int64 [k], each below 2^62.
        parallel_slots: r1, over all owners; the paper takes twice the number of ids.
        serial_slots: r2, over all owners; the paper takes r1 / 10.

    Returns:
        For each owner its ids in memory order (parallel, then serial). Every id is in exactly one list.

    The paper leaves two holes, closed here. Its read-after-write check is unsound without a barrier: a
    thread may read its own id back before a slower thread overwrites it. Here all writes of a round end
    before the reads begin, and slots won in earlier rounds are never written again. It gives no rule for
    a full serial memory; here that memory grows by what is needed, so that no id is lost.
    """
    owners = owner_by_hash(ids, world_size, seed)
    slots = max(1, parallel_slots // world_size)
    memory = torch.full((world_size * slots,), -1, dtype=torch.int64)
    homeless = torch.arange(ids.numel())
    for level in range(1, hashes + 1):
        slot = owners[homeless] * slots + mix(ids[homeless], seed + level) % slots
        free = memory[slot] < 0
        memory[slot[free]] = ids[homeless[free]]
        homeless = homeless[memory[slot] != ids[homeless]]
    overflow_owner, overflow = owners[homeless], ids[homeless]
    capacity = max(serial_slots // world_size, int(torch.bincount(overflow_owner, minlength=1).max()))
    serial = torch.full((world_size, capacity), -1, dtype=torch.int64)
    order = torch.argsort(overflow_owner, stable=True)
    counts = torch.bincount(overflow_owner, minlength=world_size)
    rank_in_owner = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[overflow_owner[order]]
    serial[overflow_owner[order], rank_in_owner] = overflow[order]
    filled = torch.cat([memory.view(world_size, slots), serial], dim=1)
    return [row[row >= 0] for row in filled]


def owner_by_hash(ids: Tensor, world_size: int, seed: int) -> Tensor:
    """The first level of hierarchical hashing: the owner in [0, world_size) of each id, int64."""
    return (mix(ids, seed) * world_size) >> 32
