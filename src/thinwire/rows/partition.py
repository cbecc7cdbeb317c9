"""Partitions of rows among owners: bijections between an id and (owner, position), increasing in both.

Because positions increase with ids, sorted ids stay sorted inside a part: nothing has to be sorted before a
bitmap is written or after one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.rows.formats import Part

Placed = tuple[Tensor, Tensor]  # (positions in the part, increasing; indices into the ids that were split)


@dataclass(frozen=True)
class Partition:
    """An assignment of rows 0 .. num_rows - 1 to ``world_size`` owners, equal on all ranks without communication."""

    num_rows: int
    world_size: int

    def owners(self, ids: Tensor) -> Tensor:
        """Return the owner in [0, world_size) of each id, int64."""
        raise NotImplementedError

    @property
    def parts(self) -> Sequence[Part]:
        """The part of each owner."""
        raise NotImplementedError

    def split(self, ids: Tensor) -> list[Placed]:
        """Return each owner's positions of its share of the sorted unique ``ids`` [k], and the indices of these."""
        indices = kernels.group_by_owner(self.owners(ids), self.world_size)
        return [(part.positions(ids[index]), index) for part, index in zip(self.parts, indices, strict=True)]

    def positions(self, ids: Tensor) -> Tensor:
        """Return the position of each id in the part of its owner, without a table and without waiting for a device."""
        raise NotImplementedError

    def deal(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Deal increasing ids int64 [k] to owners as `kernels.deal_rows`, without waiting for a device.

        Returns the ids of one owner after the other, their indices in ``ids``, and how many each owner has. Padding,
        ids from ``num_rows`` on, is last and not counted.
        """
        owners = self.owners(ids).masked_fill(ids >= self.num_rows, self.world_size).to(torch.int32)
        owners, indices = owners.sort(stable=True)
        ends = torch.arange(self.world_size + 1, dtype=torch.int32, device=ids.device)
        return ids[indices], indices, torch.searchsorted(owners, ends).diff()

    def join(self, positions: Sequence[Tensor]) -> Tensor:
        """Return the ids at the given positions of each part, one part after the other."""
        return torch.cat([part.ids(of_part) for part, of_part in zip(self.parts, positions, strict=True)])


@dataclass(frozen=True)
class Contiguous(Partition):
    """A partition into equal consecutive ranges, as in Sparse PS: free to compute, unbalanced for skewed ids."""

    @property
    def range_rows(self) -> int:
        return -(-self.num_rows // self.world_size)

    def owners(self, ids: Tensor) -> Tensor:
        return torch.div(ids, max(1, self.range_rows), rounding_mode="floor")

    def positions(self, ids: Tensor) -> Tensor:
        return ids % max(1, self.range_rows)

    @cached_property
    def parts(self) -> tuple[Range, ...]:
        starts = [min(owner * self.range_rows, self.num_rows) for owner in range(self.world_size + 1)]
        return tuple(Range(self.num_rows, start, stop - start) for start, stop in pairwise(starts))


@dataclass(frozen=True)
class Range:
    """A part of the rows start .. start + size - 1."""

    num_rows: int
    start: int
    size: int

    def ids(self, positions: Tensor) -> Tensor:
        return positions + self.start

    def positions(self, ids: Tensor) -> Tensor:
        return ids - self.start


@dataclass(frozen=True)
class BlockCyclic(Partition):
    """A partition in which row i belongs to owner i mod ``world_size``, as OmniReduce deals its blocks to aggregators.

    A hot range spreads over all owners, but ids with a stride of ``world_size`` all go to one.

    Example:
        >>> BlockCyclic(num_rows=5, world_size=2).parts[0].ids(torch.arange(3))
        tensor([0, 2, 4])
    """

    def owners(self, ids: Tensor) -> Tensor:
        return ids % self.world_size

    def positions(self, ids: Tensor) -> Tensor:
        return torch.div(ids, self.world_size, rounding_mode="floor")

    @cached_property
    def parts(self) -> tuple[Strided, ...]:
        return tuple(Strided(self.num_rows, owner, self.world_size) for owner in range(self.world_size))


@dataclass(frozen=True)
class Strided:
    """A part of every ``stride``-th row from ``start`` on."""

    num_rows: int
    start: int
    stride: int

    @property
    def size(self) -> int:
        return max(0, -(-(self.num_rows - self.start) // self.stride))

    def ids(self, positions: Tensor) -> Tensor:
        return positions * self.stride + self.start

    def positions(self, ids: Tensor) -> Tensor:
        return torch.div(ids - self.start, self.stride, rounding_mode="floor")


@dataclass(frozen=True)
class Permutation(Partition):
    """A partition that deals each group of ``world_size`` consecutive ids, one to each owner, in a hashed order.

    id = q * world_size + r has owner (r + hash(q)) mod world_size and position q. That is a bijection, so
    no table of ids is needed (ZEN's hash bitmap keeps 4 bytes a row for it, section 3.3) and all parts are of
    equal size. Ids of different groups have independent uniform owners, as under the paper's hash, and ids
    of one group never collide, so the balance of its Theorem 2 holds, and frequency-sorted ids, whose hot
    head is contiguous, balance better than under independent hashing. Strided ids cannot defeat it.

    Example:
        >>> partition = Permutation(num_rows=10, world_size=4, seed=0)
        >>> sorted(torch.cat([part.ids(torch.arange(part.size)) for part in partition.parts]).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    seed: int

    def owners(self, ids: Tensor) -> Tensor:
        return (ids + self.rotation(torch.div(ids, self.world_size, rounding_mode="floor"))) % self.world_size

    def rotation(self, groups: Tensor) -> Tensor:
        """Return the rotation of each group of ids, int64 in [0, world_size)."""
        return kernels.owner_by_hash(groups, self.world_size, self.seed)

    def positions(self, ids: Tensor) -> Tensor:
        return torch.div(ids, self.world_size, rounding_mode="floor")

    def ids(self, owners: Tensor | int, positions: Tensor) -> Tensor:
        """Return the id of each (owner, position)."""
        return positions * self.world_size + (owners - self.rotation(positions)) % self.world_size

    @cached_property
    def parts(self) -> tuple[Dealt, ...]:
        groups, rest = divmod(self.num_rows, self.world_size)
        last = int(self.rotation(torch.tensor([groups])))
        return tuple(
            Dealt(self, owner, groups + ((owner - last) % self.world_size < rest), self.num_rows)
            for owner in range(self.world_size)
        )

    def split(self, ids: Tensor) -> list[Placed]:
        return kernels.deal(ids, self.world_size, self.seed)

    def deal(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.deal_rows(ids, self.num_rows, self.world_size, self.seed)


@dataclass(frozen=True)
class Dealt:
    """The part that a `Permutation` deals to one owner."""

    partition: Permutation
    owner: int
    size: int
    num_rows: int

    def ids(self, positions: Tensor) -> Tensor:
        return kernels.dealt_ids(self.owner, positions, self.partition.world_size, self.partition.seed)

    def positions(self, ids: Tensor) -> Tensor:
        return torch.div(ids, self.partition.world_size, rounding_mode="floor")


@dataclass(frozen=True)
class HierarchicalHash(Partition):
    """A partition by the first level of ZEN's hierarchical hashing (section 3.2), with its tables.

    The owner is a hash of the id alone. A position is the rank of an id among all ids of its owner, which
    needs the paper's sorted list of the owner's ids (section 3.3): 4 to 8 bytes a row, built once for a size
    and kept. `Permutation` does the same without tables; this one is for comparison with the paper. The slots of its
    second level would only order ids, which are sorted here.
    """

    seed: int

    def owners(self, ids: Tensor) -> Tensor:
        return kernels.owner_by_hash(ids, self.world_size, self.seed)

    @cached_property
    def parts(self) -> tuple[Listed, ...]:
        ids = torch.arange(self.num_rows)
        owners = self.owners(ids)
        narrow = torch.int32 if self.num_rows <= 2**31 else torch.int64
        return tuple(Listed(self.num_rows, ids[owners == owner].to(narrow)) for owner in range(self.world_size))


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


def core_size(world_size: int) -> int:
    """Return the largest power of two of ranks, which pair up in a hierarchy; each other rank joins one of them."""
    return 1 << (world_size.bit_length() - 1)


@dataclass(frozen=True)
class FirstRanks(Partition):
    """A partition among the first ranks; the other ranks of ``world_size`` own nothing.

    Example:
        >>> FirstRanks(10, 3, owned=Contiguous(10, world_size=2)).parts[2].size
        0
    """

    owned: Partition

    def owners(self, ids: Tensor) -> Tensor:
        return self.owned.owners(ids)

    def positions(self, ids: Tensor) -> Tensor:
        return self.owned.positions(ids)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.owned.parts, *[Range(self.num_rows, self.num_rows, 0)] * self._num_idle)

    def split(self, ids: Tensor) -> list[Placed]:
        nothing = ids.new_empty(0)
        return self.owned.split(ids) + [(nothing, nothing)] * self._num_idle

    def join(self, positions: Sequence[Tensor]) -> Tensor:
        """Return the ids at positions given for all parts, or for the owners only."""
        return self.owned.join(positions[: self.owned.world_size])

    @property
    def _num_idle(self) -> int:
        return self.world_size - self.owned.world_size
