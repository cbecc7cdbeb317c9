"""A checkpoint of all ranks in a directory, as plain torch.distributed.checkpoint (DCP), with digests.

    .metadata  thinwire.json  __0_0.distcp ...

Tensors that are the same on all ranks are stored once, and parts of a DTensor as parts of one tensor, both under their
names in the state (``model.layer.weight``), so any reader of DCP finds them, on any number of ranks. Tensors that
differ are stored as ``rank1.optimizer...``.

Neither DCP nor torch.load compares the bytes with a digest: one flipped bit of a weight comes back unnoticed (tried
with torch 2.13). So ``thinwire.json``, written last, has the digests of ``.metadata`` and of each rank's
``rank1.digests``, and those have the digests of all tensors that the rank needs. A tensor that does not match is not
loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from thinwire.checkpoint.group import gather_json
from thinwire.checkpoint.state.chunks import PartsPlanner, Wanted, read_chunks
from thinwire.checkpoint.state.layout import DTYPES, StateLayout
from thinwire.errors import CorruptMessageError
from thinwire.holder.slots import parse_json
from thinwire.holder.version import field

_ABOUT, _METADATA = "thinwire.json", ".metadata"
_FIELDS = (
    ("topology", str), ("state", str), ("world_size", int), ("attempt", int), ("metadata", str), ("digests", list)
)  # fmt: skip


def write_shards(
    directory: Path, about: dict[str, Any], layout: StateLayout, tensors: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """Write the state of each rank to an empty directory that all ranks see; collective.

    ``about`` has step, attempt, topology, state and world_size. Its file, which rank 0 writes last, makes the other
    files a checkpoint.
    """
    rank = dist.get_rank(group)
    state = _named(layout, tensors, rank, group)
    parts = {name: item.part for name, item in zip(_names(layout), layout.slices, strict=True) if item.part is not None}
    dcp.save(state, checkpoint_id=str(directory), process_group=group, planner=PartsPlanner(parts))
    digests = gather_json(_digest(state[_own(rank, "digests")]), group)
    if rank != 0:
        return
    about |= {"metadata": _digest_of((directory / _METADATA).read_bytes()), "digests": digests}
    with (directory / _ABOUT).open("w") as file:
        file.write(json.dumps({**about, "digest": _digest_of(_canonical(about))}))
        file.flush()
        os.fsync(file.fileno())


def _named(layout: StateLayout, tensors: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Tensors that a rank saves: parts, and those equal on all ranks, under their own names, others under the
    rank's."""
    names = _names(layout)
    digests = {name: _digest(tensor) for name, tensor in zip(names, tensors, strict=True)}
    gathered = gather_json(digests, group)
    described = layout.to_bytes()
    all_digests = {"layout": _digest_of(described), "tensors": digests}
    state = {_own(rank, "layout"): _as_tensor(described), _own(rank, "digests"): _as_tensor(_canonical(all_digests))}
    for item, name, tensor in zip(layout.slices, names, tensors, strict=True):
        same = item.part is not None or all(each.get(name) == digests[name] for each in gathered)
        if tensor.numel():
            state[name if same else _own(rank, name)] = tensor
    return state


def read_about(directory: Path, step: int) -> dict[str, Any]:
    """Read the description of a checkpoint. Raises OSError, or CorruptMessageError if it is of another step, was
    altered, or lacks a digest."""
    about = parse_json((directory / _ABOUT).read_bytes())
    digest = field(about, "digest", str)
    assert isinstance(about, dict), "field has seen to it"
    described = {name: value for name, value in about.items() if name != "digest"}
    _check(_ABOUT, _digest_of(_canonical(described)), digest)
    if field(about, "step", int) != step:
        raise CorruptMessageError(f"it is of step {about['step']}")
    for name, kind in _FIELDS:
        field(about, name, kind)
    return about


class DiskShards:
    """The states of all ranks of a checkpoint on disk. Any rank may read any of them; nothing is collective.

    Raises OSError, ValueError, KeyError or CorruptMessageError wherever files are missing or altered.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        metadata = _digest_of((directory / _METADATA).read_bytes())
        _check(directory / _METADATA, metadata, about["metadata"])
        self.world_size: int = about["world_size"]
        self._about = about
        self._reader = dcp.FileSystemReader(str(directory))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self._layouts: dict[int, StateLayout] = {}
        self._digests: dict[int, dict[str, str]] = {}

    def layout(self, owner: int) -> StateLayout:
        if owner not in self._layouts:
            described, digests = self._whole(_own(owner, "layout")), self._whole(_own(owner, "digests"))
            _check(_own(owner, "digests"), _digest(digests), self._about["digests"][owner])
            expected = json.loads(digests.numpy().tobytes())
            _check(_own(owner, "layout"), _digest(described), expected["layout"])
            self._layouts[owner] = StateLayout.from_bytes(described.numpy().tobytes())
            self._digests[owner] = expected["tensors"]
        return self._layouts[owner]

    def tensors(self, owner: int, numbers: Sequence[int]) -> list[Tensor]:
        """Read the tensors of the slices of these indices."""
        layout = self.layout(owner)
        names, wanted = _names(layout), []
        for number in numbers:
            item = layout.slices[number]
            own = _own(owner, names[number])
            name = own if own in self._metadata.state_dict_metadata else names[number]
            offset = (0,) * len(item.shape) if item.part is None else item.part.offset
            wanted.append(Wanted(name, offset, torch.empty(item.shape, dtype=DTYPES[item.dtype])))
        read_chunks(self._reader, self._metadata, [each for each in wanted if each.tensor.numel()])
        for number, each in zip(numbers, wanted, strict=True):
            _check(each.name, _digest(each.tensor), self._digests[owner][names[number]])
        return [each.tensor for each in wanted]

    def _whole(self, name: str) -> Tensor:
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            raise CorruptMessageError(f"{name} is not a tensor")
        wanted = Wanted(name, (0,), torch.empty(stored.size, dtype=torch.uint8))
        read_chunks(self._reader, self._metadata, [wanted])
        return wanted.tensor


def _names(layout: StateLayout) -> list[str]:
    """Names of the tensors on the disk: their paths, with a suffix where those are not unique."""
    seen: set[str] = set()
    names = []
    for number, item in enumerate(layout.slices):
        names.append(f"{item.path}#{number}" if item.path in seen else item.path)
        seen.add(names[-1])
    return names


def _own(rank: int, name: str) -> str:
    return f"rank{rank}.{name}"


def _check(name: object, found: str, expected: object) -> None:
    if found != expected:
        raise CorruptMessageError(f"{name} was altered, or is of another checkpoint")


def _canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _digest(tensor: Tensor) -> str:
    return _digest_of(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _digest_of(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
