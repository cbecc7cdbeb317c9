"""The named points of the design space of exact schemes, and the types to define others."""

# ruff: noqa: F403  each named point is a name of this module

from thinwire.rows.formats import Format
from thinwire.sums import named
from thinwire.sums.named import *
from thinwire.sums.scheme import Aggregation, Balance, Communication, Ownership, Partitioning, Scheme, Unit
from thinwire.sums.two_level import TwoLevel

__all__ = [
    "Aggregation",
    "Balance",
    "Communication",
    "Format",
    "Ownership",
    "Partitioning",
    "Scheme",
    "TwoLevel",
    "Unit",
]
__all__ += named.__all__
