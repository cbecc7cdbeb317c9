"""Recovery of a checkpoint: the inventories of all holders, the step that all ranks restore, and each rank's shard."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint.choice import Choice, choose
from thinwire.checkpoint.group import gather_json
from thinwire.checkpoint.state.layout import StateLayout, views
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import CorruptMessageError, ThinwireError
from thinwire.holder.client import HolderClient
from thinwire.holder.faultpoint import reach
from thinwire.holder.version import NONCE_BITS, Version, next_attempt


@dataclass(frozen=True)
class Survey:
    """Versions of a run in the memory of all hosts.

    Args:
        choice: the step to go back to, and the source of each shard.
        attempt: the attempt of new versions, above all that were seen, and different each time.
        seen: number of versions of the run, of any topology.
        inventories: for each holder that answered, its versions.
    """

    choice: Choice
    attempt: int
    seen: int
    inventories: dict[str, list[Version]]


def survey(
    client: HolderClient | None,
    holders: Sequence[str],
    run_id: str,
    topology: str,
    group: dist.ProcessGroup,
    placed: Mapping[str, Collection[int]] | None = None,
) -> Survey:
    """Gather the inventories of all holders and choose the step to restore; collective, with the same result on all
    ranks.

    The first rank of each host asks, because the holder then compares all bytes with their digests. ``placed``: as in
    `choose`.
    """
    rank = dist.get_rank(group)
    mine: list[dict[str, Any]] | None = None
    if client is not None and holders.index(holders[rank]) == rank:
        try:
            mine = [version.to_json() for version in client.inventory(run_id)]
        except ThinwireError:
            mine = None
    told = gather_json({"versions": mine, "nonce": secrets.randbits(NONCE_BITS)}, group)
    inventories = {
        holder: [Version.from_json(version) for version in told[first]["versions"]]
        for first, holder in enumerate(holders)
        if holders.index(holder) == first and told[first]["versions"] is not None
    }
    of_run = [version for versions in inventories.values() for version in versions if version.shard.run_id == run_id]
    attempt = next_attempt((version.attempt for version in of_run), told[0]["nonce"])
    reach("survey")
    return Survey(choose(inventories, holders, run_id, topology, placed), attempt, len(of_run), inventories)


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
        tensors: list[Tensor] = views(layout, reader.payload)
        try:
            step = training.load(layout, tensors)
        finally:
            tensors.clear()
        reader.verify()
    if step != version.step:
        raise CorruptMessageError(f"{version.shard}: a state of step {step} in the version of step {version.step}")
    client.keep(version)
    return step
