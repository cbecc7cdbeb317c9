"""Versions in the memory of all hosts: their inventory, the step that all ranks restore, and its shards.

A version that another number of ranks stored is *foreign*: its shards are fetched to the hosts that need them.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint.choice import Choice, choose
from thinwire.checkpoint.group import gather_json, on_all
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import CorruptMessageError, ThinwireError
from thinwire.holder.client import HolderClient, SlotReader
from thinwire.holder.faultpoint import reach
from thinwire.holder.version import NONCE_BITS, StoredStep, Version, next_attempt, stored_steps


def foreign_steps(inventories: Mapping[str, Sequence[Version]], run_id: str, topology: str) -> list[StoredStep]:
    """Return all steps of a run that were stored in other topologies than this one, newest first."""
    foreign = {
        holder: [each for each in versions if each.shard.run_id == run_id and each.shard.topology != topology]
        for holder, versions in inventories.items()
    }
    return sorted(stored_steps(foreign), key=lambda stored: (*stored.order, stored.topology), reverse=True)


def gather_layouts(version: StoredStep, registration: Registration, group: dist.ProcessGroup) -> dict[int, StateLayout]:
    """Gather the layouts of the shards of a version on all ranks; collective. Unreadable ones are left out."""
    mine: dict[str, str] = {}
    if registration.client is not None and registration.is_first:
        for owner, copies in version.copies.items():
            if min(copies) == registration.here:
                try:
                    with registration.client.open(copies[registration.here]) as reader:
                        mine[str(owner)] = reader.layout.decode()
                except (ThinwireError, ValueError, OSError):
                    continue
    told: list[dict[str, str]] = gather_json(mine, group)
    return {int(owner): StateLayout.from_bytes(text.encode()) for each in told for owner, text in each.items()}


def is_whole(layouts: Mapping[int, StateLayout], about: Mapping[str, Any]) -> bool:
    """Return whether these are the shards of all ranks of one state, and fit a training described by ``about``."""
    sizes = {layout.about.get("world_size") for layout in layouts.values()}
    states = {layout.about.get("state") for layout in layouts.values()}
    return sizes == {len(layouts)} and set(layouts) == set(range(len(layouts))) and states == {about.get("state")}


class ForeignShards:
    """The shards of a version that each rank needs, fetched to its host.

    The constructor is collective. It raises ThinwireError on all ranks if one of them cannot get its shards.
    """

    def __init__(
        self, version: StoredStep, needed: set[int], registration: Registration, group: dist.ProcessGroup
    ) -> None:
        self._readers: dict[int, SlotReader] = {}
        self._tensors: dict[int, Sequence[Tensor]] = {}
        needs = gather_json(sorted(needed), group)
        try:
            on_all(group, lambda: self._fetch(version, needs, registration))
            on_all(group, lambda: self._open(version, needed, registration))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _fetch(version: StoredStep, needs: list[list[int]], registration: Registration) -> None:
        """Ranks of a host share the fetching of its missing shards."""
        here = [rank for rank, holder in enumerate(registration.holders) if holder == registration.here]
        lacking = sorted(
            {owner for rank in here for owner in needs[rank] if registration.here not in version.copies[owner]}
        )
        for owner in lacking[here.index(registration.rank) :: len(here)]:
            source = min(version.copies[owner])
            if registration.client is None:
                raise ThinwireError("the holder of this host is gone")
            reach("fetch")
            registration.client.fetch(version.copies[owner][source], source)

    def _open(self, version: StoredStep, needed: set[int], registration: Registration) -> None:
        for owner in sorted(needed):
            if registration.client is None:
                raise ThinwireError("the holder of this host is gone")
            reader = registration.client.open(next(iter(version.copies[owner].values())))
            self._readers[owner] = reader
            self._tensors[owner] = tensors_of(StateLayout.from_bytes(reader.layout), reader.payload)

    def tensors(self, owner: int, numbers: Sequence[int]) -> list[Tensor]:
        return [self._tensors[owner][number] for number in numbers]

    def verify(self) -> None:
        """Compare all shards with their digests. Raises CorruptMessageError."""
        for reader in self._readers.values():
            reader.verify()

    def close(self) -> None:
        self._tensors.clear()
        for reader in self._readers.values():
            reader.close()


@dataclass(frozen=True)
class Survey:
    """Versions of a run in the memory of all hosts, by the holders that answered, and the step to go back to.

    ``attempt`` is that of new versions, above all that were seen, and different each time.
    """

    choice: Choice
    attempt: int
    inventories: dict[str, list[Version]]


def survey(
    registration: Registration,
    run_id: str,
    topology: str,
    group: dist.ProcessGroup,
    placed: Mapping[str, Collection[int]] | None = None,
) -> Survey:
    """Gather the inventories of all holders and choose the step to restore, the same on all ranks; collective.

    The first rank of each host asks: the holder then compares all bytes with their digests. ``placed`` as in `choose`.
    """
    holders, mine = registration.holders, None
    if registration.client is not None and registration.is_first:
        with contextlib.suppress(ThinwireError):
            mine = [version.to_json() for version in registration.client.inventory(run_id)]
    told = gather_json({"versions": mine, "nonce": secrets.randbits(NONCE_BITS)}, group)
    inventories = {
        holder: [Version.from_json(version) for version in each["versions"]]
        for holder, each in zip(holders, told, strict=True)
        if each["versions"] is not None
    }
    of_run = [version for versions in inventories.values() for version in versions if version.shard.run_id == run_id]
    attempt = next_attempt((version.attempt for version in of_run), told[0]["nonce"])
    reach("survey")
    return Survey(choose(inventories, holders, run_id, topology, placed), attempt, inventories)


def load_shard(client: HolderClient, choice: Choice, rank: int, here: str, training: TrainingState) -> int:
    """Fetch the shard of this rank to this host if it is missing, load it in place, and return its step.

    The loaded bytes are compared with their digests once more: minutes can be between the survey and now, and a process
    that was considered dead may still write. Raises ThinwireError if its source is lost or its bytes are wrong: then
    survey again.
    """
    version, source = choice.versions[rank], choice.sources[rank]
    if source != here:
        reach("fetch")
        client.fetch(version, source)
    with client.open(version) as reader:
        layout = StateLayout.from_bytes(reader.layout)
        step = training.load(layout, tensors_of(layout, reader.payload))
        reader.verify()
    if step != version.step:
        raise CorruptMessageError(f"{version.shard}: a state of step {step} in the version of step {version.step}")
    client.keep(version)
    return step
