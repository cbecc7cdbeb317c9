"""Named points of the protocol, so that a test can have a process die or pause exactly there.

Without a test, reaching one is a call and a comparison: 50 ns.
"""

from collections.abc import Callable
from typing import Literal, get_args

Point = Literal[
    "copy",  # trainer: a tensor has been copied into the slot
    "code",  # trainer: a piece of a tensor has been coded in the slot
    "publish",  # trainer: all is copied, and the holder does not know yet
    "published",  # trainer: the holder knows
    "header",  # all but the header is in a slot, of the owner, a replica, or a host that recovers
    "sealed",  # the header is in the slot too
    "send",  # a piece of a version has gone to a peer
    "receive",  # a piece of a version has come from a peer
    "serve",  # a piece of a version has gone to a host that recovers
    "survey",  # trainer: the inventories of all holders are known
    "fetch",  # trainer: a shard is about to be brought from a peer
    "load",  # trainer: a tensor has been loaded
    "disk",  # trainer: a checkpoint is about to be read from the disk
]
POINTS: tuple[Point, ...] = get_args(Point)

Strike = Callable[[Point, int, int], None]
_strike: Strike | None = None


def arm(strike: Strike | None) -> None:
    """Call ``strike(point, owner, step)`` in this process whenever a point is reached; None stops it."""
    global _strike
    _strike = strike


def reach(point: Point, owner: int = -1, step: int = -1) -> None:
    """Report that version ``step`` of shard ``owner`` reached this point; -1 stands for this trainer's version."""
    if _strike is not None:
        _strike(point, owner, step)
