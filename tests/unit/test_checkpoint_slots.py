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

from thinwire.checkpoint.state.layout import TensorSlice, view_of
from thinwire.errors import CorruptMessageError, ThinwireError
from thinwire.holder.client import SlotReader
from thinwire.holder.slots import Slot, SlotSize, SlotView, State, choose_slot, runs_of
from thinwire.holder.store import available_bytes, parse_bytes
from thinwire.holder.version import CHUNK_BYTES, Manifest, ShardId, Version, topology_digest
from thinwire.lab.slot_directory import SlotDirectory

SHARD = ShardId("run", "0123456789abcdef", 3)
ODD = 2 * CHUNK_BYTES + 17


def fill(slot: Slot, step: int, payload: bytes, layout: bytes = b"{}") -> Manifest:
    slot.begin()
    slot.payload()[: len(payload)] = payload
    manifest = slot.digest(SHARD, step, 0, len(payload), layout)
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
    assert slot.state is State.EMPTY
    fill(slot, 1, b"old")
    assert slot.state is State.COMPLETE
    slot.begin()
    assert slot.state is State.WRITING
    with pytest.raises(CorruptMessageError):
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


@pytest.mark.parametrize("shared", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 5, ODD])
def test_the_digest_of_what_owners_share_is_of_that_alone(shared: int) -> None:
    """Whatever follows it, and wherever it ends in a chunk; and it survives the way through JSON."""
    slot = Slot.allocate(SlotSize(ODD, 100))

    def digest(payload_bytes: int = ODD) -> str:
        manifest = slot.digest(SHARD, 1, 0, payload_bytes, b"{}", shared)
        assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))).version.shared == manifest.shared
        assert Version.from_json(manifest.version.to_json()).shared == manifest.shared
        return manifest.shared

    first = digest()
    for place in {0, shared // 2, shared - 1, min(shared, ODD - 1), ODD - 1}:
        slot.payload()[place] ^= 4
        assert (digest() == first) == (place >= shared), place
        slot.payload()[place] ^= 4
    assert digest(shared) == first
    assert slot.digest(SHARD, 1, 0, ODD, b"{}").shared == ""
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
            slot.digest(SHARD, 1, 0, payload_bytes, layout)
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


def write_step(slots: SlotDirectory, step: int, payload: bytes, keep_step: int | None = None) -> bool:
    writer = slots.slot(step, keep_step)
    if writer is None:
        return False
    writer.payload[: len(payload)] = payload
    writer.payload.release()
    writer.publish(b"{}", len(payload))
    return True


def test_a_directory_of_slots_survives_its_process(tmp_path: Path) -> None:
    with SlotDirectory(tmp_path) as slots:
        slots.hello("run", {"n": 1}, 0, 1000)
        assert [write_step(slots, step, bytes([step]) * 1000) for step in (1, 2, 3)] == [True] * 3
        writer = slots.slot(4)  # and it dies here
        assert writer is not None
        writer.payload[:] = bytes(1000)
        writer.payload.release()
    with SlotDirectory(tmp_path) as slots:
        slots.hello("run", {"n": 1}, 0, 1000)
        (version,) = slots.inventory()
        assert (version.step, version.shard.topology) == (3, topology_digest({"n": 1}))
        assert slots.inventory("another run") == []
        with slots.open(version) as reader:
            assert isinstance(reader, SlotReader)
            assert bytes(reader.payload) == b"\3" * 1000
        assert slots.status()["newest_local"] == 3
        with pytest.raises(ValueError, match="alive"), SlotDirectory(tmp_path) as second:
            second.hello("run", {"n": 1}, 0, 1000)
    with SlotDirectory(tmp_path) as slots:
        assert slots.forget("run") == 1
        assert list(tmp_path.iterdir()) == []


def test_a_reader_of_a_directory_keeps_its_version(tmp_path: Path) -> None:
    with SlotDirectory(tmp_path) as slots:
        slots.hello("run", {}, 0, 10)
        assert write_step(slots, 1, b"1")
        assert write_step(slots, 2, b"2")
        with slots.open(slots.inventory()[0]) as reader:
            assert reader.manifest.step == 1
            assert write_step(slots, 3, b"3")
            assert bytes(reader.payload) == b"1"
        assert sorted(version.step for version in slots.inventory()) == [1, 3]


def test_an_altered_file_is_no_version(tmp_path: Path) -> None:
    with SlotDirectory(tmp_path) as slots:
        slots.hello("run", {}, 0, 10)
        write_step(slots, 1, b"1")
        (path,) = [
            path
            for path in tmp_path.glob("*.slot")
            if b"TWSLOT" in path.read_bytes() and b'"step":1' in path.read_bytes()
        ]
        content = bytearray(path.read_bytes())
        content[-4096] ^= 1
        path.write_bytes(content)
        assert slots.inventory() == []


def test_a_directory_says_what_it_cannot_do(tmp_path: Path) -> None:
    with SlotDirectory(tmp_path) as slots:
        with pytest.raises(ValueError, match="no replicas"):
            slots.hello("run", {}, 0, 10, replicas=["10.0.0.1:1"])
        slots.hello("run", {}, 0, 10)
        version = Version(SHARD, 1, 0, 10, "0" * 16)
        with pytest.raises(ValueError, match="holder on each host"):
            slots.fetch(version, "10.0.0.1:1")
        with pytest.raises(ThinwireError, match="no such"):
            slots.open(version)


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
