"""The named points of the design space, from papers and from thinwire."""

from dataclasses import replace
from functools import lru_cache

from thinwire.errors import unknown
from thinwire.rows import SchemeName
from thinwire.rows.formats import Format
from thinwire.sums.scheme import NAMED, Aggregation, Balance, Communication, Ownership, Partitioning, Scheme, Unit
from thinwire.sums.two_level import TWO_LEVEL_PREFIX, TwoLevel

__all__ = [
    "AGSPARSE",
    "AGSPARSE_CODED",
    "AGSPARSE_HIERARCHY",
    "AGSPARSE_RING",
    "BALANCED_PARALLELISM",
    "COLUMN_SPLIT",
    "DENSE",
    "DENSE_HALVING_DOUBLING",
    "DENSE_PS",
    "DENSE_RING",
    "HIERARCHICAL_CENTRALIZATION",
    "NAMED",
    "OMNIREDUCE",
    "OMNIREDUCE_CONTIGUOUS",
    "SPARCML",
    "SPARCML_CODED",
    "SPARCML_DENSE",
    "SPARCML_SPLIT",
    "SPARCML_SPLIT_DENSE",
    "SPARSE_PS",
    "UNION_SPLIT",
    "ZEN",
    "ZEN_ELEMENTS",
]
"""What `thinwire.schemes` offers of this module."""

_COO = {"push_format": (Format.COO,), "pull_format": (Format.COO,)}
_DENSE = {"push_format": (Format.DENSE,), "pull_format": (Format.DENSE,)}

DENSE = Scheme(Communication.NATIVE, Aggregation.INCREMENTAL, Partitioning.CENTRALIZATION, None, **_DENSE)
"""The process group's dense all-reduce: what DDP does."""

AGSPARSE = Scheme(Communication.POINT_TO_POINT, Aggregation.ONE_SHOT, Partitioning.CENTRALIZATION, None, **_COO)
"""All ranks send their whole sparse tensor to all, and each adds them up (Horovod, PyTorch's Gloo)."""

AGSPARSE_CODED = replace(AGSPARSE, push_format=tuple(Format))
"""AGsparse with the cheapest format for each message, as in `ZEN`: one stage of messages."""

SPARSE_PS = replace(AGSPARSE, partition=Partitioning.PARALLELISM, balance=Balance.IMBALANCED)
"""A sparse parameter server on the ranks themselves: each owns a contiguous range (Parallax)."""

BALANCED_PARALLELISM = Scheme(
    Communication.POINT_TO_POINT, Aggregation.INCREMENTAL, Partitioning.PARALLELISM, Balance.BALANCED, **_COO
)
"""ZEN's optimal scheme under parallelism (Definition 6), with plain COO."""

ZEN = replace(BALANCED_PARALLELISM, push_format=tuple(Format), pull_format=tuple(Format))
"""Balanced parallelism with the cheapest format for each message: COO, Elias-Fano, bitmap, hash bitmap, or dense."""

COLUMN_SPLIT = replace(ZEN, ownership=Ownership.COLUMNS, pull_format=(Format.DENSE,))
"""Parallelism over columns: imbalance exactly 1, no ids in the pull; for rows much wider than the number of ranks."""

UNION_SPLIT = replace(COLUMN_SPLIT, ownership=Ownership.UNION)
"""Parallelism over positions of the union: no ids in the pull, and its imbalance is exactly 1; for wide rows."""

ZEN_ELEMENTS = replace(
    ZEN, ownership=Ownership.HIERARCHICAL_HASH, unit=Unit.ELEMENTS,
    push_format=(Format.COO,), pull_format=(Format.HASH_BITMAP,),
)  # fmt: skip
"""ZEN as published: single elements, owners by hierarchical hashing, COO in the push, hash bitmaps in the pull."""

OMNIREDUCE = replace(SPARSE_PS, ownership=Ownership.BLOCK_CYCLIC, unit=Unit.BLOCKS)
"""OmniReduce (SIGCOMM'21) as in its code: blocks that are not zero, dealt round-robin to aggregators.

Its workers send the index of the next non-zero block in 4 bytes; here an index has the fewest bytes that hold it.
"""

OMNIREDUCE_CONTIGUOUS = replace(SPARSE_PS, unit=Unit.BLOCKS)
"""OmniReduce as ZEN describes it: each aggregator has a contiguous range of blocks."""

DENSE_PS = replace(SPARSE_PS, **_DENSE)
"""A dense parameter server on the ranks themselves. Every row is in the sum, zeros included."""

DENSE_RING = replace(DENSE_PS, communication=Communication.RING, aggregation=Aggregation.INCREMENTAL)
"""The classical ring all-reduce, in thinwire's own messages. Every row is in the sum, zeros included."""

DENSE_HALVING_DOUBLING = replace(DENSE_RING, communication=Communication.HIERARCHY)
"""The classical halving-doubling all-reduce (Rabenseifner): the bytes of a ring, in 2 log2 of n stages."""

AGSPARSE_RING = replace(AGSPARSE, communication=Communication.RING)
"""AGsparse by the ring all-gather that Gloo and NCCL run."""

AGSPARSE_HIERARCHY = replace(AGSPARSE, communication=Communication.HIERARCHY)
"""AGsparse by recursive doubling: the same bytes, in log2 of n stages."""

SPARCML = replace(AGSPARSE_HIERARCHY, aggregation=Aggregation.INCREMENTAL)
"""SparCML's SSAR_Recursive_double (SC'19): partners exchange and merge all rows that they hold."""

SPARCML_DENSE = replace(SPARCML, dense_switch=True)
"""SPARCML with messages that are dense as soon as that is fewer bytes: rows of zeros then appear as present."""

SPARCML_SPLIT = replace(SPARSE_PS, pull_communication=Communication.HIERARCHY)
"""SparCML's SSAR_Split_allgather: each rank sums a range, and recursive doubling brings the sums to all."""

SPARCML_SPLIT_DENSE = replace(SPARCML_SPLIT, dense_switch=True)
"""SparCML's DSAR_Split_allgather: SPARCML_SPLIT, with sums that return dense if that is fewer bytes.

In the paper sums always return dense. Here a share may be sent dense to its owner too, if that is fewer bytes.
"""

SPARCML_CODED = replace(SPARCML, push_format=tuple(Format))
"""SparCML's recursive doubling with the cheapest format for each message."""

HIERARCHICAL_CENTRALIZATION = SPARCML
"""ZEN's optimal scheme under centralization (Lemma 2): the same point."""

NAMED.update({name.lower(): point for name, point in list(globals().items()) if isinstance(point, Scheme)})

AUTO = "auto"

Rows = SchemeName | Scheme | TwoLevel
"""Type of the argument ``rows`` of `thinwire.attach`."""


def resolve(scheme: str | Scheme | TwoLevel) -> Scheme | TwoLevel | None:
    """Return the scheme of a name, with "two_level:" before it for `TwoLevel`; None for "auto".

    Raises:
        ValueError: the name is unknown, and the message lists the legal ones; or the scheme cannot have two levels.
    """
    if isinstance(scheme, (Scheme, TwoLevel)):
        return scheme
    if not isinstance(scheme, str):
        legal = "pass a name such as 'zen', or one of thinwire.schemes (a compressor is for dense=)"
        raise ValueError(f"{scheme!r} is no scheme: {legal}")
    if scheme == AUTO:
        return None
    name = scheme.removeprefix(TWO_LEVEL_PREFIX)
    if name not in NAMED:
        raise unknown("scheme", scheme, [AUTO, *NAMED], f", {TWO_LEVEL_PREFIX}NAME, or a Scheme")
    return TwoLevel(NAMED[name]) if name != scheme else NAMED[name]


@lru_cache(maxsize=256)
def name_of(scheme: Scheme | TwoLevel) -> str:
    """Return the (first) name of a scheme, or its description if it has none."""
    if isinstance(scheme, TwoLevel):
        return TWO_LEVEL_PREFIX + name_of(scheme.between)
    return scheme.name or scheme.describe()
