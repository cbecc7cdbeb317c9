"""Names of checkpoint versions, and the digests of their bytes; strict about messages from others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from thinwire.errors import CorruptMessageError

CHUNK_BYTES = 4 << 20  # covered by one digest; still warm in the cache when it has just arrived
MAX_PAYLOAD_BYTES = 1 << 44
MAX_LAYOUT_BYTES = 64 << 20
NONCE_BITS = 32
_MAX_NAME = 256


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
        found = {name: field(values, name, *_FIELDS[name]) for name in _fields_of(cls)}
        if "shard" in found:
            found["shard"] = ShardId.from_json(found["shard"])
        return cls(**found)


def _fields_of(kind: Any) -> Iterable[str]:
    return kind.__dataclass_fields__


@dataclass(frozen=True)
class ShardId(Record):
    """The state of one rank, named by run, topology (see ``topology_digest``), and global rank in it."""

    run_id: str
    topology: str
    owner: int

    def __str__(self) -> str:
        return f"shard {self.owner} of run {self.run_id!r}, topology {self.topology}"


@dataclass(frozen=True)
class Version(Record):
    """One complete copy as an inventory lists it.

    ``attempt`` names the start of the run that wrote it (``next_attempt``; later ones are larger), so that a step that
    was trained twice is not taken for one version. ``digest`` names the bytes: copies with the same digest are the
    same; ``shared`` those that all owners should have alike, or empty. ``role`` is ``own`` on the host of a registered
    trainer, else ``replica``.
    """

    shard: ShardId
    step: int
    attempt: int
    payload_bytes: int
    digest: str
    role: str = "replica"
    shared: str = ""


@dataclass(frozen=True)
class Manifest(Record):
    """All data needed to check a copy: lengths in bytes, and the CRC-32 of the layout and of each payload chunk.

    ``shared`` is a digest of the first bytes of the payload, those that all owners should have alike. Without all of
    its digests there is no manifest: it fails closed.
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
        return Version(self.shard, self.step, self.attempt, self.payload_bytes, digest, shared=self.shared)

    def listed(self, role: str) -> Version:
        return replace(self.version, role=role)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, newest last: a later attempt went on from a version of an earlier one."""
        return self.attempt, self.step


_FIELDS: dict[str, tuple[Any, ...]] = {
    "run_id": (str, 1, _MAX_NAME), "topology": (str, 1, _MAX_NAME), "owner": (int, 0, 1 << 31),
    "shard": (dict,), "step": (int,), "attempt": (int,), "payload_bytes": (int, 0, MAX_PAYLOAD_BYTES),
    "digest": (str, 16, 16), "role": (str, 1, 16), "shared": (str, 0, 16), "chunk_bytes": (int, 1, 1 << 30),
    "chunk_crcs": (list,), "layout_bytes": (int, 0, MAX_LAYOUT_BYTES), "layout_crc": (int, 0, (1 << 32) - 1),
}  # fmt: skip
"""Type and range of each field, as `field` takes them."""


@dataclass(frozen=True)
class StoredStep:
    """A step of a run in the memory of some hosts, stored in one topology.

    ``copies``: for each owner, the copies of its shard by the address of their holder. Owners whose copies differ are
    in ``unlike`` instead: none of their copies is to be trusted.
    """

    topology: str
    attempt: int
    step: int
    copies: dict[int, dict[str, Version]]
    unlike: frozenset[int]

    @property
    def order(self) -> tuple[int, int]:
        return start_order(self.attempt, self.step)


def stored_steps(inventories: Mapping[str, Iterable[Version]]) -> list[StoredStep]:
    """Return the steps of one run in these inventories, by the addresses of their holders; the newest attempt and step
    first."""
    found: dict[tuple[int, int, str], dict[int, list[tuple[str, Version]]]] = {}
    for holder, versions in sorted(inventories.items()):
        for version in versions:
            of_step = found.setdefault((version.attempt, version.step, version.shard.topology), {})
            of_step.setdefault(version.shard.owner, []).append((holder, version))
    steps = []
    for (attempt, step, topology), of_step in sorted(found.items(), key=lambda each: each[0], reverse=True):
        contents = {owner: {(v.payload_bytes, v.digest) for _, v in copies} for owner, copies in of_step.items()}
        unlike = frozenset(owner for owner, different in contents.items() if len(different) > 1)
        alike = {owner: dict(copies) for owner, copies in of_step.items() if owner not in unlike}
        steps.append(StoredStep(topology, attempt, step, alike, unlike))
    return steps


def chunk_count(payload_bytes: int, chunk_bytes: int) -> int:
    return -(-payload_bytes // chunk_bytes)
