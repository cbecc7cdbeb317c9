"""Memory that is dealt out once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fake_device import overlap
from thinwire.comm.cuda.arena import Arena


@given(st.lists(st.lists(st.integers(0, 3000), max_size=6), min_size=1, max_size=5))
def test_an_arena_hands_nothing_out_twice_and_grows_to_what_was_asked_for(jobs: list[list[int]]) -> None:
    made: list[int] = []

    def allocate(num_bytes: int) -> Tensor:
        made.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    arena = Arena(allocate, first_bytes=256, limit_bytes=4096)
    for job in [*jobs, jobs[-1]]:
        arena.begin()
        taken = [(size, arena.take(size)) for size in job]
        rooms = [room for _, room in taken if room is not None]
        assert all(room.numel() == size for size, room in taken if room is not None)
        assert not any(overlap(one, other) for place, one in enumerate(rooms) for other in rooms[:place])
        assert sum(room.numel() for room in rooms) <= arena.capacity_bytes <= 4096
    if sum(-(-size // 64) * 64 for size in jobs[-1]) <= 4096:
        assert len(rooms) == len(jobs[-1]), "what a job asked for is there for the next"
    assert made == sorted(set(made)), "memory is only made anew to have more"
