"""A slot holds the old version, the new one, or none; never something in between."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.checkpoint.holder.client import SlotReader
from thinwire.checkpoint.holder.slots import Slot, SlotSize, SlotView, choose_slot, runs_of
from thinwire.checkpoint.holder.store import available_bytes, parse_bytes
from thinwire.checkpoint.holder.version import CHUNK_BYTES, Manifest, ShardId, Version
from thinwire.checkpoint.state.layout import TensorSlice, view_of
from thinwire.errors import CorruptMessageError

SHARD = ShardId("run", "0123456789abcdef", 3)
ODD = 2 * CHUNK_BYTES + 17


def fill(slot: Slot, step: int, payload: bytes, layout: bytes = b"{}") -> Manifest:
    slot.begin()
    slot.payload()[: len(payload)] = payload
    manifest = slot.digest(Manifest.stated(SHARD, step, 0, len(payload)), layout)
    slot.publish(manifest, layout)
    return manifest


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, CHUNK_BYTES, ODD])
def test_what_was_published_is_read_back(num_bytes: int) -> None:
    slot = Slot.allocate(SlotSize(num_bytes, 100))
    payload = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    manifest = fill(slot, 7, payload, b"layout")
    assert slot.verify() == (manifest, b"layout")
    assert bytes(slot.payload()) == payload
    assert manifest.chunk_crcs == tuple(
        zlib.crc32(payload[start : start + CHUNK_BYTES]) for start in range(0, num_bytes, CHUNK_BYTES)
    )
    slot.close()


def test_a_slot_that_is_being_written_holds_nothing() -> None:
    slot = Slot.allocate(SlotSize(100, 10))
    for change in (lambda: None, slot.begin, slot.clear):
        change()
        with pytest.raises(CorruptMessageError):
            slot.read()
        fill(slot, 1, b"old")
        slot.read()
    slot.close()


def test_memory_stays_mapped_while_a_tensor_views_it() -> None:
    """Under one of `torch.frombuffer` it was not, and writing to that would hit whatever is mapped there next."""
    slot = Slot.allocate(SlotSize(4096, 10))
    reader = SlotReader(slot, fill(slot, 1, bytes(range(64))), b"", lambda: None)
    tensor = view_of(reader.payload, TensorSlice("", "uint8", (64,), 0, 64))
    reader.close()
    assert not slot._map.closed
    assert tensor.tolist() == list(range(64))


def test_what_owners_have_in_common_is_named_by_its_digest_through_json() -> None:
    common = Manifest.stated(SHARD.common_id(3), 1, 0, CHUNK_BYTES + 5, [7, 8])
    slot = Slot.allocate(SlotSize(ODD, 100))
    plain = Manifest.stated(SHARD, 1, 0, ODD)
    stated = replace(plain, shared=common.version.digest, common_bytes=CHUNK_BYTES + 5, group=3)
    manifest = slot.digest(stated, b"{}")
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert Version.from_json(manifest.version.to_json()).common == common.version
    assert slot.digest(plain, b"{}").version.common is None
    other = Manifest.stated(SHARD.common_id(3), 1, 0, CHUNK_BYTES + 5, [7, 9])
    assert other.version.digest != common.version.digest
    slot.close()


@given(st.data())
def test_no_bit_can_be_flipped_unseen(data: st.DataObject) -> None:
    """In the header, the manifest, the layout or the payload: all that a reader relies on."""
    slot = Slot.allocate(SlotSize(1000, 20))
    manifest = fill(slot, 1, b"payload" * 100, b"the layout")
    text = len(json.dumps(manifest.to_json(), separators=(",", ":")))
    covered = [
        *range(60),
        *range(4096, 4096 + text + 10),
        *range(slot.size.payload_offset, slot.size.payload_offset + 700),
    ]
    place = data.draw(st.sampled_from(covered))
    slot._map[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptMessageError):
        slot.verify()
    slot.close()


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_crcs": []}, {"chunk_crcs": None}, {"chunk_crcs": [1]}, {"chunk_crcs": [1, -1, 2]},
        {"chunk_crcs": [1, 2, True]}, {"layout_crc": None}, {"payload_bytes": -1}, {"step": 1.0}, {"shard": None},
        {"chunk_bytes": 0}, {"payload_bytes": 1 << 60},
    ],
)  # fmt: skip
def test_a_manifest_without_its_digests_is_none(change: dict[str, object]) -> None:
    good = Manifest(SHARD, 1, 0, ODD, CHUNK_BYTES, (1, 2, 3), 2, 5).to_json()
    assert Manifest.from_json(json.loads(json.dumps(good))).chunk_crcs == (1, 2, 3)
    with pytest.raises(CorruptMessageError):
        Manifest.from_json({**good, **change})
    for name in good:
        with pytest.raises(CorruptMessageError):
            Manifest.from_json({key: value for key, value in good.items() if key != name})


def test_a_version_is_named_by_its_bytes_too() -> None:
    manifest = Manifest(SHARD, 1, 0, 10, CHUNK_BYTES, (1,), 2, 5)
    others = [replace(manifest, chunk_crcs=(2,)), replace(manifest, attempt=1), replace(manifest, layout_crc=6)]
    assert len({m.version.digest for m in [manifest, *others]}) == 4
    assert Version.from_json(json.loads(json.dumps(manifest.version.to_json()))) == manifest.version


def test_what_does_not_fit_is_refused_with_the_room_there_is() -> None:
    slot = Slot.allocate(SlotSize(100, 10))
    slot.begin()
    for payload_bytes, layout in ((101, b""), (100, b"eleven byte")):
        with pytest.raises(ValueError, match="room for 100 and 10"):
            slot.digest(Manifest.stated(SHARD, 1, 0, payload_bytes), layout)
    slot.close()


@given(
    st.lists(
        st.builds(SlotView, st.none() | st.tuples(st.integers(0, 1), st.integers(0, 4)), st.booleans(), st.booleans()),
        min_size=2,
        max_size=3,
    ),
    st.none() | st.tuples(st.integers(0, 1), st.integers(0, 4)),
)
def test_a_chosen_slot_never_costs_the_last_version_or_the_one_to_keep(
    slots: list[SlotView], keep: tuple[int, int] | None
) -> None:
    index = choose_slot(slots, keep)
    if index is None:
        return
    chosen, others = slots[index], [slot for i, slot in enumerate(slots) if i != index]
    assert not chosen.busy
    if chosen.order is not None:
        assert chosen.order != keep
        assert any(slot.order is not None for slot in others)
        assert all(slot.order is not None or slot.busy for slot in others)
        assert chosen.settled or (keep is not None and chosen.order < keep)


def test_which_slot_is_next() -> None:
    def complete(step: int, settled: bool = True) -> SlotView:
        return SlotView((0, step), False, settled)

    empty, writing = SlotView(None, False), SlotView(None, True)
    assert choose_slot([empty, empty]) == 0
    assert choose_slot([complete(1), empty]) == 1
    assert choose_slot([complete(1), writing]) is None
    assert choose_slot([complete(2), complete(1)]) == 1
    assert choose_slot([complete(1), complete(2)], keep=(0, 1)) == 1
    assert choose_slot([complete(1), complete(2, settled=False)], keep=(0, 1)) is None
    assert choose_slot([complete(1, settled=False), complete(2)], keep=(0, 2)) == 0


def test_sizes_of_memory() -> None:
    assert [parse_bytes(text) for text in ("5", "2k", "1.5 MB", "64GiB")] == [5, 2000, 1_500_000, 64 << 30]
    for text in ("", "x", "-1", "5 bytes", "1e9"):
        with pytest.raises(ValueError, match="legal forms"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, 8_192_000),
        ("0::/a/b\n", {"a/memory.max": "1000", "a/memory.current": "300"}, 700),
        ("4:memory:/j\n0::/\n", {"memory/j/memory.limit_in_bytes": "9", "memory/j/memory.usage_in_bytes": "10"}, 0),
        ("", {}, 8_192_000),
    ],
)
def test_available_memory_is_what_the_control_groups_leave(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    for name, text in {"proc/meminfo": "MemTotal: 1 kB\nMemAvailable:   8000 kB\n", "proc/self/cgroup": cgroup}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path) == expected


def test_no_trainer_can_cut_the_memory_that_the_holder_reads() -> None:
    slot = Slot.allocate(SlotSize(5000, 100))
    with contextlib.closing(slot), pytest.raises(PermissionError):
        os.ftruncate(slot.descriptor, 4096)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12),
    st.booleans(),
)
def test_runs_say_where_every_byte_comes_from(
    new: list[tuple[int, int]], old: list[tuple[int, int]], has_pieces: bool
) -> None:
    """Pieces of any content and length, with other ones before; and as many as can be are found."""
    payload, base = (bytearray(b"".join(bytes([kind]) * size for kind, size in each)) for each in (new, old))
    pieces, base_pieces = ([size for _, size in each] if has_pieces else [] for each in (new, old))
    runs = runs_of(memoryview(payload), memoryview(base), pieces, base_pieces)
    made = bytearray()
    for length, origin in runs:
        made += payload[len(made) : len(made) + length] if origin < 0 else base[origin : origin + length]
    assert made == payload
    assert all(length > 0 for length, _ in runs)
    found = sum(length for length, origin in runs if origin >= 0)
    if has_pieces:
        alike = [size for (kind, size), other in zip(new, old, strict=False) if (kind, size) == other]
        assert found == (sum(alike) if base else 0)
    else:
        assert found == (len(payload) if payload == base else 0)
