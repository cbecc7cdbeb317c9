"""Names of checkpoint versions, and the digests of their bytes; strict about messages from others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from functools import cache, cached_property
from typing import Any, Self, TypeVar

from thinwire.errors import CorruptMessageError

CHUNK_BYTES = 4 << 20  # covered by one digest; still warm in the cache when it has just arrived
MAX_PAYLOAD_BYTES = 1 << 44
MAX_LAYOUT_BYTES = 64 << 20
NONCE_BITS = 32
_MAX_NAME = 256

T = TypeVar("T")


def topology_digest(topology: dict[str, Any]) -> str:
    """Return the name of a topology: 16 hexadecimal digits of the SHA-256 of its JSON, for any order of keys."""
    text = json.dumps(topology, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def next_attempt(seen: Iterable[int], nonce: int) -> int:
    """Return the number of a new start of a run: above all that were ``seen``, and different from any other start's.

    Its upper bits count; the lower 32 are ``nonce``, random and the same on all ranks. Two starts that did not see each
    other's versions, because the hosts that have them were away, would else count to the same number, and their shards
    of one step would be taken for one version.
    """
    return (max((attempt >> NONCE_BITS for attempt in seen), default=-1) + 1) << NONCE_BITS | nonce


def start_order(attempt: int, step: int) -> tuple[int, int]:
    """Return a sort key, newest last: the start of the run that wrote a step, without the random bits, and the step."""
    return attempt >> NONCE_BITS, step


def field(values: Any, name: str, kind: type, low: int = 0, high: int = 1 << 62) -> Any:
    """Return a field of a JSON object. Raises CorruptMessageError unless it is there, of that type, and in range.

    For texts, ``high`` bounds the length; a bool is no int.
    """
    value = values.get(name) if isinstance(values, dict) else None
    if type(value) is not kind:
        raise CorruptMessageError(f"{name!r} is {type(value).__name__}, expected {kind.__name__}")
    size = len(value) if kind in (str, list) else value
    if kind in (str, list, int) and not low <= size <= high:
        raise CorruptMessageError(f"{name!r} is out of range: {str(value)[:40]}")
    return value


class Record:
    """A named thing that crosses a process boundary as JSON: a frozen dataclass whose fields are all in _FIELDS."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields; `dataclasses.asdict` costs ten times as much, and a holder needs this at every turn."""
        values = {name: getattr(self, name) for name in _fields_of(type(self))}
        return {name: value.to_json() if isinstance(value, Record) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Parse one. Raises CorruptMessageError if a field is missing, of another type, or out of range."""
        result = {name: field(values, name, *_FIELDS[name]) for name in _fields_of(cls)}
        if "shard" in result:
            result["shard"] = ShardId.from_json(result["shard"])
        return cls(**result)


def _fields_of(kind: Any) -> Iterable[str]:
    return kind.__dataclass_fields__


@dataclass(frozen=True)
class ShardId(Record):
    """The state of one rank, named by run, topology (see ``topology_digest``), and global rank in it.

    What a group of ranks has in common has the owner -1 - group (`common_id`), and is kept once on each of their hosts.
    """

    run_id: str
    topology: str
    owner: int

    def common_id(self, group: int) -> ShardId:
        """Name what the ranks of a group have in common."""
        return ShardId(self.run_id, self.topology, -1 - group)

    def __str__(self) -> str:
        what = f"shard {self.owner}" if self.owner >= 0 else f"common state of group {-1 - self.owner}"
        return f"{what} of run {self.run_id!r}, topology {self.topology}"


@dataclass(frozen=True)
class Version(Record):
    """One complete copy as an inventory lists it.

    ``attempt`` names the start of the run that wrote it (``next_attempt``; later ones are larger), so that a step that
    was trained twice is not taken for one version. ``digest`` names the bytes: copies with the same digest are the
    same; ``shared`` those that all owners of a ``group`` should have alike, or empty. ``role`` is ``own`` on the host
    of a registered trainer, else ``replica``. Of the state, ``common_bytes`` are not in this copy, but in ``common``.
    """

    shard: ShardId
    step: int
    attempt: int
    payload_bytes: int
    digest: str
    role: str = "replica"
    shared: str = ""
    common_bytes: int = 0
    group: int = 0

    @property
    def common(self) -> Version | None:
        """The version of the bytes that its owner has in common with others, whose digest is ``shared``."""
        if not self.common_bytes:
            return None
        shard = self.shard.common_id(self.group)
        return Version(shard, self.step, self.attempt, self.common_bytes, self.shared)


@dataclass(frozen=True)
class Manifest(Record):
    """All data needed to check a copy: lengths in bytes, and the CRC-32 of the layout and of each payload chunk.

    ``shared`` is the digest of the bytes that all owners of a ``group`` should have alike: the name of their version,
    of ``common_bytes``, if they are kept in one of their own. Without all of its digests there is no manifest: it fails
    closed.
    """

    shard: ShardId
    step: int
    attempt: int
    payload_bytes: int
    chunk_bytes: int
    chunk_crcs: tuple[int, ...]
    layout_bytes: int
    layout_crc: int
    shared: str = ""
    common_bytes: int = 0
    group: int = 0

    @classmethod
    def stated(cls, shard: ShardId, step: int, attempt: int, num_bytes: int, crcs: Sequence[int] = ()) -> Manifest:
        """Return the manifest of a payload without a layout, from the CRC-32s of its chunks that are known so far."""
        return cls(shard, step, attempt, num_bytes, CHUNK_BYTES, tuple(crcs), 0, 0)

    @classmethod
    def from_json(cls, values: Any) -> Manifest:
        manifest = super().from_json(values)
        crcs = tuple(manifest.chunk_crcs)
        if not all(type(crc) is int and 0 <= crc < 1 << 32 for crc in crcs):
            raise CorruptMessageError("a digest is not a CRC-32")
        if len(crcs) != chunk_count(manifest.payload_bytes, manifest.chunk_bytes):
            raise CorruptMessageError(f"{len(crcs)} digests for {manifest.payload_bytes} bytes: some are missing")
        return replace(manifest, chunk_crcs=crcs)

    @cached_property
    def version(self) -> Version:
        text = json.dumps(self.to_json(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        named = self.shard, self.step, self.attempt, self.payload_bytes, digest
        return Version(*named, shared=self.shared, common_bytes=self.common_bytes, group=self.group)

    def listed(self, role: str) -> Version:
        return replace(self.version, role=role)

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return the bytes of the chunks from ``first`` to before ``last``."""
        start, end = (min(number * self.chunk_bytes, self.payload_bytes) for number in (first, last))
        return start, max(start, end)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, newest last: a later attempt went on from a version of an earlier one."""
        return self.attempt, self.step


_FIELDS: dict[str, tuple[Any, ...]] = {
    "run_id": (str, 1, _MAX_NAME), "topology": (str, 1, _MAX_NAME), "owner": (int, -(1 << 31), 1 << 31),
    "shard": (dict,), "step": (int,), "attempt": (int,), "payload_bytes": (int, 0, MAX_PAYLOAD_BYTES),
    "digest": (str, 16, 16), "role": (str, 1, 16), "shared": (str, 0, 16),
    "common_bytes": (int, 0, MAX_PAYLOAD_BYTES), "group": (int, 0, 1 << 31), "chunk_bytes": (int, 1, 1 << 30),
    "chunk_crcs": (list,), "layout_bytes": (int, 0, MAX_LAYOUT_BYTES), "layout_crc": (int, 0, (1 << 32) - 1),
}  # fmt: skip
"""Type and range of each field, as `field` takes them."""


@dataclass(frozen=True)
class StoredStep:
    """A step of a run in the memory of some hosts, stored in one topology.

    ``copies``: for each owner, the copies of its shard by the address of their holder. Owners whose copies differ are
    in ``unlike`` instead: none of their copies is to be trusted. ``common``: the holders of what owners have in common,
    by its digest.
    """

    topology: str
    attempt: int
    step: int
    copies: dict[int, dict[str, Version]]
    unlike: frozenset[int]
    common: dict[str, tuple[str, ...]] = field_of(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        return start_order(self.attempt, self.step)

    @property
    def certified(self) -> bool | None:
        """Whether all owners have alike what they should; None if nothing of it was to be alike, or there is one."""
        shared = {(version.group, version.shared) for copies in self.copies.values() for version in copies.values()}
        if all(not digest for _, digest in shared) or len(self.copies) < 2:
            return None
        return len(shared) == len({group for group, _ in shared})

    @property
    def lacking(self) -> list[int]:
        """Owners whose state has a part in common with others that no holder has."""
        first = {owner: next(iter(copies.values())) for owner, copies in self.copies.items()}
        return sorted(o for o, version in first.items() if version.common_bytes and version.shared not in self.common)


def preferred(result: Sequence[T], certified: Callable[[T], bool | None]) -> T | None:
    """Return the version to go back to, of some that are sorted, the newest first.

    It is the newest one, unless its owners are known to differ and there is an older certified one. Where ranks were
    not compared (``certified`` is None), newer versions that differ are no sign of corruption: the newest is taken.

    Example: preferred([46, 40, 30], {46: False, 40: True, 30: True}.get) == 40
    """
    for each in result:
        if (verdict := certified(each)) is not False:
            return each if verdict else result[0]
    return result[0] if result else None


def stored_steps(inventories: Mapping[str, Iterable[Version]]) -> list[StoredStep]:
    """Return the steps of one run in these inventories, by the addresses of their holders; the newest attempt and step
    first."""
    result: dict[tuple[int, int, str], dict[int, list[tuple[str, Version]]]] = {}
    for holder, versions in sorted(inventories.items()):
        for version in versions:
            of_step = result.setdefault((version.attempt, version.step, version.shard.topology), {})
            of_step.setdefault(version.shard.owner, []).append((holder, version))
    steps = []
    for (attempt, step, topology), of_all in sorted(result.items(), key=lambda each: each[0], reverse=True):
        common: dict[str, tuple[str, ...]] = {}
        for holder, version in (each for owner, copies in of_all.items() if owner < 0 for each in copies):
            common[version.digest] = (*common.get(version.digest, ()), holder)
        of_step = {owner: copies for owner, copies in of_all.items() if owner >= 0}
        contents = {owner: {(v.payload_bytes, v.digest) for _, v in copies} for owner, copies in of_step.items()}
        unlike = frozenset(owner for owner, different in contents.items() if len(different) > 1)
        alike = {owner: dict(copies) for owner, copies in of_step.items() if owner not in unlike}
        steps.append(StoredStep(topology, attempt, step, alike, unlike, common))
    return steps


def chunk_count(payload_bytes: int, chunk_bytes: int) -> int:
    return -(-payload_bytes // chunk_bytes)


_CRC_POLYNOMIAL = 0xEDB88320


def _times(a: int, b: int) -> int:
    """Multiply two polynomials of GF(2) modulo that of CRC-32, bits reversed."""
    result = 0
    for bit in range(31, -1, -1):
        result ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (_CRC_POLYNOMIAL if b & 1 else 0)
    return result


@cache
def _shift_by(num_bytes: int) -> int:
    """x to the power of that many bytes' bits, by squaring."""
    if num_bytes < 2:
        return 1 << 31 - 8 * num_bytes
    half = _shift_by(num_bytes // 2)
    return _times(_times(half, half), _shift_by(num_bytes % 2))


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two texts in one from those of each, and the length of the second one."""
    return _times(_shift_by(second_bytes), first) ^ second
