"""Around a ring: every rank sends to the next one and receives from the one before it.

Parts are added up on their way to their owner (reduce-scatter), and the sums go round once more (all-gather): with
dense parts this is the classical ring all-reduce. One-shot aggregation under centralization only gathers, which is
AGsparse as Gloo and NCCL do it.
"""

from __future__ import annotations

from thinwire.sync.stages import Stage


def gather_schedule(rank: int, world_size: int) -> list[Stage]:
    """In step s a rank passes on what the rank s places before it began with.

    Example:
        >>> gather_schedule(0, 3)[1]
        Stage(target=1, sends=(2,), source=2, receives=(1,))
    """
    return [
        Stage(
            (rank + 1) % world_size,
            ((rank - step) % world_size,),
            (rank - 1) % world_size,
            ((rank - 1 - step) % world_size,),
        )
        for step in range(world_size - 1)
    ]


def reduce_schedule(rank: int, world_size: int) -> list[Stage]:
    """In step s a rank passes on the part of the rank s + 1 places before it: what travels are parts.

    A part starts at the rank after its owner and comes to the owner last.

    Example:
        >>> reduce_schedule(0, 3)[1]
        Stage(target=1, sends=(1,), source=2, receives=(0,))
    """
    return [
        Stage(
            (rank + 1) % world_size,
            ((rank - 1 - step) % world_size,),
            (rank - 1) % world_size,
            ((rank - 2 - step) % world_size,),
        )
        for step in range(world_size - 1)
    ]
