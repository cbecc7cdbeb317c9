"""Recursive halving: in every stage a rank keeps half of the parts that it has, and gives the other half away.

Partners add up what they keep, so that in the end each has the sum of one part: a reduce-scatter in log2 n stages.
With the all-gather of `hierarchy.schedule`, dense formats and contiguous parts, that is the classical
halving-doubling all-reduce (Rabenseifner, ICCS 2004). World sizes that are not powers of two: the ranks
beyond the largest power first hand theirs to a partner, own nothing, and get the result at the end.
"""

from __future__ import annotations

from thinwire.sync.partition import core_size
from thinwire.sync.stages import Stage


def schedule(rank: int, world_size: int) -> list[Stage]:
    """The stages of one rank; what travels are parts, and their owners are the first `core_size` ranks.

    Example:
        >>> schedule(1, 4)
        [Stage(target=3, sends=(2, 3), source=3, receives=(0, 1)), Stage(target=0, sends=(0,), source=0, receives=(1,))]
    """
    core = core_size(world_size)
    everything = tuple(range(core))
    handed_in = [] if core == world_size else [_hand_in(rank, world_size, everything)]
    return handed_in + [_halve(rank, bit, core) for bit in reversed(range(core.bit_length() - 1))]


def _hand_in(rank: int, world_size: int, everything: tuple[int, ...]) -> Stage:
    core = len(everything)
    if rank >= core:
        return Stage(target=rank - core, sends=everything)
    return Stage(source=rank + core, receives=everything) if rank + core < world_size else Stage()


def _halve(rank: int, bit: int, core: int) -> Stage:
    if rank >= core:
        return Stage()
    partner = rank ^ (1 << bit)
    return Stage(partner, _half(partner, bit), partner, _half(rank, bit))


def _half(rank: int, bit: int) -> tuple[int, ...]:
    """The owners whose numbers are that of ``rank`` but for the bits below ``bit``."""
    first = rank >> bit << bit
    return tuple(range(first, first + (1 << bit)))
