"""The bytes of every message of a synchronization, by following the ids of all ranks through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import wire
from thinwire.sync.dimensions import Communication
from thinwire.sync.partition import Partition, Whole
from thinwire.sync.patterns import hierarchy
from thinwire.sync.patterns.staged import GATHER_SCHEDULES, REDUCE_SCHEDULES
from thinwire.sync.scheme import Scheme
from thinwire.sync.stages import gathering
from thinwire.wire import Choice, Format, Header, Part


@dataclass(frozen=True)
class Pricing:
    """What messages of rows of ``row_bytes`` cost."""

    choice: Choice
    row_bytes: int

    def message_bytes(self, count: int, part: Part) -> int:
        """Header and payload of ``count`` rows of a part."""
        format = self.choice.smallest(count, self.row_bytes, part)
        return Header.NUM_BYTES + wire.payload_bytes(format, count, self.row_bytes, part.size, part.num_rows)

    def is_dense(self, count: int, part: Part) -> bool:
        """Whether all rows of the part arrive."""
        return self.choice.smallest(count, self.row_bytes, part) is Format.DENSE

    def arriving(self, ids: Tensor, part: Part) -> Tensor:
        """Which rows of a part arrive where ``ids`` are sent."""
        return part.ids(torch.arange(part.size)) if self.is_dense(ids.numel(), part) else ids


def gathered_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    """For each rank, where the rows of all travel to all as they are."""
    price, whole = Pricing(scheme.push_choice, row_bytes), Whole(num_rows)
    messages = [price.message_bytes(ids.numel(), whole) for ids in ids_per_rank]
    return _to_all(scheme.communication, messages, len(ids_per_rank))


def doubling_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    """For each rank, where partners add up all that both have."""
    price, whole = Pricing(scheme.push_choice, row_bytes), Whole(num_rows)
    world_size = len(ids_per_rank)
    held, totals = list(ids_per_rank), [0] * world_size
    for stages in zip(*(hierarchy.schedule(rank, world_size) for rank in range(world_size)), strict=True):
        held = [price.arriving(ids, whole) for ids in held]
        for rank, stage in enumerate(stages):
            if stage.target is not None:
                totals[rank] += price.message_bytes(held[rank].numel(), whole)
        held = [
            ids if stage.source is None else _union([ids, held[stage.source]])
            for ids, stage in zip(held, stages, strict=True)
        ]
    return totals


def by_owners_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    """For each rank, where owners of rows add up their parts."""
    world_size = len(ids_per_rank)
    partition = scheme.rows_partition(num_rows, world_size)
    push, pull = Pricing(scheme.push_choice, row_bytes), Pricing(scheme.pull_choice, row_bytes)
    if scheme.communication is Communication.POINT_TO_POINT:
        pushed, summed = _pushed_directly(push, ids_per_rank, partition)
    else:
        pushed, summed = _pushed_in_stages(push, ids_per_rank, partition, scheme.communication)
    senders = world_size if scheme.pull_by is Communication.POINT_TO_POINT else scheme.num_owners(world_size)
    messages = [pull.message_bytes(summed[owner], partition.parts[owner]) for owner in range(senders)]
    pulled = _to_all(scheme.pull_by, messages, world_size)
    return [a + b for a, b in zip(pushed, pulled, strict=True)]


def _to_all(communication: Communication, messages: Sequence[int], world_size: int) -> list[int]:
    """For each rank, where a message of each of the first ranks, of so many bytes, travels to all."""
    if communication is Communication.POINT_TO_POINT:
        return [(world_size - 1) * num_bytes for num_bytes in messages]
    schedule = GATHER_SCHEDULES[communication]
    return [
        sum(
            messages[origin]
            for stage in gathering(schedule(rank, world_size), rank, len(messages))
            for origin in stage.sends
        )
        for rank in range(world_size)
    ]


def _pushed_directly(
    price: Pricing, ids_per_rank: Sequence[Tensor], partition: Partition
) -> tuple[list[int], list[int]]:
    """Bytes of each rank, and how many rows each has in the sum of its part."""
    parts = partition.parts
    counts = [_counts(partition.owners(ids), len(parts)) for ids in ids_per_rank]
    summed = _counts(partition.owners(_union(ids_per_rank)), len(parts))
    for owner, part in enumerate(parts):
        if any(price.is_dense(held[owner], part) for held in counts):
            summed[owner] = part.size
    pushed = [
        sum(price.message_bytes(held[owner], part) for owner, part in enumerate(parts) if owner != rank)
        for rank, held in enumerate(counts)
    ]
    return pushed, summed


def _pushed_in_stages(
    price: Pricing, ids_per_rank: Sequence[Tensor], partition: Partition, communication: Communication
) -> tuple[list[int], list[int]]:
    """Bytes of each rank, and how many rows each has in the sum of its part."""
    world_size, parts = len(ids_per_rank), partition.parts
    held = [_dealt(ids, partition) for ids in ids_per_rank]
    pushed = [0] * world_size
    schedule = REDUCE_SCHEDULES[communication]
    for stages in zip(*(schedule(rank, world_size) for rank in range(world_size)), strict=True):
        sent = [{part: held[rank][part] for part in stage.sends} for rank, stage in enumerate(stages)]
        for rank, pieces in enumerate(sent):
            pushed[rank] += sum(price.message_bytes(ids.numel(), parts[part]) for part, ids in pieces.items())
        for rank, stage in enumerate(stages):
            for part in stage.receives:
                assert stage.source is not None
                arriving = price.arriving(sent[stage.source][part], parts[part])
                held[rank][part] = _union([held[rank][part], arriving])
    return pushed, [held[owner][owner].numel() for owner in range(world_size)]


def _dealt(ids: Tensor, partition: Partition) -> list[Tensor]:
    owners = partition.owners(ids)
    order = torch.argsort(owners, stable=True)
    return list(ids[order].split(_counts(owners, len(partition.parts))))


def _union(ids: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(ids)).unique()


def _counts(owners: Tensor, num_owners: int) -> list[int]:
    return torch.bincount(owners, minlength=num_owners).tolist()
