"""Versions in memory that another number of ranks stored: their inventory, and their shards, fetched to this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint.group import failures_of, gather_json
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.layout import StateLayout, view_of
from thinwire.errors import ThinwireError
from thinwire.holder.client import SlotReader
from thinwire.holder.faultpoint import reach
from thinwire.holder.version import Version, start_order


@dataclass(frozen=True)
class ForeignVersion:
    """A step of another topology. ``copies``: for each owner, its shard's copies by the address of the holder."""

    topology: str
    attempt: int
    step: int
    copies: Mapping[int, Mapping[str, Version]]

    @property
    def order(self) -> tuple[int, int]:
        return start_order(self.attempt, self.step)


def foreign_versions(inventories: Mapping[str, Sequence[Version]], run_id: str, topology: str) -> list[ForeignVersion]:
    """Return all steps of a run that were stored in other topologies than this one, newest first.

    Shards of which copies differ are left out.
    """
    copies: dict[tuple[str, int, int], dict[int, dict[str, Version]]] = {}
    for holder, versions in sorted(inventories.items()):
        for version in versions:
            shard = version.shard
            if shard.run_id == run_id and shard.topology != topology:
                of_step = copies.setdefault((shard.topology, version.attempt, version.step), {})
                of_step.setdefault(shard.owner, {})[holder] = version
    found = []
    for (other, attempt, step), of_step in copies.items():
        alike = {owner: c for owner, c in of_step.items() if len({version.digest for version in c.values()}) == 1}
        found.append(ForeignVersion(other, attempt, step, alike))
    return sorted(found, key=lambda version: (*version.order, version.topology), reverse=True)


def gather_layouts(
    version: ForeignVersion, registration: Registration, group: dist.ProcessGroup
) -> dict[int, StateLayout]:
    """Gather the layouts of the shards of a version on all ranks; collective. Unreadable ones are left out."""
    mine: dict[str, str] = {}
    if registration.client is not None and registration.holders.index(registration.here) == registration.rank:
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

    The constructor is collective. It raises ThinwireError on all ranks if one of them cannot get its shards, or has an
    ``error`` to report instead.
    """

    def __init__(
        self,
        version: ForeignVersion,
        needed: set[int],
        registration: Registration,
        group: dist.ProcessGroup,
        error: str = "",
    ) -> None:
        self._readers: dict[int, SlotReader] = {}
        self._layouts: dict[int, StateLayout] = {}
        self._group = group
        self._agree(error)
        needs = gather_json(sorted(needed), group)
        self._all(lambda: self._fetch(version, needs, registration))
        self._all(lambda: self._open(version, needed, registration))

    def _all(self, do: Callable[[], None]) -> None:
        reason = ""
        try:
            do()
        except (ThinwireError, ValueError, OSError) as error:
            reason = str(error)
        self._agree(reason)

    def _agree(self, reason: str) -> None:
        failed = failures_of(reason, self._group)
        if failed:
            self.close()
            raise ThinwireError(failed)

    @staticmethod
    def _fetch(version: ForeignVersion, needs: list[list[int]], registration: Registration) -> None:
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

    def _open(self, version: ForeignVersion, needed: set[int], registration: Registration) -> None:
        for owner in sorted(needed):
            if registration.client is None:
                raise ThinwireError("the holder of this host is gone")
            reader = registration.client.open(next(iter(version.copies[owner].values())))
            self._readers[owner] = reader
            self._layouts[owner] = StateLayout.from_bytes(reader.layout)

    def tensors(self, owner: int, numbers: Sequence[int]) -> list[Tensor]:
        slices, payload = self._layouts[owner].slices, self._readers[owner].payload
        return [view_of(payload, slices[number]) for number in numbers]

    def verify(self) -> None:
        """Compare all shards with their digests. Raises CorruptMessageError."""
        for reader in self._readers.values():
            reader.verify()

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
