"""The dimensions of the design space of synchronization schemes (ZEN, OSDI'25, section 2.2), and ownership."""

from __future__ import annotations

from enum import StrEnum


class Communication(StrEnum):
    """Who talks to whom (ZEN, section 2.2)."""

    POINT_TO_POINT = "point_to_point"
    NATIVE = "native"  # the process group's own dense all-reduce
    RING = "ring"  # with the next rank and the one before it
    HIERARCHY = "hierarchy"  # in each stage with the rank whose number differs in one bit: recursive doubling, halving


class Aggregation(StrEnum):
    """When pieces are added: at each stage, or once after the last. Point-to-point has one stage: no difference."""

    INCREMENTAL = "incremental"
    ONE_SHOT = "one_shot"


class Partitioning(StrEnum):
    """Whether the tensor travels as a whole, or each part of it to an owner of its own."""

    CENTRALIZATION = "centralization"
    PARALLELISM = "parallelism"


class Balance(StrEnum):
    """How parts are cut under parallelism: equal ranges of rows, or equal shares of the non-zero ones."""

    IMBALANCED = "imbalanced"
    BALANCED = "balanced"


class Ownership(StrEnum):
    """Which partition gives the balance; see `thinwire.sync.partition`."""

    CONTIGUOUS = "contiguous"
    BLOCK_CYCLIC = "block_cyclic"
    PERMUTATION = "permutation"
    HIERARCHICAL_HASH = "hierarchical_hash"
    COLUMNS = "columns"  # each owner has some columns of every row: not a partition of the rows
    UNION = "union"  # as many rows of the union, which all ranks know
