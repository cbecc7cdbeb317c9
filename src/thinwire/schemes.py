"""The named points of the design space of exact schemes, and what is needed to make others."""

from thinwire.sync.scheme import (
    AGSPARSE,
    BALANCED_PARALLELISM,
    COLUMN_SPLIT,
    DENSE,
    NAMED,
    SPARSE_PS,
    ZEN,
    Aggregation,
    Balance,
    Communication,
    Ownership,
    Partitioning,
    Scheme,
)
from thinwire.wire import Format

__all__ = [
    "AGSPARSE",
    "BALANCED_PARALLELISM",
    "COLUMN_SPLIT",
    "DENSE",
    "NAMED",
    "SPARSE_PS",
    "ZEN",
    "Aggregation",
    "Balance",
    "Communication",
    "Format",
    "Ownership",
    "Partitioning",
    "Scheme",
]
