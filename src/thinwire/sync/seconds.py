"""Seconds of every scheme on a given machine, before anything is sent: rounds, bytes on the wire, and work on rows.

The alpha-beta model (a message takes alpha + beta times its bytes) with measured alpha and beta, and with what it takes
to encode, add and decode rows, because on a fast link that is most of the time. What overlaps is not counted twice:
columns and rows of the union are streamed, so that work on one chunk hides behind the wire of another.
"""

from __future__ import annotations

import math

from thinwire.sync.demand import Demand
from thinwire.sync.dimensions import Aggregation, Communication
from thinwire.sync.machine import Machine
from thinwire.sync.patterns.staged import GATHER_SCHEDULES, REDUCE_SCHEDULES
from thinwire.sync.scheme import Scheme, begins_with_opening
from thinwire.sync.units import unit_shape

CONTENTION = 2.0


def expected_seconds(scheme: Scheme, demand: Demand, machine: Machine, sent_bytes: float) -> float:
    """Seconds of one synchronization of ``demand``, in which the busiest rank sends ``sent_bytes``."""
    world_size = demand.world_size
    if world_size == 1:
        return 0.0
    waiting = _waiting_seconds(scheme, world_size, machine)
    if scheme.is_dense:
        return waiting + sent_bytes * machine.reduced_byte_seconds
    return waiting + sent_bytes * machine.byte_seconds + work_seconds(scheme, demand, machine)


def seen_byte_seconds(scheme: Scheme, demand: Demand, machine: Machine, sent_bytes: float, seconds: float) -> float:
    """What a byte took at least, in a synchronization of so many seconds.

    All that is not work or waiting; these may take twice what was measured, where ranks share processors.
    """
    rest = expected_seconds(scheme, demand, machine, sent_bytes)
    rest -= sent_bytes * (machine.reduced_byte_seconds if scheme.is_dense else machine.byte_seconds)
    return max(0.0, seconds - CONTENTION * rest) / sent_bytes


def _waiting_seconds(scheme: Scheme, world_size: int, machine: Machine) -> float:
    """For headers, and for what each message takes however small it is."""
    opening = machine.round_seconds if begins_with_opening(scheme) else 0.0
    if scheme.is_dense:
        return opening + 2 * (world_size - 1) * machine.message_seconds
    if scheme.knows_ids:
        return opening + machine.round_seconds
    push, pull = _num_stages(scheme, world_size)
    return opening + sum(
        2 * machine.round_seconds if stages is None else 2 * stages * machine.message_seconds for stages in (push, pull)
    )


def _num_stages(scheme: Scheme, world_size: int) -> tuple[int | None, int | None]:
    """Stages on the way to the owners and back; None where all ranks talk to all at once."""
    direct = Communication.POINT_TO_POINT
    if not scheme.is_parallel:
        gathers = None if scheme.communication is direct else GATHER_SCHEDULES[scheme.communication](0, world_size)
        return (None if gathers is None else len(gathers)), 0
    push = None if scheme.communication is direct else len(REDUCE_SCHEDULES[scheme.communication](0, world_size))
    pull = None if scheme.pull_by is direct else len(GATHER_SCHEDULES[scheme.pull_by](0, world_size))
    return push, pull


def work_seconds(scheme: Scheme, demand: Demand, machine: Machine) -> float:
    """On rows, by the rank that has most to do."""
    num_units, width = unit_shape(demand.num_rows, demand.width, scheme.unit)
    ratio = demand.width / width
    held, union = min(demand.held * ratio, num_units), min(demand.union * ratio, num_units)
    world_size, row_bytes = demand.world_size, width * demand.itemsize

    def seconds(sent: float, added: float, joined: float, parts: float) -> float:
        send = sent * (machine.send_id_seconds + row_bytes * machine.send_byte_seconds)
        add = added * (machine.add_id_seconds + row_bytes * machine.add_byte_seconds)
        join = joined * (machine.join_id_seconds + row_bytes * machine.join_byte_seconds)
        return parts * machine.part_seconds + send + add + join

    if scheme.knows_ids:
        ids = held * machine.send_id_seconds + world_size * held * machine.add_id_seconds
        last_chunk = (held * machine.add_byte_seconds + union * machine.join_byte_seconds) * row_bytes / world_size
        return ids + last_chunk + world_size * machine.part_seconds
    if not scheme.is_parallel:
        if scheme.aggregation is Aggregation.ONE_SHOT:
            return seconds(held, world_size * held, 0, world_size)
        stages = math.ceil(math.log2(world_size))
        merged = sum(held * (union / held) ** (stage / stages) for stage in range(stages)) if held else 0.0
        return seconds(merged, 2 * merged, 0, stages)
    owned = union / scheme.num_owners(world_size)
    return seconds(held + owned, held, union, 2 * world_size)
