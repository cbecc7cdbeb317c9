"""A synchronization scheme is a point in the four-dimensional design space of ZEN, not a class per paper."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache

from thinwire.sync.partition import BlockCyclic, Contiguous, HierarchicalHash, Partition, Permutation
from thinwire.sync.units import Unit
from thinwire.wire import Format


class Communication(StrEnum):
    """Who talks to whom (ZEN, section 2.2)."""

    POINT_TO_POINT = "point_to_point"
    NATIVE = "native"  # the process group's own dense all-reduce
    RING = "ring"  # with the next rank and the one before it
    HIERARCHY = "hierarchy"  # recursive doubling: in stage i with the rank whose number differs in bit i


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


_OWNERSHIP = {
    Balance.IMBALANCED: (Ownership.CONTIGUOUS, Ownership.BLOCK_CYCLIC),
    Balance.BALANCED: (Ownership.PERMUTATION, Ownership.HIERARCHICAL_HASH, Ownership.COLUMNS),
}
_PARTITIONS = {Ownership.PERMUTATION: Permutation, Ownership.HIERARCHICAL_HASH: HierarchicalHash}
_ANY_FORMAT = tuple(Format)
_DIMENSIONS: dict[str, type[StrEnum]] = {
    "communication": Communication,
    "aggregation": Aggregation,
    "partition": Partitioning,
    "balance": Balance,
    "ownership": Ownership,
    "unit": Unit,
}


@dataclass(frozen=True)
class Scheme:
    """How a sparse tensor is summed over ranks: four dimensions, ownership, and the formats of two phases.

    Each field takes a member of its enumeration or the member's text, a format also "auto" for all of them.

    Args:
        communication, aggregation, partition, balance: the dimensions of ZEN (OSDI'25, section 2.2); balance
            is None where there is no partition.
        ownership: which partition; None takes the first that fits ``balance``.
        push_format: formats to choose from on the way to the owner (or to all, under centralization); for
            each message the one of fewest bytes is taken.
        pull_format: likewise on the way back.
        seed: of the hash that deals rows to owners; the same on all ranks.
        unit: what an index names; see `thinwire.sync.units`. Elements and blocks lose rows of zeros.

    Raises:
        ValueError: a combination that has no meaning, with the reason.

    Example:
        >>> import dataclasses
        >>> published = dataclasses.replace(ZEN, ownership=Ownership.HIERARCHICAL_HASH)
    """

    communication: Communication
    aggregation: Aggregation
    partition: Partitioning
    balance: Balance | None
    ownership: Ownership | None = None
    push_format: tuple[Format, ...] = _ANY_FORMAT
    pull_format: tuple[Format, ...] = _ANY_FORMAT
    seed: int = 0
    unit: Unit = Unit.ROWS

    def __post_init__(self) -> None:
        for name, legal in _DIMENSIONS.items():
            object.__setattr__(self, name, _member(name, legal, getattr(self, name)))
        for name in ("push_format", "pull_format"):
            object.__setattr__(self, name, _formats(name, getattr(self, name)))
        parallel = self.partition is Partitioning.PARALLELISM
        if parallel != (self.balance is not None):
            raise ValueError("balance belongs to parallelism: give one of Balance there, and None elsewhere")
        if self.communication is Communication.NATIVE and parallel:
            raise ValueError("the native all-reduce partitions by itself: use Partitioning.CENTRALIZATION")
        if self.communication is Communication.NATIVE and {*self.push_format, *self.pull_format} != {Format.DENSE}:
            raise ValueError("the native all-reduce moves dense values only: use Format.DENSE in push and pull")
        self._check_stages()
        if self.balance is None:
            if self.ownership is not None:
                raise ValueError("ownership belongs to parallelism: under centralization nobody owns a part")
        elif self.ownership is None:
            object.__setattr__(self, "ownership", _OWNERSHIP[self.balance][0])
        elif self.ownership not in _OWNERSHIP[self.balance]:
            legal = ", ".join(ownership.value for ownership in _OWNERSHIP[self.balance])
            raise ValueError(
                f"{self.ownership.value} ownership is not {self.balance.value}; {self.balance.value} is: {legal}"
            )

        if self.communication is Communication.NATIVE and self.unit is not Unit.ROWS:
            raise ValueError("the native all-reduce has no ids, so nothing for a unit to name: use Unit.ROWS")
        if self.ownership is Ownership.COLUMNS and self.unit is Unit.ELEMENTS:
            raise ValueError("an element has one column, which cannot be shared out: use rows or blocks")
        if self.ownership is Ownership.COLUMNS and self.pull_format != (Format.DENSE,):
            raise ValueError(
                "all owners of columns know the union, so the pull needs no ids: pull_format must be dense"
            )

    def _check_stages(self) -> None:
        parallel, one_shot = self.partition is Partitioning.PARALLELISM, self.aggregation is Aggregation.ONE_SHOT
        if self.communication is Communication.HIERARCHY and parallel:
            raise ValueError(
                "the hierarchy is for centralization: with an owner for each part, point-to-point sends no more"
                " (ZEN, Lemma 1)"
            )
        if self.communication is Communication.RING and parallel and one_shot:
            raise ValueError(
                "a ring that does not add on the way brings every piece past every rank: use centralization,"
                " where all want it, or Aggregation.INCREMENTAL"
            )
        if self.communication is Communication.RING and not parallel and not one_shot:
            raise ValueError(
                "each rank of a ring would add in an order of its own and hold other bits: use parallelism, where"
                " a part has one owner, or Aggregation.ONE_SHOT"
            )
        if self.communication is Communication.RING and self.ownership is Ownership.COLUMNS:
            raise ValueError("owners of columns learn the union from all ranks at once: use point_to_point")

    @property
    def is_dense(self) -> bool:
        """Whether every value travels, zeros included, by the process group's own all-reduce."""
        return self.communication is Communication.NATIVE

    def rows_partition(self, num_rows: int, world_size: int) -> Partition:
        """Who owns which of ``num_rows`` rows (or units). Only under parallelism, and not for columns."""
        assert self.ownership is not None, "centralization has no owners"
        assert self.ownership is not Ownership.COLUMNS, "owners of columns own a share of every row"
        return _partition(self.ownership, num_rows, world_size, self.seed)

    def describe(self) -> str:
        """One line that tells two schemes apart, the same in every process."""
        return ", ".join(f"{field.name}={_text(getattr(self, field.name))}" for field in fields(self))

    def digest(self) -> int:
        """64 bits of `describe`, to compare between ranks."""
        return int.from_bytes(hashlib.blake2b(self.describe().encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=16)
def _partition(ownership: Ownership, num_rows: int, world_size: int, seed: int) -> Partition:
    """Kept, because a partition keeps what it has computed about its parts."""
    if ownership is Ownership.CONTIGUOUS:
        return Contiguous(num_rows, world_size)
    if ownership is Ownership.BLOCK_CYCLIC:
        return BlockCyclic(num_rows, world_size)
    return _PARTITIONS[ownership](num_rows, world_size, seed)


def _text(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _member(name: str, legal: type[StrEnum], value: str | None) -> StrEnum | None:
    if value is None and name in ("balance", "ownership"):
        return None
    try:
        return legal(value)
    except ValueError:
        raise ValueError(f"unknown {name} {value!r}; legal are {', '.join(legal)}") from None


def _formats(name: str, value: str | tuple[str, ...]) -> tuple[StrEnum | None, ...]:
    if value == "auto":
        return _ANY_FORMAT
    formats = (value,) if isinstance(value, str) else tuple(value)
    if not formats:
        raise ValueError(f"{name} is empty; give one or more of {', '.join(Format)}, or auto")
    return tuple(_member(name, Format, format) for format in formats)
