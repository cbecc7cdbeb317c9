"""Numbers that all ranks have to know before they decide: the order of gradients, and what ranks measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thinwire.errors import CorruptMessageError
from thinwire.lane import Lane
from thinwire.sync.channel import Draft, Subject
from thinwire.wire import Format, Kind


def agree_on_order(lane: Lane, order: Sequence[int]) -> list[int]:
    """The order that rank 0 has; a job of the lane.

    Raises:
        CorruptMessageError: what came is not an order of so many parameters.
    """
    channel = lane.channel(Subject("the order of gradients", f"{len(order)} parameters"))

    def drafts() -> list[Draft]:
        mine = torch.tensor(order if channel.rank == 0 else [], dtype=torch.int64)
        return [Draft(Format.COO, 0, mine.view(torch.uint8))] * channel.world_size

    message = channel.swap(Kind.GATHER, drafts, 8 * len(order))[0]
    with channel.reading(message):
        theirs: list[int] = message.payload.view(torch.int64).tolist()
        if sorted(theirs) != list(range(len(order))):
            raise CorruptMessageError(f"{len(theirs)} numbers that are not an order of {len(order)} parameters")
    return theirs


def gather_numbers(lane: Lane, what: str, numbers: Sequence[float]) -> list[list[float]]:
    """The numbers of each rank, in rank order, the same on all ranks; a job of the lane.

    Args:
        what: they are, for error messages.
        numbers: finite; as many on every rank.

    Raises:
        MismatchError: ranks have more or fewer of them, or mean something else.
        CorruptMessageError: what came is not so many finite numbers.
    """
    channel = lane.channel(Subject(what, f"{len(numbers)} numbers"))

    def drafts() -> list[Draft]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        return [Draft(Format.COO, 0, mine.view(torch.uint8))] * channel.world_size

    told = []
    for message in channel.swap(Kind.GATHER, drafts, 8 * len(numbers)):
        with channel.reading(message):
            theirs: list[float] = message.payload.view(torch.float64).tolist()
            if len(theirs) != len(numbers) or not all(map(math.isfinite, theirs)):
                raise CorruptMessageError(f"{len(theirs)} numbers, where {len(numbers)} finite ones belong")
            told.append(theirs)
    return told
