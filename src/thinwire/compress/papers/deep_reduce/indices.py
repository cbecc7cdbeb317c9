"""Codes of the ids of a sparse gradient: four that give back every id, and Bloom filters, which do not."""

import heapq
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import stable_seed
from thinwire.errors import CorruptMessageError, unknown
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format, Whole

MOST_CODE_BITS = 15
MOST_FILTER_BITS = (1 << 31) - 1
_FINENESS = 256  # a filter has n/256 bits an id, so that machines whose log2 differs in its last bit agree
_SCAN = 1 << 18  # ids that are looked up in a filter at a time: temporary memory stays in the cache
_SEEDS = tuple(stable_seed("bloom", number) for number in range(64))


class IndexCodec(ABC):
    """A code of ``count >= 1`` strictly increasing ids below ``size`` (int64 [count]); both sides know both numbers."""

    name: str
    keeps_count = True
    """Whether `decode` gives as many ids as were encoded."""

    @abstractmethod
    def encode(self, ids: Tensor, size: int) -> Tensor:
        """Return the code, uint8 [k]."""

    @abstractmethod
    def decode(self, data: Tensor, count: int, size: int) -> Tensor:
        """Return the ids; of a Bloom filter those that its policy gives.

        Raises:
            CorruptMessageError: bytes that code no such ids.
        """

    def num_bytes(self, count: int, size: int) -> int | None:
        """Return the bytes of a code, or None if they depend on the ids."""
        return None

    @abstractmethod
    def expected_bytes(self, count: int, size: int) -> float:
        """Return the bytes of the code of random ids, by a formula."""


@dataclass(frozen=True)
class InFormat(IndexCodec):
    """A format of `thinwire.rows.formats`."""

    format: Format

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.format.value

    def encode(self, ids: Tensor, size: int) -> Tensor:
        return wire.encode(self.format, Whole(size), ids, torch.empty(ids.numel(), 0))

    def decode(self, data: Tensor, count: int, size: int) -> Tensor:
        return wire.decode(self.format, Whole(size), count, data, 0, torch.float32)[0]

    def num_bytes(self, count: int, size: int) -> int:
        return wire.payload_bytes(self.format, count, 0, size, size)

    expected_bytes = num_bytes


@dataclass(frozen=True)
class RunLength(IndexCodec):
    """Lengths of runs of present and absent ids: the number of runs (int64), and both sums of lengths in Elias-Fano.

    Of increasing numbers Elias-Fano codes the differences, as low bits and a unary number: a Rice code of each length.
    """

    name = "run_length"

    def encode(self, ids: Tensor, size: int) -> Tensor:
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), (ids.diff() > 1).nonzero().view(-1) + 1])
        present = kernels.elias_fano_encode(starts, ids.numel())
        absent = kernels.elias_fano_encode(ids[starts] - starts, size - ids.numel() + 1)
        return torch.cat([torch.tensor([starts.numel()]).view(torch.uint8), present, absent])

    def decode(self, data: Tensor, count: int, size: int) -> Tensor:
        runs, limit = int(data[:8].clone().view(torch.int64)) if data.numel() >= 8 else 0, size - count + 1
        if not 1 <= runs <= min(count, limit) or data.numel() != self._bytes(runs, count, size):
            raise CorruptMessageError(f"{runs} runs of {count} ids in {data.numel()} bytes")
        end = 8 + kernels.elias_fano_bytes(runs, count)
        starts = _increasing(kernels.elias_fano_decode(data[8:end], runs, count), runs, count)
        absent = _increasing(kernels.elias_fano_decode(data[end:], runs, limit), runs, limit)
        lengths = torch.cat([starts, torch.tensor([count])]).diff()
        if int(starts[0]):
            raise CorruptMessageError("the first run of ids begins at none of them")
        return torch.arange(count) + absent.repeat_interleave(lengths)

    def expected_bytes(self, count: int, size: int) -> float:
        return self._bytes(max(1, round(count * (size - count + 1) / size)), count, size)

    def _bytes(self, runs: int, count: int, size: int) -> int:
        return 8 + kernels.elias_fano_bytes(runs, count) + kernels.elias_fano_bytes(runs, size - count + 1)


@dataclass(frozen=True)
class Huffman(IndexCodec):
    """Gaps between ids: the number of bits of each by a Huffman code made for them, and those below the first verbatim.

    In front are the lengths of the codes, a byte for each number of bits, 0 for none. Bits fill bytes from the lowest.
    """

    name = "huffman"

    def encode(self, ids: Tensor, size: int) -> Tensor:
        gaps = np.diff(ids.numpy(), prepend=-1) - 1
        classes = np.frexp(gaps.astype(np.float64))[1]  # bits of a number below 2^53
        lengths = code_lengths(tuple(np.bincount(classes, minlength=_classes(ids.numel(), size)).tolist()))
        codes = _codes(lengths)
        written = np.frombuffer(b"".join([codes[number] for number in classes.tolist()]), np.uint8) & 1
        below = np.maximum(classes - 1, 0)
        ends = np.cumsum(below)
        bits = np.zeros(int(ends[-1]), dtype=np.uint8)
        for bit in range(int(below.max())):
            (chosen,) = (below > bit).nonzero()
            bits[ends[chosen] - below[chosen] + bit] = gaps[chosen] >> bit & 1
        parts = [np.packbits(part, bitorder="little") for part in (written, bits)]
        return torch.from_numpy(np.concatenate([np.array(lengths, dtype=np.uint8), *parts]))

    def decode(self, data: Tensor, count: int, size: int) -> Tensor:
        entries = _classes(count, size)
        lengths, packed = data[:entries].tolist(), data[entries:].numpy()
        space = sum([2.0**-length for length in lengths if length])
        if len(lengths) < entries or max(lengths) > MOST_CODE_BITS or not 0.0 < space <= 1.0:
            raise CorruptMessageError(f"{data.numel()} bytes hold no Huffman code of {entries} numbers of bits")
        codes = {code: number for number, code in enumerate(_codes(lengths)) if code}
        bits = np.unpackbits(packed[: (count * max(lengths) + 7) // 8], bitorder="little") + ord("0")
        result = re.compile(b"|".join(sorted(codes, key=len))).findall(bits.tobytes())[:count]  # 0.2 us a code
        used = b"".join(result)
        below = np.maximum(np.array([codes[code] for code in result]) - 1, 0)
        end = (len(used) + 7) // 8
        if len(result) < count or used != bits[: len(used)].tobytes() or packed.size != end + (below.sum() + 7) // 8:
            raise CorruptMessageError(f"{packed.size} bytes that are not the Huffman codes of {count} gaps")
        gaps = np.array([codes[code] > 0 for code in result]).astype(np.int64) << below
        bits, starts = np.unpackbits(packed[end:], bitorder="little"), np.cumsum(below) - below
        for bit in range(int(below.max())):
            (chosen,) = (below > bit).nonzero()
            gaps[chosen] |= bits[starts[chosen] + bit].astype(np.int64) << bit
        return _increasing(torch.from_numpy(np.cumsum(gaps + 1) - 1), count, size)

    def expected_bytes(self, count: int, size: int) -> float:
        above = [(1.0 - count / size) ** (1 << number >> 1) for number in range(_classes(count, size))]
        shares = [high - low for high, low in zip([1.0, *above[1:]], [*above[1:], 0.0], strict=True)]
        lengths = code_lengths(tuple([round(count * share) for share in shares]))
        per_class = [length + max(0, number - 1) for number, length in enumerate(lengths)]
        return len(lengths) + count * float(np.dot(shares, per_class)) / 8


@dataclass(frozen=True)
class Bloom(IndexCodec):
    """A Bloom filter of the ids, in which every one of them is found, and some others (false positives), too.

    It has ``log2(1 / fpr) / ln 2`` bits an id and as many hash functions as fill half of it. A receiver looks up all
    ``size`` ids. The policy says what comes of those that are found: "p0" takes all, "p1" at random as many as were
    put in, and "p2" as many, first those that alone explain a bit. Choices follow from the bytes of the filter, so all
    ranks make the same ones.

    Args:
        policy: "p0", "p1" or "p2".
        fpr: rate of false positives; None for a tenth of the density, as in the authors' code: 1.1 ids are found for
            each that was put in.

    Raises:
        ValueError: another policy; a rate outside [1e-9, 0.9].
    """

    policy: Literal["p0", "p1", "p2"] = "p0"
    fpr: float | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("p0", "p1", "p2"):
            raise ValueError(f'a Bloom filter has the policy "p0", "p1" or "p2", not {self.policy!r}')
        if self.fpr is not None and not 1e-9 <= self.fpr <= 0.9:
            raise ValueError(f"a Bloom filter has a rate of false positives in [1e-9, 0.9], not {self.fpr!r}")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"bloom:{self.policy}" + ("" if self.fpr is None else f":{self.fpr!r}")

    @property
    def keeps_count(self) -> bool:  # type: ignore[override]
        return self.policy != "p0"

    def encode(self, ids: Tensor, size: int) -> Tensor:
        hashes, num_bits = self.shape(ids.numel(), size)
        return kernels.pack_bits(torch.stack(_filter_bits(ids, hashes, num_bits)).unique(), num_bits)

    def decode(self, data: Tensor, count: int, size: int) -> Tensor:
        hashes, num_bits = self.shape(count, size)
        ones = kernels.unpack_bits(data)
        plausible = data.numel() == self.num_bytes(count, size) and 0 < ones.numel() <= hashes * count
        if not plausible or int(ones[-1]) >= num_bits:
            raise CorruptMessageError(f"{data.numel()} bytes with {ones.numel()} ones are no filter of {count} ids")
        present, parts = torch.zeros(num_bits, dtype=torch.bool).index_fill_(0, ones, True), []
        for start in range(0, size, _SCAN):
            ids = torch.arange(start, min(size, start + _SCAN))
            for seed in _SEEDS[:hashes]:  # each leaves half of those that are not in it
                ids = ids[present[kernels.mix(ids, seed) * num_bits >> 32]]
            parts.append(ids)
        result = torch.cat(parts)
        if result.numel() < count:
            raise CorruptMessageError(f"a filter of {count} ids in which {result.numel()} of {size} are found")
        if self.policy == "p0" or result.numel() == count:
            return result
        keys = kernels.mix(result, wire.digest64(data.numpy().tobytes()) >> 1)
        if self.policy == "p1":
            return result[keys.argsort(stable=True)[:count]].sort().values
        return result[_likeliest(torch.stack(_filter_bits(result, hashes, num_bits)), keys, count)]

    def num_bytes(self, count: int, size: int) -> int:
        return (self.shape(count, size)[1] + 7) // 8

    expected_bytes = num_bytes

    def rate(self, count: int, size: int) -> float:
        """Return the rate of false positives, ``(1 - e^(-h count / bits))^h`` of h hash functions (Lemma 3)."""
        hashes, num_bits = self.shape(count, size)
        return (1.0 - math.exp(-hashes * count / num_bits)) ** hashes

    def shape(self, count: int, size: int) -> tuple[int, int]:
        """Return the number of hash functions and of bits."""
        halvings = math.log2(10 * size / count if self.fpr is None else 1 / self.fpr)
        per_id = round(_FINENESS * halvings / math.log(2))
        hashes = max(1, round(per_id / _FINENESS * math.log(2)))
        return min(hashes, len(_SEEDS)), min(-(-count * per_id // _FINENESS), MOST_FILTER_BITS)


LOSSLESS: tuple[IndexCodec, ...] = (InFormat(Format.ELIAS_FANO), InFormat(Format.BITMAP), RunLength(), Huffman())


@dataclass(frozen=True)
class Auto(IndexCodec):
    """The lossless code of fewest expected bytes for so many ids."""

    name = "auto"

    def of(self, count: int, size: int) -> IndexCodec:
        """Return it."""
        return min(LOSSLESS, key=lambda codec: codec.expected_bytes(count, size))

    def encode(self, ids: Tensor, size: int) -> Tensor:
        return self.of(ids.numel(), size).encode(ids, size)

    def decode(self, data: Tensor, count: int, size: int) -> Tensor:
        return self.of(count, size).decode(data, count, size)

    def num_bytes(self, count: int, size: int) -> int | None:
        return self.of(count, size).num_bytes(count, size)

    def expected_bytes(self, count: int, size: int) -> float:
        return self.of(count, size).expected_bytes(count, size)


def index_codec(text: str) -> IndexCodec:
    """Return the codec of a text such as "huffman", "bloom:p2" or, with a rate of false positives, "bloom:p2:0.001".

    Raises:
        ValueError: an unknown text, or settings that `Bloom` does not take.
    """
    plain = {codec.name: codec for codec in (*LOSSLESS, Auto(), Bloom("p0"), Bloom("p1"), Bloom("p2"))}
    bloom = re.fullmatch(r"bloom:(\w+):(\d*\.?\d+(?:e-?\d+)?)", text)
    if bloom:
        return Bloom(bloom[1], float(bloom[2]))  # type: ignore[arg-type]
    if text not in plain:
        raise unknown("code of ids", text, plain)
    return plain[text]


def _increasing(ids: Tensor, count: int, size: int) -> Tensor:
    if ids.numel() != count or int(ids[0]) < 0 or int(ids[-1]) >= size or not bool((ids.diff() > 0).all()):
        raise CorruptMessageError(f"ids that are not {count} increasing ones below {size}")
    return ids


def _classes(count: int, size: int) -> int:
    """Return one more than the number of bits of the largest gap."""
    return max(0, size - count).bit_length() + 1


@lru_cache(maxsize=1024)
def code_lengths(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths, at most `MOST_CODE_BITS`, of a Huffman code of symbols with these counts; 0 for none."""
    while True:
        heap = [(count, symbol, [symbol]) for symbol, count in enumerate(counts) if count]
        lengths = [int(len(heap) == 1 and count > 0) for count in counts]
        heapq.heapify(heap)
        while len(heap) > 1:
            (first, _, one), (second, index, other) = heapq.heappop(heap), heapq.heappop(heap)
            for symbol in one + other:
                lengths[symbol] += 1
            heapq.heappush(heap, (first + second, index, one + other))
        if max(lengths, default=0) <= MOST_CODE_BITS:
            return tuple(lengths)
        counts = tuple([(count + 1) // 2 for count in counts])


def _codes(lengths: Sequence[int]) -> list[bytes]:
    """Return the canonical code of each symbol as text of zeros and ones: shorter ones first, then by symbol."""
    codes, code, last = [b""] * len(lengths), 0, 0
    for length, symbol in sorted([(length, symbol) for symbol, length in enumerate(lengths) if length]):
        code <<= length - last
        codes[symbol], last = f"{code:0{length}b}".encode(), length
        code += 1
    return codes


def _filter_bits(ids: Tensor, hashes: int, num_bits: int) -> list[Tensor]:
    """Return the bit that each hash function gives each id: 32 bits of MurmurHash3's finalizer, scaled."""
    return [kernels.mix(ids, seed) * num_bits >> 32 for seed in _SEEDS[:hashes]]


def _likeliest(positions: Tensor, keys: Tensor, count: int) -> Tensor:
    """Return the indices, sorted, of ``count`` of the ids, whose bits are ``positions``: Algorithm 1 of the paper.

    A conflict set is all ids that one bit explains; of one with a single id that was put in. Set by set, from the
    smallest on, gives one of its ids that are not taken yet, that of the smallest key, in rounds until there are
    ``count``; an id that two sets give in the same round is taken once.
    """
    number, by_key = keys.numel(), keys.argsort(stable=True)
    pairs = (positions[:, by_key] * number + torch.arange(number)).unique().numpy()
    sets, items = pairs // number, by_key.numpy()[pairs % number]
    order = np.bincount(sets)[sets].argsort(kind="stable")
    sets, items, taken = sets[order], items[order], np.zeros(number, dtype=np.bool_)
    while (missing := count - int(taken.sum())) > 0:
        left = ~taken[items]
        sets, items = sets[left], items[left]
        given = items[np.diff(sets, prepend=-1) != 0]
        _, first = np.unique(given, return_index=True)
        taken[given[np.sort(first)[:missing]]] = True
    return torch.from_numpy(np.flatnonzero(taken))
