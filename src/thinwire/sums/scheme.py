"""Schemes of exact synchronization, as points of the design space, and the units that they send.

A scheme is a point in the four-dimensional design space of ZEN (OSDI'25, section 2.2), not a class per paper.

A unit is what one index stands for: a row of the matrix, a single element, or a block of consecutive elements.
Embedding gradients have rows. Published schemes index the flattened tensor instead: ZEN and SparCML single
elements (ZEN, section 3.3), OmniReduce blocks of 256. Here their tensors are matrices too, of another width, so
that everything that sums rows sums units.

Units do not know which rows were present, so the sum has fewer rows, never more. The sum of elements has each row
with an element that is not zero on some rank: rows of zeros vanish. Blocks hold elements of other rows too, and their
sum has each row whose sum is not zero: rows that cancel each other vanish as well, as after a dense sum.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, lru_cache

import torch

from thinwire.kernels import nonzero_rows
from thinwire.rows.formats import Format, FormatChoice
from thinwire.rows.partition import (
    BlockCyclic,
    Contiguous,
    FirstRanks,
    HierarchicalHash,
    Partition,
    Permutation,
    core_size,
)
from thinwire.rows.sparse import SparseRows


class Communication(StrEnum):
    """Pattern of which ranks exchange messages (ZEN, section 2.2)."""

    POINT_TO_POINT = "point_to_point"
    NATIVE = "native"  # the process group's own dense all-reduce
    RING = "ring"  # with the next rank and the one before it
    HIERARCHY = "hierarchy"  # in each stage with the rank whose number differs in one bit: recursive doubling, halving


class Aggregation(StrEnum):
    """Time at which pieces are added: at each stage, or once after the last; point-to-point has only one stage."""

    INCREMENTAL = "incremental"
    ONE_SHOT = "one_shot"


class Partitioning(StrEnum):
    """Division of the tensor: sent as a whole, or each part of it to an owner of its own."""

    CENTRALIZATION = "centralization"
    PARALLELISM = "parallelism"


class Balance(StrEnum):
    """Cut of the parts under parallelism: equal ranges of rows, or equal shares of the non-zero ones."""

    IMBALANCED = "imbalanced"
    BALANCED = "balanced"


class Ownership(StrEnum):
    """Partition that gives the balance; see `thinwire.rows.partition`."""

    CONTIGUOUS = "contiguous"
    BLOCK_CYCLIC = "block_cyclic"
    PERMUTATION = "permutation"
    HIERARCHICAL_HASH = "hierarchical_hash"
    COLUMNS = "columns"  # each owner has some columns of every row: not a partition of the rows
    UNION = "union"  # each owner has an equal number of rows of the union, which all ranks know


BLOCK_ELEMENTS = 256


class Unit(StrEnum):
    """Meaning of one index."""

    ROWS = "rows"
    ELEMENTS = "elements"
    BLOCKS = "blocks"  # of BLOCK_ELEMENTS elements of the flattened tensor, the last one filled up with zeros


def unit_shape(num_rows: int, width: int, unit: Unit) -> tuple[int, int]:
    """Return the shape [units, elements of a unit] of a matrix [num_rows, width] seen in units.

    Example:
        >>> unit_shape(100, 8, Unit.BLOCKS)
        (4, 256)
    """
    if unit is Unit.ROWS:
        return num_rows, width
    unit_width = 1 if unit is Unit.ELEMENTS else BLOCK_ELEMENTS
    return -(-num_rows * width // unit_width), unit_width


def to_units(rows: SparseRows, unit: Unit) -> SparseRows:
    """Return the units that are not zero; a negative zero counts as a value, which costs bytes and never a value."""
    if unit is Unit.ROWS:
        return rows
    num_units, unit_width = unit_shape(rows.num_rows, rows.width, unit)
    nonzero = nonzero_rows(rows.values.reshape(-1, 1))
    values = rows.values.reshape(-1).index_select(0, nonzero)
    row = torch.div(nonzero, max(1, rows.width), rounding_mode="floor")
    elements = nonzero + (rows.ids - torch.arange(rows.ids.numel())).index_select(0, row) * rows.width
    if unit is Unit.ELEMENTS:
        return SparseRows.trusted(elements, values.view(-1, 1), num_units)
    blocks, unit_index = (elements // BLOCK_ELEMENTS).unique_consecutive(return_inverse=True)
    filled = values.new_zeros(blocks.numel(), unit_width)
    filled.view(-1)[unit_index * unit_width + elements % unit_width] = values
    return SparseRows.trusted(blocks, filled, num_units)


def from_units(units: SparseRows, like: SparseRows, unit: Unit) -> SparseRows:
    """Return the rows, shaped as in ``like``, that ``units`` cover: inverts `to_units`, except for zero rows."""
    if unit is Unit.ROWS:
        return units
    flat = units.values.reshape(-1, 1)
    nonzero = torch.arange(flat.numel()) if unit is Unit.ELEMENTS else nonzero_rows(flat)
    unit_of = torch.div(nonzero, units.width, rounding_mode="floor")
    elements = nonzero + (units.ids - torch.arange(units.ids.numel())).index_select(0, unit_of) * units.width
    ids, row = torch.div(elements, max(1, like.width), rounding_mode="floor").unique_consecutive(return_inverse=True)
    values = units.values.new_zeros(ids.numel(), like.width)
    targets = (row - ids.index_select(0, row)) * like.width + elements
    values.view(-1)[targets] = flat.view(-1).index_select(0, nonzero)
    return SparseRows.trusted(ids, values, like.num_rows)


_OWNERSHIP = {
    Balance.IMBALANCED: (Ownership.CONTIGUOUS, Ownership.BLOCK_CYCLIC),
    Balance.BALANCED: (Ownership.PERMUTATION, Ownership.HIERARCHICAL_HASH, Ownership.COLUMNS, Ownership.UNION),
}
_UNSEEDED = {Ownership.CONTIGUOUS: Contiguous, Ownership.BLOCK_CYCLIC: BlockCyclic}
_SEEDED = {Ownership.PERMUTATION: Permutation, Ownership.HIERARCHICAL_HASH: HierarchicalHash}
_ANY_FORMAT = tuple(Format)
_DIMENSIONS: dict[str, type[StrEnum]] = {
    "communication": Communication,
    "aggregation": Aggregation,
    "partition": Partitioning,
    "balance": Balance,
    "ownership": Ownership,
    "unit": Unit,
    "pull_communication": Communication,
}
_OPTIONAL = ("balance", "ownership", "pull_communication")


NAMED: dict[str, Scheme] = {}
"""The points with a name, which `thinwire.sums.named` enters, by their names in lower case."""


@dataclass(frozen=True)
class Scheme:
    """A way to sum a sparse tensor over ranks: four dimensions, ownership, and the formats of two phases.

    Each field accepts a member of its enumeration or the member's text, a format also "auto" for all of them.

    Args:
        communication, aggregation, partition, balance: the dimensions of ZEN (OSDI'25, section 2.2); balance
            is None where there is no partition.
        ownership: the partition; None uses the first that fits ``balance``.
        push_format: formats to choose from on the way to the owner (or to all, under centralization); each
            message has the one of fewest bytes.
        pull_format: formats to choose from on the way back.
        seed: seed of the hash that deals rows to owners; the same on all ranks.
        unit: meaning of an index; see `thinwire.sums.scheme`. Elements and blocks lose rows of zeros.
        pull_communication: pattern in which the sums return from their owners; None uses ``communication``.
        dense_switch: whether a message is sent dense as soon as that is fewer bytes than every other format,
            also where not all rows of its part are present (SparCML's DSAR). The values are the same, but the row
            set grows: rows of zeros then appear as present.
        servers: number of ranks, the first ones, that own parts, as parameter servers do; None for all ranks.

    Raises:
        ValueError: the combination has no meaning; the message gives the reason.

    Example:
        >>> import dataclasses
        >>> from thinwire.schemes import ZEN
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
    pull_communication: Communication | None = None
    dense_switch: bool = False
    servers: int | None = None

    def __post_init__(self) -> None:
        for name, legal in _DIMENSIONS.items():
            object.__setattr__(self, name, _member(name, legal, getattr(self, name)))
        for name in ("push_format", "pull_format"):
            object.__setattr__(self, name, _formats(name, getattr(self, name)))
        if self.is_parallel != (self.balance is not None):
            raise ValueError("balance belongs to parallelism: give one of Balance there, and None elsewhere")
        if self.communication is Communication.NATIVE:
            self._check_native()
        self._check_stages()
        self._check_ownership()
        if self.pull_communication is not None:
            self._check_pull()
        if self.dense_switch:
            self._check_dense_switch()
        if self.servers is not None:
            self._check_servers()

    @property
    def name(self) -> str | None:
        """The (first) name of this point, if it has one."""
        return next((name for name, point in NAMED.items() if point == self), None)

    def __repr__(self) -> str:
        if self.name is not None:
            return self.name.upper()
        values = {item: getattr(self, item.name) for item in fields(self)}
        settings = [f"{item.name}={_plain(value)!r}" for item, value in values.items() if value != item.default]
        return f"Scheme({', '.join(settings)})"

    def _check_native(self) -> None:
        if self.is_parallel:
            raise ValueError("the native all-reduce partitions by itself: use Partitioning.CENTRALIZATION")
        if {*self.push_format, *self.pull_format} != {Format.DENSE}:
            raise ValueError("the native all-reduce moves dense values only: use Format.DENSE in push and pull")
        if self.unit is not Unit.ROWS:
            raise ValueError("the native all-reduce has no ids, so nothing for a unit to name: use Unit.ROWS")

    def _check_stages(self) -> None:
        one_shot = self.aggregation is Aggregation.ONE_SHOT
        if self.communication is Communication.HIERARCHY and self.is_parallel and one_shot:
            raise ValueError(
                "a hierarchy that does not add on the way brings a piece to its owner by up to log2 n hands: use"
                " point_to_point, where it travels once and the sum is the same, or Aggregation.INCREMENTAL"
            )
        if self.communication is Communication.RING and self.is_parallel and one_shot:
            raise ValueError(
                "a ring that does not add on the way brings every piece past every rank: use centralization,"
                " where all want it, or Aggregation.INCREMENTAL"
            )
        if self.communication is Communication.RING and not self.is_parallel and not one_shot:
            raise ValueError(
                "each rank of a ring would add in an order of its own and hold other bits: use parallelism, where"
                " a part has one owner, or Aggregation.ONE_SHOT"
            )

    def _check_ownership(self) -> None:
        if self.balance is None:
            if self.ownership is not None:
                raise ValueError("ownership belongs to parallelism: under centralization nobody owns a part")
            return
        if self.ownership is None:
            object.__setattr__(self, "ownership", _OWNERSHIP[self.balance][0])
        elif self.ownership not in _OWNERSHIP[self.balance]:
            legal = ", ".join(ownership.value for ownership in _OWNERSHIP[self.balance])
            raise ValueError(
                f"{self.ownership.value} ownership is not {self.balance.value}; {self.balance.value} is: {legal}"
            )
        if self.knows_ids:
            self._check_known_ids()

    def _check_known_ids(self) -> None:
        if self.communication is not Communication.POINT_TO_POINT:
            raise ValueError(f"owners of {self.ownership} learn the union from all ranks at once: use point_to_point")
        if self.unit is Unit.ELEMENTS and self.ownership is Ownership.COLUMNS:
            raise ValueError("an element has one column, which cannot be shared out: use rows or blocks")
        if self.pull_format != (Format.DENSE,):
            raise ValueError(
                f"all owners of {self.ownership} know the union, so the pull needs no ids: pull_format must be dense"
            )
        if self.dense_switch:
            raise ValueError(
                f"owners of {self.ownership} must get the same ids from a rank, and a message for one could travel"
                " dense where that for another does not: use dense_switch=False"
            )

    def _check_pull(self) -> None:
        if not self.is_parallel:
            raise ValueError(
                "pull_communication belongs to parallelism: under centralization nobody owns a sum that would have"
                " to come back"
            )
        if self.pull_communication is Communication.NATIVE:
            raise ValueError(
                "the native all-reduce adds, and the pull only gathers: pull_communication is point_to_point, ring"
                " or hierarchy"
            )
        if self.pull_communication is self.communication:
            object.__setattr__(self, "pull_communication", None)
        elif self.knows_ids:
            raise ValueError(
                "the shares of a union, whose sizes all ranks know, are sent to all at once:"
                " pull_communication must be point_to_point"
            )

    def _check_dense_switch(self) -> None:
        phases = (self.push_format, self.pull_format) if self.is_parallel else (self.push_format,)
        if set(phases) == {(Format.DENSE,)}:
            raise ValueError("every message is dense already, so nothing can switch: use dense_switch=False")

    def _check_servers(self) -> None:
        if self.servers is None or self.servers < 1:
            raise ValueError(f"servers is {self.servers}: give 1 or more ranks that own parts, or None for all ranks")
        if not self.is_parallel or self.communication is not Communication.POINT_TO_POINT:
            raise ValueError(
                "servers are owners to whom all ranks send directly: use point_to_point and parallelism, or"
                " servers=None"
            )
        if self.knows_ids:
            raise ValueError(f"{self.ownership} ownership is shared out to all ranks: use another, or servers=None")

    @cached_property
    def is_dense(self) -> bool:
        """Whether every value is sent, zeros included, by the process group's own all-reduce."""
        return self.communication is Communication.NATIVE

    @cached_property
    def is_parallel(self) -> bool:
        """Whether parts have owners."""
        return self.partition is Partitioning.PARALLELISM

    @cached_property
    def knows_ids(self) -> bool:
        """Whether all ranks learn the ids of all others, so that owners own shares of the union."""
        return self.ownership in (Ownership.COLUMNS, Ownership.UNION)

    @cached_property
    def pull_by(self) -> Communication:
        """Pattern in which the sums return from their owners."""
        return self.pull_communication or self.communication

    @cached_property
    def push_choice(self) -> FormatChoice:
        """Formats of a message on the way to the owner, or to all ranks."""
        return FormatChoice(self.push_format, self.dense_switch)

    @cached_property
    def pull_choice(self) -> FormatChoice:
        """Formats of a message on the way back from the owner."""
        return FormatChoice(self.pull_format, self.dense_switch)

    def num_owners(self, world_size: int) -> int:
        """Return the number of ranks, the first ones, that own a part.

        These are all ranks, except with servers, and in a hierarchy, where only a power of two of ranks can pair up.

        Raises:
            ValueError: there are fewer ranks than servers.
        """
        if self.servers is None:
            return core_size(world_size) if self.communication is Communication.HIERARCHY else world_size
        if self.servers > world_size:
            raise ValueError(
                f"{self.servers} servers on {world_size} ranks: servers are the first of the ranks, so give servers"
                f" from 1 to {world_size}, or None for all ranks"
            )
        return self.servers

    def rows_partition(self, num_rows: int, world_size: int) -> Partition:
        """Return the partition of ``num_rows`` rows (or units); only under parallelism, and not for shares of a union.

        Raises:
            ValueError: see `num_owners`.
        """
        assert self.ownership is not None, "centralization has no owners"
        assert not self.knows_ids, "what is owned depends on the rows that are there"
        num_owners = self.num_owners(world_size)
        owned = _partition(self.ownership, num_rows, num_owners, self.seed)
        return owned if num_owners == world_size else FirstRanks(num_rows, world_size, owned)

    def describe(self) -> str:
        """Return a line that identifies the scheme, the same in every process."""
        return self._description

    @cached_property
    def _description(self) -> str:
        return ", ".join(f"{field.name}={_text(getattr(self, field.name))}" for field in fields(self))


@lru_cache(maxsize=16)
def _partition(ownership: Ownership, num_rows: int, world_size: int, seed: int) -> Partition:
    """Return a partition, cached because it caches what it computes about its parts."""
    if ownership in _UNSEEDED:
        return _UNSEEDED[ownership](num_rows, world_size)
    return _SEEDED[ownership](num_rows, world_size, seed)


def _plain(value: object) -> object:
    """A member of an enumeration as its text."""
    return tuple(map(str, value)) if isinstance(value, tuple) else str(value) if isinstance(value, StrEnum) else value


def _text(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _member(name: str, legal: type[StrEnum], value: str | None) -> StrEnum | None:
    if value is None and name in _OPTIONAL:
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


def begins_with_opening(scheme: Scheme) -> bool:
    """Return whether a scheme needs the numbers of rows of all ranks before it can send; see `Channel.open`.

    The other schemes learn them with the first message. "auto" opens for all schemes.
    """
    return scheme.communication is not Communication.POINT_TO_POINT or scheme.knows_ids
