"""The wire format: what is encoded is decoded, sizes are as stated, and nothing malformed gets through."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.errors import CorruptMessageError
from thinwire.rows import formats as wire
from thinwire.rows.formats import FORMATS, Format, Header, Kind, Message, Part, Whole
from thinwire.rows.partition import Contiguous, HierarchicalHash, Permutation
from thinwire.rows.sparse import SUPPORTED_DTYPES

NONE = torch.empty(0, dtype=torch.int64)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    num_rows = draw(st.integers(0, 40) | st.sampled_from([255, 256, 257, 1000]))
    world_size = draw(st.integers(1, 5))
    owner = draw(st.integers(0, world_size - 1))
    kind = draw(st.sampled_from(["whole", "range", "dealt", "listed"]))
    if kind == "whole":
        return Whole(num_rows)
    if kind == "range":
        return Contiguous(num_rows, world_size).parts[owner]
    make = Permutation if kind == "dealt" else HierarchicalHash
    return make(num_rows, world_size, draw(st.integers(0, 3))).parts[owner]


def subset(size: int, seed: int, share: float) -> Tensor:
    chosen = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share
    return chosen.nonzero().flatten()


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


@pytest.mark.few(10)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@settings(max_examples=min(40, settings.default.max_examples))
@given(
    part=parts(),
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    width=st.sampled_from([1, 2, 7]),
)
def test_decode_undoes_encode(
    format: Format, dtype: torch.dtype, part: Part, seed: int, share: float, width: int
) -> None:
    positions = subset(part.size, seed, share)
    table = torch.randn(positions.numel() + 3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    order = torch.randperm(table.shape[0], generator=torch.Generator().manual_seed(seed))[: positions.numel()]
    values = table[order]

    payload = wire.encode(format, part, positions, values)
    row_bytes = width * dtype.itemsize
    assert payload.dtype == torch.uint8
    assert payload.numel() == wire.payload_bytes(format, positions.numel(), row_bytes, part.size, part.num_rows)
    assert payload.numel() % wire.ALIGNMENT_BYTES == 0
    assert torch.equal(payload, wire.encode(format, part, positions, table, order))

    got_positions, got_values = wire.decode(format, part, positions.numel(), payload, width, dtype)
    assert got_values.dtype == dtype
    if format is Format.DENSE:
        assert torch.equal(got_positions, torch.arange(part.size))
        absent = torch.isin(got_positions, positions, invert=True)
        assert not bool(got_values[absent].any())
        got_values = got_values[positions]
    else:
        assert torch.equal(got_positions, positions)
    assert torch.equal(bits(got_values), bits(values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 255, 256, 257, 65_535, 65_536, 65_537, 2**31, 2**31 + 1, 2**40])
def test_coo_holds_the_first_and_last_position_of_any_part(size: int, dtype: torch.dtype) -> None:
    """Of one row, and of an odd number of rows, after which the indices are not aligned."""
    for positions in (torch.tensor([size - 1]), torch.tensor([0, size // 2, size - 1]).unique()):
        values = torch.ones(positions.numel(), 1, dtype=dtype)
        payload = wire.encode(Format.COO, Whole(size), positions, values)
        got, _ = wire.decode(Format.COO, Whole(size), positions.numel(), payload, 1, dtype)
        assert torch.equal(got, positions)


def test_index_widths() -> None:
    sizes = {0: 1, 1: 1, 256: 1, 257: 2, 65_536: 2, 65_537: 4, 2**31: 4, 2**31 + 1: 8}
    assert {size: wire.index_dtype(size).itemsize for size in sizes} == sizes


@pytest.mark.parametrize(
    ("format", "count", "expected"),
    [
        (Format.COO, 3, 3 * (12 + 2)),
        (Format.BITMAP, 3, 3 * 12 + 4000 // 8),
        (Format.HASH_BITMAP, 3, 3 * 12 + 1000 // 8),
        (Format.DENSE, 3, 1000 * 12),
        (Format.ELIAS_FANO, 3, 3 * 12 + 3 + 1),  # l = 7 (l = 8: 3 + 1 as well)
        (Format.ELIAS_FANO, 400, 400 * 12 + 1000 // 8),  # l = 0
        (Format.COO, 0, 0),
        (Format.BITMAP, 0, 0),
        (Format.HASH_BITMAP, 0, 0),
        (Format.ELIAS_FANO, 0, 0),
        (Format.DENSE, 0, 1000 * 12),
    ],
)
def test_sizes_are_the_documented_ones(format: Format, count: int, expected: int) -> None:
    """Three floats a row, in a part of 1000 of 4000 rows; padded to 8 bytes."""
    assert wire.payload_bytes(format, count, 12, 1000, 4000) == -(-expected // 8) * 8


@given(
    size=st.integers(0, 2000),
    rest=st.integers(0, 2000),
    share=st.floats(0, 1),
    row_bytes=st.sampled_from([2, 4, 14, 28, 512]),
    formats=st.lists(st.sampled_from(FORMATS), min_size=1, unique=True),
)
def test_smallest_is_the_smallest(size: int, rest: int, share: float, row_bytes: int, formats: list[Format]) -> None:
    """Of those that keep the rows: DENSE does not say which were there, so it counts where all were, or alone."""
    count = round(share * size)
    best = wire.smallest(tuple(formats), count, row_bytes, size, size + rest)
    assert best in formats
    keeping = [format for format in formats if format is not Format.DENSE or count == size] or formats
    sizes = {format: wire.payload_bytes(format, count, row_bytes, size, size + rest) for format in keeping}
    others = {format: sizes[format] for format in keeping if format is not Format.ELIAS_FANO}
    least = min(others.values(), default=sizes[best])
    if best is Format.ELIAS_FANO:
        assert not others or sizes[best] < least * 255 // 256
    else:
        assert best is next(format for format in others if others[format] == least), "the earlier one of equals"
        assert sizes.get(Format.ELIAS_FANO, least) >= least * 255 // 256, "more work must save bytes"


@given(
    size=st.integers(0, 2000),
    rest=st.integers(0, 2000),
    share=st.floats(0, 1),
    row_bytes=st.sampled_from([2, 4, 14, 512]),
    formats=st.lists(st.sampled_from(FORMATS), min_size=1, unique=True),
)
def test_with_a_dense_switch_no_message_is_more_than_dense(
    size: int, rest: int, share: float, row_bytes: int, formats: list[Format]
) -> None:
    """DENSE, listed or not, where it is fewer bytes than what is taken without the switch, and only there."""
    count = round(share * size)

    def num_bytes(format: Format) -> int:
        return wire.payload_bytes(format, count, row_bytes, size, size + rest)

    usual = wire.smallest(tuple(formats), count, row_bytes, size, size + rest)
    best = wire.smallest(tuple(formats), count, row_bytes, size, size + rest, dense_switch=True)
    assert num_bytes(best) <= num_bytes(Format.DENSE)
    if best is not usual:
        assert best is Format.DENSE
        assert num_bytes(Format.DENSE) < num_bytes(usual)


def test_format_codes_stay() -> None:
    """They are on the wire, and their order decides ties."""
    codes = {format: Header(Kind.PUSH, 0, 0, 0, format).pack()[4] for format in Format}
    assert codes == {"coo": 0, "bitmap": 1, "hash_bitmap": 2, "dense": 3, "elias_fano": 4}


@pytest.mark.parametrize("size", [1, 2, 7, 64, 256, 257, 2000, 65_536, 65_537, 1_000_000])
@pytest.mark.parametrize("row_bytes", [2, 4, 12, 1024])
def test_of_all_formats_the_choice_never_has_more_bytes_than_coo_a_bitmap_or_dense(size: int, row_bytes: int) -> None:
    for count in sorted({*range(min(size, 20) + 1), *(size * share // 100 for share in range(101))}):
        best = wire.smallest(FORMATS, count, row_bytes, size, size)
        sizes = {format: wire.payload_bytes(format, count, row_bytes, size, size) for format in FORMATS}
        assert sizes[best] <= min(sizes[Format.COO], sizes[Format.BITMAP], sizes[Format.HASH_BITMAP])
        assert sizes[Format.ELIAS_FANO] <= sizes[Format.HASH_BITMAP]
        assert sizes[best] <= sizes[Format.DENSE] or count < size


@pytest.mark.parametrize("size", [2000, 100_000])
def test_elias_fano_is_taken_below_a_third_and_a_bitmap_above(size: int) -> None:
    for percent in range(1, 100):
        best = wire.smallest(FORMATS, size * percent // 100, 4, size, 4 * size)
        if percent < 30:
            assert best is Format.ELIAS_FANO
        if percent > 34:
            assert best is Format.HASH_BITMAP


headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    source=st.integers(0, 2**16 - 1),
    sequence=st.integers(0, 2**32 - 1),
    digest=st.integers(0, 2**64 - 1),
    format=st.sampled_from(FORMATS),
    held=st.integers(0, 2**64 - 1),
    count=st.integers(0, 2**64 - 1),
    payload_bytes=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
).map(lambda header: header if header.payload_bytes else replace(header, checksum=header.bound(0)))


@given(headers)
def test_headers_come_back(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == Header.NUM_BYTES
    assert Header.unpack(packed) == header


@settings(max_examples=5)
@given(headers)
def test_every_flipped_bit_of_a_header_is_refused(header: Header) -> None:
    packed = header.pack()
    passed = []
    for bit in range(8 * len(packed)):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            Header.unpack(bytes(flipped))
        except CorruptMessageError:
            continue
        passed.append(bit)
    assert not passed, f"these bits may flip unnoticed: {passed}"


@given(st.binary(max_size=2 * Header.NUM_BYTES) | st.binary(min_size=Header.NUM_BYTES, max_size=Header.NUM_BYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(CorruptMessageError):
        Header.unpack(data)


@given(st.binary(min_size=Header.NUM_BYTES - 3, max_size=Header.NUM_BYTES - 3))
def test_random_bytes_behind_the_magic_are_no_header(data: bytes) -> None:
    with pytest.raises(CorruptMessageError):
        Header.unpack(b"TW\x02" + data)


def test_a_header_of_another_version_says_so() -> None:
    packed = bytearray(Header(Kind.PUSH, 0, 0, 0).pack())
    packed[2] = 9
    with pytest.raises(CorruptMessageError, match="version 9"):
        Header.unpack(bytes(packed))


@pytest.mark.parametrize("num_bytes", [8, 64, 4096 + 24])
def test_the_checksum_notices_every_flipped_bit(num_bytes: int) -> None:
    buffer = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    expected = kernels.checksum(buffer)
    assert kernels.checksum(buffer.clone()) == expected
    for bit in range(0, 8 * num_bytes, 1 if num_bytes <= 64 else 37):
        buffer[bit // 8] ^= 1 << bit % 8
        assert kernels.checksum(buffer) != expected
        buffer[bit // 8] ^= 1 << bit % 8


def test_the_checksum_notices_chunks_that_change_places() -> None:
    chunks = torch.randint(0, 256, (6, 4096), dtype=torch.uint8)
    expected = kernels.checksum(chunks.flatten())
    for first in range(6):
        for second in range(first):
            order = list(range(6))
            order[first], order[second] = second, first
            assert kernels.checksum(chunks[order].flatten()) != expected


@given(st.integers(1, 600), st.integers(2, 6), st.randoms(use_true_random=False))
def test_the_checksum_notices_bits_of_several_words(num_words: int, num_bits: int, random: Random) -> None:
    """Mostly the same bit of each word: in a plain sum every other pair of those cancels."""
    buffer = torch.tensor(list(random.randbytes(8 * num_words)), dtype=torch.uint8)
    changed, bit, byte = buffer.clone(), random.randrange(8), random.randrange(8)
    for word in random.choices(range(num_words), k=num_bits):
        changed[8 * word + byte] ^= 1 << bit
    assert torch.equal(changed, buffer) or kernels.checksum(changed) != kernels.checksum(buffer)


@pytest.mark.parametrize("num_words", [2, 512, 1025])
def test_the_checksum_notices_words_that_change_places(num_words: int) -> None:
    words = torch.arange(1, num_words + 1)
    expected = kernels.checksum(words.view(torch.uint8))
    for place in range(num_words - 1):
        swapped = words.clone()
        swapped[place], swapped[-1] = words[-1], words[place]
        assert kernels.checksum(swapped.view(torch.uint8)) != expected


def test_the_checksum_of_nothing_and_of_zeros() -> None:
    assert kernels.checksum(torch.empty(0, dtype=torch.uint8)) == 0
    assert 0 <= kernels.checksum(torch.full((8192,), 255, dtype=torch.uint8)) < 2**64


def test_a_sealed_message_verifies_and_a_changed_one_does_not() -> None:
    payload = torch.arange(64, dtype=torch.uint8)
    message = Message.sealed(Header(Kind.PUSH, 3, 7, 11), payload)
    message.verify()
    with pytest.raises(CorruptMessageError, match="truncated"):
        replace(message, payload=payload[:-8]).verify()
    with pytest.raises(CorruptMessageError, match="checksum"):
        replace(message, payload=payload ^ 1).verify()


CHANGES = {"kind": Kind.PULL, "format": Format.DENSE, "source": 2, "sequence": 8, "digest": 12, "held": 1, "count": 1}


@pytest.mark.parametrize("field", CHANGES)
def test_a_header_that_changed_does_not_fit_its_payload(field: str) -> None:
    """Whatever its CRC says."""
    changed = {field: CHANGES[field]}
    message = Message.sealed(Header(Kind.PUSH, 3, 7, 11), torch.arange(64, dtype=torch.uint8))
    with pytest.raises(CorruptMessageError, match="checksum"):
        replace(message, header=replace(message.header, **changed)).verify()
    alone = Message.sealed(Header(Kind.OPEN, 3, 7, 11), torch.empty(0, dtype=torch.uint8)).header
    assert Header.unpack(alone.pack()) == alone
    with pytest.raises(CorruptMessageError, match="checksum"):
        Header.unpack(replace(alone, **changed).pack())


FOUR_OWNERS = [Contiguous(64, 4), Permutation(64, 4, seed=3), HierarchicalHash(64, 4, seed=3)]


def coo(positions: list[int]) -> Tensor:
    """A payload with one float32 a row whose indices are as given, right or wrong."""
    data = bytes(4 * len(positions)) + bytes(positions)
    return torch.frombuffer(bytearray(data.ljust(-(-len(data) // 8) * 8, b"\0")), dtype=torch.uint8)


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [0, 16], [255, 0], [16, 17], [3, 3, 3]])
def test_coo_ids_that_are_no_rows_of_the_part_are_refused(positions: list[int]) -> None:
    for partition in FOUR_OWNERS[:2]:  # parts of 16 rows
        with pytest.raises(CorruptMessageError):
            wire.decode(Format.COO, partition.parts[1], len(positions), coo(positions), 1, torch.float32)


@pytest.mark.parametrize("partition", FOUR_OWNERS)
@pytest.mark.parametrize("owner", range(4))
def test_a_bitmap_that_names_foreign_rows_is_refused(partition: Permutation, owner: int) -> None:
    part = partition.parts[owner]
    for foreign in set(range(64)) - set(part.ids(torch.arange(part.size)).tolist()):
        payload = wire.encode(Format.BITMAP, Whole(64), torch.tensor([foreign]), torch.ones(1, 1))
        with pytest.raises(CorruptMessageError):
            wire.decode(Format.BITMAP, part, 1, payload, 1, torch.float32)


@pytest.mark.parametrize("format", [Format.BITMAP, Format.HASH_BITMAP])
def test_bitmaps_with_other_counts_or_bits_behind_the_end_are_refused(format: Format) -> None:
    whole = Whole(61)
    payload = wire.encode(format, whole, torch.tensor([4, 60]), torch.ones(2, 1))
    wire.decode(format, whole, 2, payload, 1, torch.float32)
    for place, bit in ((8, 0), (8, 4), (8 + 7, 4), (8 + 7, 5), (8 + 7, 7)):  # one more, one less, the last, behind it
        changed = payload.clone()
        changed[place] ^= 1 << bit
        with pytest.raises(CorruptMessageError):
            wire.decode(format, whole, 2, changed, 1, torch.float32)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (size, count)
        for size in (1, 2, 3, 7, 61, 255, 256, 257, 1000)
        for count in (1, 2, 3, 10, 61, 300)
        if count <= size
    ],
)
def test_every_flipped_bit_of_elias_fano_ids_is_refused_or_names_other_rows(size: int, count: int) -> None:
    whole, positions = Whole(size), torch.randperm(size)[:count].sort().values
    payload = wire.encode(Format.ELIAS_FANO, whole, positions, torch.ones(count, 1))
    refused = 0
    for bit in range(8 * 4 * count, 8 * (4 * count + kernels.elias_fano_bytes(count, size))):
        flipped = payload.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            got, _ = wire.decode(Format.ELIAS_FANO, whole, count, flipped, 1, torch.float32)
        except CorruptMessageError:
            refused += 1
            continue
        assert got.numel() == count
        assert not torch.equal(got, positions)
        assert 0 <= int(got[0]) <= int(got[-1]) < size
        assert bool((got.diff() > 0).all())
    assert refused >= count, "at least each one of the bit vector that goes missing"


@pytest.mark.parametrize("owner", range(4))
@pytest.mark.parametrize("partition", FOUR_OWNERS)
def test_elias_fano_is_over_the_positions_of_the_part(partition: Permutation, owner: int) -> None:
    part = partition.parts[owner]
    positions = torch.arange(0, part.size, 3)
    payload = wire.encode(Format.ELIAS_FANO, part, positions, torch.empty(positions.numel(), 0))
    index = kernels.elias_fano_encode(positions, part.size)
    assert torch.equal(payload[: index.numel()], index)
    assert not payload[index.numel() :].any()


@pytest.mark.parametrize("format", FORMATS)
def test_a_payload_of_another_length_is_refused(format: Format) -> None:
    part, positions = Whole(100), torch.tensor([3, 50, 99])
    payload = wire.encode(format, part, positions, torch.ones(3, 2))
    longer = torch.cat([payload, payload[:8]])
    for wrong, count in ((payload[:-8], 3), (longer, 3), (payload[:0], 3), (payload, 101), (longer, 2**60)):
        with pytest.raises(CorruptMessageError):
            wire.decode(format, part, count, wrong, 2, torch.float32)


@pytest.mark.parametrize("format", [Format.COO, Format.DENSE])
def test_a_payload_too_short_for_the_code_of_its_values_gets_no_memory(format: Format) -> None:
    payload = torch.zeros(64, dtype=torch.uint8)
    payload[-1] = 1
    with pytest.raises(CorruptMessageError, match="too short"):
        wire.decode(format, Whole(1 << 31), 1 << 31, payload, 4096, torch.float32)


def test_coded_values_that_do_not_fit_into_memory_get_none() -> None:
    values, asked = torch.ones(4096, 2), list[int]()

    def fits(num_bytes: int) -> None:
        asked.append(num_bytes)
        raise CorruptMessageError("no memory")

    payload = wire.encode(Format.DENSE, Whole(4096), torch.arange(4096), values, codes_values=True)
    assert payload.numel() < values.nbytes
    with pytest.raises(CorruptMessageError, match="no memory"):
        wire.decode(Format.DENSE, Whole(4096), 4096, payload, 2, torch.float32, fits)
    assert asked == [values.nbytes]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=min(60, settings.default.max_examples))
@given(part=parts(), count=st.integers(0, 50), dtype=st.sampled_from(SUPPORTED_DTYPES), data=st.data())
def test_random_payloads_never_give_rows_that_are_not_there(
    format: Format, part: Part, count: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """What comes out of random bytes of the right length is refused, or it is ``count`` rows of the part."""
    num_bytes = wire.payload_bytes(format, count, 3 * dtype.itemsize, part.size, part.num_rows)
    seed = data.draw(st.integers(0, 2**16))
    sparse = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    if sparse:  # else hardly a bitmap has few enough bits
        payload *= torch.rand(num_bytes, generator=generator) < 0.1
    try:
        positions, values = wire.decode(format, part, count, payload, 3, dtype)
    except CorruptMessageError:
        return
    assert positions.numel() == values.shape[0] == (part.size if format is Format.DENSE else count)
    assert values.shape[1] == 3
    if positions.numel():
        assert 0 <= int(positions[0]) <= int(positions[-1]) < part.size
        assert bool((positions[1:] > positions[:-1]).all())
        ids = part.ids(positions)
        assert torch.equal(part.positions(ids), positions)
