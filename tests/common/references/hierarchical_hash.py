"""ZEN's Algorithm 1 as published. Its slots only order the ids of an owner, so the library keeps its first level."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels


def hierarchical_hash(
    ids: Tensor, world_size: int, seed: int, *, hashes: int = 3, parallel_slots: int, serial_slots: int
) -> list[Tensor]:
    """Partition unique ids by the two-level hash of ZEN (OSDI'25, Algorithm 1, section 3.2).

    The first level, the same on all ranks, gives the owner; the second tries ``hashes`` slots in the
    owner's parallel memory and appends ids without a free slot to its serial memory.

    Args:
        ids: unique int64 [k], each below 2^62.
        parallel_slots: r1, over all owners; the paper uses twice the number of ids.
        serial_slots: r2, over all owners; the paper uses r1 / 10.

    Returns:
        The ids of each owner in memory order (parallel, then serial). Every id is in exactly one list. Of ids that
        write to one slot in one round the last one stays.

    The paper leaves two holes, closed here. Its read-after-write check is unsound without a barrier: a
    thread may read its own id back before a slower thread overwrites it. Here all writes of a round end
    before the reads begin, and slots won in earlier rounds are never written again. It gives no rule for
    a full serial memory; here that memory grows as needed, so that no id is lost.
    """
    owners = kernels.owner_by_hash(ids, world_size, seed)
    slots = max(1, parallel_slots // world_size)
    memory = ids.new_full((world_size * slots,), -1)
    homeless = torch.arange(ids.numel(), device=ids.device)
    for level in range(1, hashes + 1):
        slot = owners[homeless] * slots + kernels.mix(ids[homeless], seed + level) % slots
        free = memory[slot] < 0
        memory[slot[free]] = ids[homeless[free]]
        homeless = homeless[memory[slot] != ids[homeless]]
    overflow_owner, overflow = owners[homeless], ids[homeless]
    capacity = max(serial_slots // world_size, int(torch.bincount(overflow_owner, minlength=1).max()))
    serial = ids.new_full((world_size, capacity), -1)
    order = torch.argsort(overflow_owner, stable=True)
    counts = torch.bincount(overflow_owner, minlength=world_size)
    rank_in_owner = torch.arange(order.numel(), device=ids.device) - (counts.cumsum(0) - counts)[overflow_owner[order]]
    serial[overflow_owner[order], rank_in_owner] = overflow[order]
    filled = torch.cat([memory.view(world_size, slots), serial], dim=1)
    return [row[row >= 0] for row in filled]
