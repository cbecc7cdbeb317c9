"""Who owns which rows. Every partition is a bijection between an id and (owner, position), increasing in both.

Because positions increase with ids, sorted ids stay sorted inside a part: nothing has to be sorted before a
bitmap is written or after one is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.wire import Part

Placed = tuple[Tensor, Tensor]  # (positions in the part, increasing; places in the ids that were split)


class Partition(Protocol):
    """Rows 0 .. num_rows - 1 dealt to ``world_size`` owners, without communication, the same on every rank."""

    @property
    def num_rows(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def owners(self, ids: Tensor) -> Tensor:
        """The owner in [0, world_size) of each id, int64."""
        ...

    def part(self, owner: int) -> Part:
        """The rows of one owner."""
        ...

    def split(self, ids: Tensor) -> list[Placed]:
        """For each owner, where its share of the sorted unique ``ids`` [k] goes and where it lies."""
        ...


@dataclass(frozen=True)
class Whole:
    """The part that is everything, for centralization: position = id."""

    num_rows: int

    @property
    def size(self) -> int:
        return self.num_rows

    def ids(self, positions: Tensor) -> Tensor:
        return positions

    def positions(self, ids: Tensor) -> Tensor:
        return ids


@dataclass(frozen=True)
class Contiguous:
    """Equal consecutive ranges, as in Sparse PS: free to compute, unbalanced when the ids are skewed."""

    num_rows: int
    world_size: int

    @property
    def range_rows(self) -> int:
        return -(-self.num_rows // self.world_size)

    def owners(self, ids: Tensor) -> Tensor:
        return torch.div(ids, max(1, self.range_rows), rounding_mode="floor")

    def part(self, owner: int) -> Range:
        start = min(owner * self.range_rows, self.num_rows)
        return Range(self.num_rows, start, min(self.range_rows, self.num_rows - start))

    def split(self, ids: Tensor) -> list[Placed]:
        return _split_by_owner(self, ids)


@dataclass(frozen=True)
class Range:
    """Rows start .. start + size - 1."""

    num_rows: int
    start: int
    size: int

    def ids(self, positions: Tensor) -> Tensor:
        return positions + self.start

    def positions(self, ids: Tensor) -> Tensor:
        return ids - self.start


@dataclass(frozen=True)
class Permutation:
    """Each group of ``world_size`` consecutive ids is dealt one to each owner, in an order hashed from the group.

    id = q * world_size + r has owner (r + hash(q)) mod world_size and position q. That is a bijection, so
    no table of ids is needed (ZEN's hash bitmap keeps 4 bytes a row for it, section 3.3) and all parts are of
    equal size. Ids of different groups have independent uniform owners, as under the paper's hash, and ids
    of one group never collide, so the balance of its Theorem 2 holds, and frequency-sorted ids, whose hot
    head is contiguous, balance better than under independent hashing. Strided ids cannot defeat it.

    Example:
        >>> partition = Permutation(num_rows=10, world_size=4, seed=0)
        >>> sorted(torch.cat([partition.part(j).ids(torch.arange(partition.part(j).size)) for j in range(4)]).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    num_rows: int
    world_size: int
    seed: int

    def owners(self, ids: Tensor) -> Tensor:
        return (ids + self.rotation(torch.div(ids, self.world_size, rounding_mode="floor"))) % self.world_size

    def rotation(self, groups: Tensor) -> Tensor:
        """By how much each group of ids is rotated: int64 in [0, world_size)."""
        return kernels.owner_by_hash(groups, self.world_size, self.seed)

    def part(self, owner: int) -> Dealt:
        return Dealt(self, owner)

    def split(self, ids: Tensor) -> list[Placed]:
        return _split_by_owner(self, ids)


@dataclass(frozen=True)
class Dealt:
    """What one owner was dealt by a `Permutation`."""

    partition: Permutation
    owner: int

    @property
    def num_rows(self) -> int:
        return self.partition.num_rows

    @cached_property
    def size(self) -> int:
        world_size = self.partition.world_size
        groups, rest = divmod(self.num_rows, world_size)
        last = int(self.partition.rotation(torch.tensor([groups])))
        return groups + ((self.owner - last) % world_size < rest)

    def ids(self, positions: Tensor) -> Tensor:
        world_size = self.partition.world_size
        return positions * world_size + (self.owner - self.partition.rotation(positions)) % world_size

    def positions(self, ids: Tensor) -> Tensor:
        return torch.div(ids, self.partition.world_size, rounding_mode="floor")


@dataclass(frozen=True)
class HierarchicalHash:
    """Ownership by the first level of ZEN's hierarchical hashing (section 3.2), with its tables.

    The owner is a hash of the id alone. A position is the rank of an id among all ids of its owner, which
    needs the paper's sorted list of the owner's ids (section 3.3): 4 to 8 bytes a row, built once for a size
    and kept. `Permutation` does the same without tables; this one is for comparison with the paper.
    """

    num_rows: int
    world_size: int
    seed: int

    def owners(self, ids: Tensor) -> Tensor:
        return kernels.owner_by_hash(ids, self.world_size, self.seed)

    def part(self, owner: int) -> Listed:
        return Listed(self.num_rows, _owned_ids(self)[owner])

    def split(self, ids: Tensor) -> list[Placed]:
        """By the published algorithm, with its settings k = 3, r1 = 2 |ids|, r2 = r1 / 10 (section 5.2)."""
        slots = 2 * ids.numel()
        lists = kernels.hierarchical_hash(
            ids, self.world_size, self.seed, hashes=3, parallel_slots=slots, serial_slots=slots // 10
        )
        ordered = [members.sort().values for members in lists]
        return [
            (self.part(owner).positions(members), torch.searchsorted(ids, members))
            for owner, members in enumerate(ordered)
        ]


@dataclass(frozen=True, eq=False)
class Listed:
    """A part given by the sorted list of its ids."""

    num_rows: int
    members: Tensor

    @property
    def size(self) -> int:
        return self.members.numel()

    def ids(self, positions: Tensor) -> Tensor:
        return self.members[positions].to(torch.int64)

    def positions(self, ids: Tensor) -> Tensor:
        return torch.searchsorted(self.members, ids.to(self.members.dtype))


@lru_cache(maxsize=16)
def _owned_ids(partition: HierarchicalHash) -> list[Tensor]:
    ids = torch.arange(partition.num_rows)
    owners = partition.owners(ids)
    narrow = torch.int32 if partition.num_rows <= 2**31 else torch.int64
    return [ids[owners == owner].to(narrow) for owner in range(partition.world_size)]


def _split_by_owner(partition: Contiguous | Permutation, ids: Tensor) -> list[Placed]:
    owners = partition.owners(ids)
    counts = torch.bincount(owners, minlength=partition.world_size).tolist()
    places = torch.argsort(owners, stable=True).split(counts)
    return [(partition.part(owner).positions(ids[place]), place) for owner, place in enumerate(places)]
