"""Points of the protocol that have a name, so that a test can have a process die or pause exactly there.

Without a test, reaching one is a call and a comparison: 50 ns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

Point = Literal[
    "copy",  # trainer: a tensor has been copied into the slot
    "publish",  # trainer: all is copied, and the holder does not know yet
    "published",  # trainer: the holder knows
    "header",  # all but the header is in a slot: of the owner, of a replica, or of one that recovers
    "sealed",  # and the header too
    "send",  # a piece of a version has gone to a peer
    "receive",  # a piece of a version has come from a peer
    "serve",  # a piece of a version has gone to one that recovers
    "survey",  # trainer: it is known who has what
    "fetch",  # trainer: a shard is about to be brought from a peer
    "load",  # trainer: a tensor has been loaded
    "disk",  # trainer: a checkpoint is about to be read from the disk
]
POINTS: tuple[Point, ...] = get_args(Point)

Strike = Callable[[Point, int, int], None]
_strike: Strike | None = None


def arm(strike: Strike | None) -> None:
    """Have ``strike(point, owner, step)`` called in this process wherever a point is reached; None: no more."""
    global _strike
    _strike = strike


def reach(point: Point, owner: int = -1, step: int = -1) -> None:
    """This point is reached, of the version ``step`` of shard ``owner``; -1: of what this trainer is at."""
    if _strike is not None:
        _strike(point, owner, step)
