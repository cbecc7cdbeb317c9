"""Going back to a checkpoint: what all holders have, which step all ranks take, and each rank's shard of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.checkpoint.choice import Choice, choose
from thinwire.checkpoint.client import HolderClient
from thinwire.checkpoint.layout import Layout, views
from thinwire.checkpoint.snapshot import Training
from thinwire.checkpoint.version import Version
from thinwire.errors import ThinwireError

MAX_GATHERED_BYTES = 256 << 20


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank passes, in the order of ranks; collective, over a group of Gloo."""
    text = json.dumps(value).encode()
    world_size = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    lengths = [int(size) for size in sizes]
    if sum(lengths) > MAX_GATHERED_BYTES:
        raise ThinwireError(f"{sum(lengths):,} bytes of JSON to gather, more than {MAX_GATHERED_BYTES:,}")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(each[:length].numpy().tobytes()) for each, length in zip(gathered, lengths, strict=True)]


def least(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """The least that any rank passes, for each place; collective, over a group of Gloo."""
    tensor = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group)
    return tensor.tolist()


@dataclass(frozen=True)
class Survey:
    """What there is of a run in the memory of all hosts.

    Args:
        choice: the step to go back to, and where each shard is.
        attempt: for versions from now on, above all that were seen.
        seen: how many versions of the run there are, of whatever topology.
    """

    choice: Choice
    attempt: int
    seen: int


def survey(
    client: HolderClient | None, holders: Sequence[str], run_id: str, topology: str, group: dist.ProcessGroup
) -> Survey:
    """Ask all holders what they have, and choose; collective, with the same result on all ranks.

    The first rank of each host asks, because the holder then compares all bytes with their digests.
    """
    rank = dist.get_rank(group)
    mine: list[dict[str, Any]] | None = None
    if client is not None and holders.index(holders[rank]) == rank:
        try:
            mine = [version.to_json() for version in client.inventory(run_id)]
        except ThinwireError:
            mine = None
    gathered = gather_json(mine, group)
    inventories = {
        holder: [Version.from_json(version) for version in gathered[first]]
        for first, holder in enumerate(holders)
        if holders.index(holder) == first and gathered[first] is not None
    }
    of_run = [version for versions in inventories.values() for version in versions if version.shard.run_id == run_id]
    attempt = max((version.attempt + 1 for version in of_run), default=0)
    return Survey(choose(inventories, holders, run_id, topology), attempt, len(of_run))


def load_shard(client: HolderClient, choice: Choice, rank: int, here: str, training: Training) -> int:
    """Bring the shard of this rank to this host if it is not here, load it in place, and say of which step it is.

    Raises ThinwireError if its source is lost or its bytes are wrong: then survey again.
    """
    version, source = choice.versions[rank], choice.sources[rank]
    if source != here:
        client.fetch(version, source)
    with client.open(version) as reader:
        layout = Layout.from_bytes(reader.layout)
        tensors: list[Tensor] = views(layout, reader.payload)
        try:
            return training.load(layout, tensors)
        finally:
            tensors.clear()
