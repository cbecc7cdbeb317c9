"""Pairs of several parameters as one sparse vector for each dtype: no header for each, as ids of small ones need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.compress import messages
from thinwire.compress.base import Parameter, Payload
from thinwire.compress.exchange import Plan
from thinwire.compress.sparsify import Selection


def pack(selections: Sequence[Selection], plans: Sequence[Plan]) -> Tensor:
    """One message (uint8, a multiple of 8 bytes), newly allocated; the plans code values as they are."""
    packed = []
    for places, (code, stack) in _stacks(plans):
        offsets = _offsets(places, plans)
        ids = torch.cat([selections[place][0] + offset for place, offset in zip(places, offsets, strict=False)])
        values = torch.cat([selections[place][1] for place in places])
        packed.append(code.pack(Payload((ids, values)), stack))
    return messages.join(packed)


def unpack(message: Tensor, plans: Sequence[Plan]) -> list[Selection]:
    """What each parameter has of a message; values may share its memory.

    Raises:
        CorruptMessageError: see `thinwire.compress.messages.unpack`.
    """
    stacks = _stacks(plans)
    found: dict[int, Selection] = {}
    payloads = messages.unpack(message, [plan for _, plan in stacks])
    for (places, _), payload in zip(stacks, payloads, strict=True):
        ids, values = payload.parts
        offsets = _offsets(places, plans)
        cuts = torch.searchsorted(ids, torch.tensor(offsets)).tolist()
        for place, offset, (start, stop) in zip(places, offsets, pairwise(cuts), strict=False):
            found[place] = ids[start:stop] - offset, values[start:stop]
    return [found[place] for place in range(len(plans))]


def max_bytes(plans: Sequence[Plan]) -> int:
    """No rank has reason to send a longer message."""
    return messages.max_bytes([plan for _, plan in _stacks(plans)])


def _stacks(plans: Sequence[Plan]) -> list[tuple[list[int], Plan]]:
    """For each dtype the places of its plans, and how all of them travel as one."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, (_, parameter) in enumerate(plans):
        by_dtype.setdefault(parameter.working_dtype, []).append(place)
    return [
        (places, (plans[places[0]][0], Parameter("stack", (_offsets(places, plans)[-1],), dtype)))
        for dtype, places in by_dtype.items()
    ]


def _offsets(places: Sequence[int], plans: Sequence[Plan]) -> list[int]:
    """Where each parameter begins in its stack, and where the last one ends."""
    return list(accumulate((plans[place][1].numel for place in places), initial=0))
