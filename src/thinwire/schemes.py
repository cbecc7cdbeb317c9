"""The named points of the design space of exact schemes, and what is needed to make others."""

from thinwire.sync.named import (
    AGSPARSE,
    AGSPARSE_HIERARCHY,
    AGSPARSE_RING,
    BALANCED_PARALLELISM,
    COLUMN_SPLIT,
    DENSE,
    DENSE_PS,
    DENSE_RING,
    HIERARCHICAL_CENTRALIZATION,
    NAMED,
    OMNIREDUCE,
    OMNIREDUCE_CONTIGUOUS,
    SPARCML,
    SPARSE_PS,
    ZEN,
    ZEN_ELEMENTS,
)
from thinwire.sync.scheme import Aggregation, Balance, Communication, Ownership, Partitioning, Scheme
from thinwire.sync.units import Unit
from thinwire.wire import Format

__all__ = [
    "AGSPARSE",
    "AGSPARSE_HIERARCHY",
    "AGSPARSE_RING",
    "BALANCED_PARALLELISM",
    "COLUMN_SPLIT",
    "DENSE",
    "DENSE_PS",
    "DENSE_RING",
    "HIERARCHICAL_CENTRALIZATION",
    "NAMED",
    "OMNIREDUCE",
    "OMNIREDUCE_CONTIGUOUS",
    "SPARCML",
    "SPARSE_PS",
    "ZEN",
    "ZEN_ELEMENTS",
    "Aggregation",
    "Balance",
    "Communication",
    "Format",
    "Ownership",
    "Partitioning",
    "Scheme",
    "Unit",
]
