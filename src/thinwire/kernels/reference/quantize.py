"""Signs, blocks of small integers and short floats in plain torch: the definition of correct, on any device."""

import torch
from torch import Tensor

from thinwire.kernels.reference.rows import mix

RANDOM_BITS = 24  # bits of a random number, the number that a float32 holds, so that comparisons are exact
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}


def packed_codes_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` integers of ``bits`` bits each."""
    return (count * bits + 7) // 8


def largest_of_blocks(values: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of each ``block`` consecutive ``values`` [n], float32 or 64: [ceil(n / block)]."""
    return torch.linalg.vector_norm(_blocked(values, block), float("inf"), dim=1)


def pack_signs(values: Tensor, phase: int) -> Tensor:
    """Pack the signs of ``values`` [n], float32 or float64, eight a byte, least significant first; a one is negative.

    One bit has no room for zero: a zero is negative where its index plus ``phase`` is odd, so that zeros cancel out
    between phases instead of pushing all in one direction.

    Returns uint8 [ceil(n / 8)].

    Example:
        >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, 0.0]), phase=0).tolist()
        [10]
    """
    odd = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    odd[(phase + 1) % 2 :: 2] = True
    negative = (values < 0).logical_or_((values == 0).logical_and_(odd))
    return _pack_codes(negative.to(torch.uint8), 1)


def mean_of_blocks(values: Tensor, block: int) -> Tensor:
    """Return the mean magnitude of each ``block`` consecutive ``values`` [n], float32 or float64: [ceil(n / block)].

    Sums are float64 in an undefined order, so what follows from a mean must be sent to the other ranks.
    """
    count = values.numel()
    if count == 0:
        return values.new_empty(0)
    whole, rest = values.abs().split([count // block * block, count % block])
    means = [whole.view(count // block, block).mean(dim=1, dtype=torch.float64)]
    if rest.numel():
        means.append(rest.mean(dtype=torch.float64).view(1))
    return torch.cat(means).to(values.dtype)


def add_signs(packed: Tensor, scales: Tensor, block: int, total: Tensor) -> None:
    """Add the scale of its block, or minus that, by the signs from `pack_signs`, to each element of ``total`` [n].

    Args:
        scales: one for each ``block`` consecutive elements, of the dtype of the total.
    """
    negative = _unpack_codes(packed, total.numel(), 1).to(torch.bool)
    magnitude = scales.repeat_interleave(min(block, total.numel()))[: total.numel()]
    total.add_(torch.where(negative, -magnitude, magnitude))


def quantize(values: Tensor, steps: Tensor, block: int, levels: int, bits: int, seed: int | None) -> Tensor:
    """Round ``values`` [n] to whole multiples, at most ``levels``, of the step of their block.

    With x = value / step, stochastic rounding gives floor(x) + 1 with probability x - floor(x), else floor(x): its
    expectation is x. Random numbers are a hash of the seed and the index, so that all twins round alike.

    Args:
        values: float32 or float64, finite.
        steps: one for each ``block`` consecutive values, of the same dtype, positive, normal numbers.
        levels: largest multiple, below 2^(bits - 1).
        bits: bits of a code, 2 to 8.
        seed: seed of stochastic rounding, 64 bits; None rounds to the nearest, ties to even.

    Returns:
        uint8 [ceil(n * bits / 8)]: codes multiple + levels, a bit stream, least significant bit first.
    """
    scaled = _blocked(values, block).mul(steps.reciprocal()[:, None]).view(-1)[: values.numel()]
    if seed is None:
        whole = scaled.round()
    else:
        whole = scaled.floor()
        whole.add_(_random(values.numel(), seed, values) < scaled.sub_(whole).mul_(1 << RANDOM_BITS))
    codes = whole.clamp_(-levels, levels).add_(levels).to(torch.uint8)
    return _pack_codes(codes, bits)


def add_quantized(packed: Tensor, steps: Tensor, block: int, levels: int, bits: int, total: Tensor) -> None:
    """Add the multiples in codes of `quantize` to ``total`` [n]; negated steps subtract them.

    Codes above 2 * levels, which `quantize` does not make, count as 2 * levels.
    """
    codes = _unpack_codes(packed, total.numel(), bits).clamp_(max=2 * levels)
    multiples = _blocked(codes.to(total.dtype).sub_(levels), block)
    total.add_(multiples.mul(steps[:, None]).view(-1)[: total.numel()])


def round_to_floats(values: Tensor, mantissa_bits: int, lowest: int, largest_code: int, seed: int | None) -> Tensor:
    """Round ``values`` [n] to floats with few bits of mantissa; at random, such that the expectation is the value.

    Codes count the magnitudes of a format from zero up, as the bits of IEEE 754 do: an exponent and a mantissa. Below
    the first normal number they are equidistant. Values above the largest number, infinity and nan become that.

    Args:
        values: float32 or float64; float64 needs at most 20 bits of mantissa.
        mantissa_bits: stored bits of the mantissa, fewer than values have; 0 for powers of two.
        lowest: exponent of the first normal number, biased as in the dtype of the values.
        largest_code: code of the largest number, at most 127.
        seed: seed of stochastic rounding, 64 bits; None rounds to the nearest, ties to even.

    Returns:
        uint8 [n]: the sign in the highest bit, the code below.
    """
    stored, integer = _MANTISSA_BITS[values.dtype], _INTEGERS[values.dtype]
    words = values.view(integer).long()
    finite = torch.tensor(torch.finfo(values.dtype).max, dtype=values.dtype).view(integer)
    magnitudes = (words & torch.iinfo(integer).max).clamp_(max=int(finite))
    exponents = (magnitudes >> stored).clamp_(min=1)
    significands = magnitudes - (exponents - 1 << stored)
    most = 8 * values.itemsize - 2
    drop = (lowest - exponents).clamp_(min=0).add_(stored - mantissa_bits)
    significands >>= (drop - most).clamp_(0, most)  # of what rounds up less than once in 2^30
    drop.clamp_(max=most)
    if seed is None:
        extra = (1 << drop - 1) - 1 + (significands >> drop & 1)
    else:
        hashed = mix(torch.arange(values.numel(), device=values.device), seed)
        extra = hashed >> 32 - drop if most < 32 else hashed << drop - 32
    codes = (exponents.clamp_(min=lowest) - lowest << mantissa_bits) + (significands + extra >> drop)
    return (codes.clamp_(max=largest_code) | (words < 0).long() << 7).to(torch.uint8)


def add_from_table(codes: Tensor, table: Tensor, steps: Tensor, block: int, total: Tensor) -> None:
    """Add to ``total`` [n] the number of each code (uint8 [n]) in ``table`` [256], times the step of its block.

    ``table`` and ``steps`` (of each block of ``block`` consecutive elements) are of the dtype of ``total``.
    """
    numbers = _blocked(table.index_select(0, codes.int()), block)
    total.add_(numbers.mul(steps[:, None]).view(-1)[: total.numel()])


def _random(count: int, seed: int, like: Tensor) -> Tensor:
    """Return random whole numbers in [0, 2^24), as floats."""
    return (mix(torch.arange(count, device=like.device), seed) >> (32 - RANDOM_BITS)).to(like.dtype)


def _blocked(values: Tensor, block: int) -> Tensor:
    """Return the values as [blocks, block], padded with zeros."""
    blocks = -(-values.numel() // block)
    return torch.nn.functional.pad(values, (0, blocks * block - values.numel())).view(blocks, block)


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack integers uint8 [n] below 2^bits: eight fill ``bits`` bytes."""
    if bits == 8:
        return codes
    eights = _blocked(codes.long(), 8)
    words = (eights << bits * torch.arange(8, device=codes.device)).sum(1)
    packed = words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)
    return packed[: packed_codes_bytes(codes.numel(), bits)].clone()


def _unpack_codes(packed: Tensor, count: int, bits: int) -> Tensor:
    """Unpack the output of `_pack_codes`."""
    if bits == 8:
        return packed[:count].clone()
    groups = -(-count // 8)
    words = torch.zeros(groups, 8, dtype=torch.uint8, device=packed.device)
    words[:, :bits] = torch.nn.functional.pad(packed, (0, groups * bits - packed.numel())).view(groups, bits)
    shifted = words.view(torch.int64) >> bits * torch.arange(8, device=packed.device)
    return (shifted & ((1 << bits) - 1)).view(-1)[:count].to(torch.uint8)
