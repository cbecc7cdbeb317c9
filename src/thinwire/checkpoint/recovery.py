"""Versions in the memory of all hosts: their inventory, the step that all ranks restore, and its shards.

A version that another number of ranks stored is *foreign*: its shards are fetched to the hosts that need them.
"""

import contextlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from thinwire.checkpoint.choice import Choice, choose
from thinwire.checkpoint.group import gather_json, on_all
from thinwire.checkpoint.holder.client import HolderClient, SlotReader
from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.frames import closed_on_error
from thinwire.checkpoint.holder.start import KnownRun
from thinwire.checkpoint.holder.version import NONCE_BITS, StoredStep, Version, next_attempt, stored_steps
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import CorruptMessageError, ThinwireError

_PATIENCE_SECONDS = 3  # with a holder outside of the job, which may be lost


def foreign_steps(inventories: Mapping[str, Sequence[Version]], run_id: str, topology: str) -> list[StoredStep]:
    """Return all steps of a run that were stored in other topologies than this one, newest first."""
    foreign = {
        holder: [each for each in versions if each.shard.run_id == run_id and each.shard.topology != topology]
        for holder, versions in inventories.items()
    }
    return sorted(stored_steps(foreign), key=lambda stored: (*stored.order, stored.topology), reverse=True)


def gather_layouts(version: StoredStep, registration: Registration) -> dict[int, StateLayout]:
    """Gather the layouts of the shards of a version on all ranks; collective.

    Unreadable ones are left out, and those of owners whose part in common with others nobody has.
    """
    mine: dict[str, str] = {}
    client, here, inside = registration.client, registration.here, sorted(set(registration.holders))
    if client is not None and registration.is_first:
        for owner, copies in version.copies.items():
            if owner in version.lacking:
                continue
            source = _source(copies, inside)
            if here == (source if source in inside else inside[owner % len(inside)]):
                try:
                    layout = StateLayout.from_bytes(_layout(client, copies[source], source, here))
                    mine[str(owner)] = layout.to_bytes().decode()
                except (ThinwireError, ValueError, OSError):
                    continue
    gathered: list[dict[str, str]] = gather_json(mine, registration.group)
    return {int(owner): StateLayout.from_bytes(text.encode()) for each in gathered for owner, text in each.items()}


def _source(copies: Mapping[str, Version], inside: Collection[str]) -> str:
    """The holder to take a copy from: rather one of this job, whose bytes are verified."""
    return min(copies, key=lambda holder: (holder not in inside, holder))


def _layout(client: HolderClient, version: Version, source: str, here: str) -> bytes:
    if source != here:
        return client.layout(version, source)
    with client.open(version, with_common=False) as reader:
        return reader.layout


def is_whole(layouts: Mapping[int, StateLayout], about: Mapping[str, Any]) -> bool:
    """Return whether these are the shards of all ranks of one state, and fit a training described by ``about``."""
    sizes = {layout.about.get("world_size") for layout in layouts.values()}
    states = {layout.about.get("state") for layout in layouts.values()}
    return sizes == {len(layouts)} and set(layouts) == set(range(len(layouts))) and states == {about.get("state")}


class ForeignShards:
    """The shards of a version that each rank needs, fetched to its host.

    The constructor is collective. It raises ThinwireError on all ranks if one of them cannot get its shards.
    """

    def __init__(self, version: StoredStep, needed: set[int], registration: Registration) -> None:
        group = registration.group
        self._readers: dict[int, SlotReader] = {}
        self._tensors: dict[int, Sequence[Tensor]] = {}
        needs = gather_json(sorted(needed), group)
        with closed_on_error(self):
            on_all(group, lambda: self._fetch(version, needs, registration))
            on_all(group, lambda: self._open(version, needed, registration))

    @staticmethod
    def _fetch(version: StoredStep, needs: list[list[int]], registration: Registration) -> None:
        """Ranks of a host share the fetching of its missing shards."""
        here = [rank for rank, holder in enumerate(registration.holders) if holder == registration.here]
        lacking = sorted(
            {owner for rank in here for owner in needs[rank] if registration.here not in version.copies[owner]}
        )
        for owner in lacking[here.index(registration.rank) :: len(here)]:
            source = _source(version.copies[owner], registration.holders)
            if registration.client is None:
                raise ThinwireError("the holder of this host is gone")
            reach("fetch")
            registration.client.fetch(version.copies[owner][source], source)

    def _open(self, version: StoredStep, needed: set[int], registration: Registration) -> None:
        for owner in sorted(needed):
            if registration.client is None:
                raise ThinwireError("the holder of this host is gone")
            copy = next(iter(version.copies[owner].values()))
            bring_common(registration.client, copy, version.common, registration.here)
            reader = registration.client.open(copy)
            self._readers[owner] = reader
            self._tensors[owner] = tensors_of(StateLayout.from_bytes(reader.layout), reader.payload, reader.common)

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

    ``attempt`` is that of new versions, above all that were seen, and different each time. ``silent``: holders outside
    of the job that were asked and did not answer, and why. What ``known`` says was given up, while a host was away, is
    left out; ``compares`` as in `choose`.
    """

    choice: Choice
    attempt: int
    inventories: dict[str, list[Version]]
    known: KnownRun
    compares: bool
    silent: dict[str, str] = field(default_factory=dict)


def survey(registration: Registration, known: KnownRun | None = None, compares: bool = True) -> Survey:
    """Gather the inventories of all holders and choose the step to restore, the same on all ranks; collective.

    The first rank of each host asks: the holder then compares all bytes with their digests. ``known`` and ``compares``
    as in `Survey`.
    """
    mine: dict[str, Any] = {"nonce": secrets.randbits(NONCE_BITS)}
    if registration.client is not None and registration.is_first:
        with contextlib.suppress(ThinwireError):
            mine["versions"] = [each.to_json() for each in registration.client.inventory(registration.run_id)]
    answers = gather_json(mine, registration.group)
    listed = {h: each["versions"] for h, each in zip(registration.holders, answers, strict=True) if "versions" in each}
    reach("survey")
    return _surveyed(registration, listed, Survey(Choice(None), answers[0]["nonce"], {}, known or KnownRun(), compares))


def ask_outside(before: Survey, addresses: Collection[str], registration: Registration, verify: bool) -> Survey:
    """Ask holders outside of the job too, such as that of a host whose agent died, and choose again; collective.

    Each host asks some of them, under the secret of the job. They only send: none of them becomes a part of the job.
    With ``verify`` they compare bytes with digests first.
    """
    inside = sorted(set(registration.holders))
    mine: tuple[dict[str, Any], dict[str, str]] = {}, {}
    if registration.client is not None and registration.is_first:
        with contextlib.suppress(ThinwireError, ValueError):
            asked = sorted(addresses)[inside.index(registration.here) :: len(inside)]
            result, silent = registration.client.look(registration.run_id, asked, _PATIENCE_SECONDS, verify)
            mine = {address: [each.to_json() for each in versions] for address, versions in result.items()}, silent
    listed, silent = {}, dict(before.silent)
    for each in gather_json(mine, registration.group):
        listed |= each[0]
        silent |= each[1]
    return _surveyed(registration, listed, replace(before, silent=silent))


def _surveyed(registration: Registration, listed: Mapping[str, Any], before: Survey) -> Survey:
    """Add what holders have listed to the survey before, and choose; the random bits of its attempt stay."""
    inventories, known = dict(before.inventories), before.known
    for holder, each in listed.items():
        versions = map(Version.from_json, each)
        inventories[holder] = [version for version in versions if not known.has_given_up(version.attempt)]
    run_id, nonce = registration.run_id, before.attempt % (1 << NONCE_BITS)
    seen = [each.attempt for versions in inventories.values() for each in versions if each.shard.run_id == run_id]
    attempt = next_attempt(seen, nonce)
    if known.has_given_up(attempt):  # nothing is left since: new versions must not look given up
        attempt = next_attempt([known.attempt], nonce)
    own = registration.holders, run_id, registration.topology, registration.placed()
    choice = choose(inventories, *own, compares=before.compares)
    return replace(before, choice=choice, attempt=attempt, inventories=inventories)


def bring_common(client: HolderClient, version: Version, common: Mapping[str, Sequence[str]], here: str) -> None:
    """Fetch what the owner of a version has in common with others, if this host lacks it, in stripes from all that have
    it; the first of the ranks of a host that call this does it for all of them."""
    needed = version.common
    if needed is not None and here not in (sources := common[needed.digest]):
        reach("fetch")
        client.fetch(needed, *sources)


def load_shard(client: HolderClient, choice: Choice, rank: int, here: str, training: TrainingState) -> StateLayout:
    """Fetch the shard of this rank to this host if it is missing, load it in place, and return its layout.

    The loaded bytes are compared with their digests once more: minutes can be between the survey and now, and a process
    that was considered dead may still write. Raises ThinwireError if its source is lost or its bytes are wrong: then
    survey again.
    """
    version, source = choice.versions[rank], choice.sources[rank]
    if source != here:
        reach("fetch")
        client.fetch(version, source)
    bring_common(client, version, choice.common, here)
    with client.open(version) as reader:
        layout = StateLayout.from_bytes(reader.layout)
        step = training.load(layout, tensors_of(layout, reader.payload, reader.common))
        reader.verify()
    if step != version.step:
        raise CorruptMessageError(f"{version.shard}: a state of step {step} in the version of step {version.step}")
    client.keep(version)
    client.grant_all()  # until the first step: it may be minutes away, and perhaps this is the only copy
    return layout
