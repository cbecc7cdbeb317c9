"""Schedules of stages."""

from __future__ import annotations

import pytest

from thinwire.rows.partition import core_size
from thinwire.sums.schedules import REDUCE_SCHEDULES, ring_reduce_schedule


@pytest.mark.parametrize("world_size", range(1, 9))
def test_schedules_of_parts_fit_together(world_size: int) -> None:
    """What one sends another receives; each part is summed from all ranks once, at its owner."""
    for schedule in REDUCE_SCHEDULES.values():
        plans = [schedule(rank, world_size) for rank in range(world_size)]
        held = [{part: {rank} for part in range(world_size)} for rank in range(world_size)]
        for stages in zip(*plans, strict=True):
            for rank, stage in enumerate(stages):
                if stage.target is not None:
                    assert (stages[stage.target].source, stages[stage.target].receives) == (rank, stage.sends)
            sent = [{part: held[rank].pop(part) for part in stage.sends} for rank, stage in enumerate(stages)]
            for rank, stage in enumerate(stages):
                for part in stage.receives:
                    assert held[rank][part].isdisjoint(sent[stage.source][part]), "added twice"
                    held[rank][part] |= sent[stage.source][part]
        num_owners = world_size if schedule is ring_reduce_schedule else core_size(world_size)
        for owner in range(num_owners):
            assert held[owner][owner] == set(range(world_size))
