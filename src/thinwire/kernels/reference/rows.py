"""Rows and ids in plain torch: the definition of correct, on any device; module `codes` has bitmaps."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_ROW_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_UINT32_MASK = 0xFFFFFFFF
_ACCUMULATE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

STACK_ALIGNMENT = 32
"""Rows at a multiple of which each matrix of a stack starts, so that each has words of a bitmap of its own."""


def nonzero_rows(dense: Tensor) -> Tensor:
    """Return the ids of the rows of ``dense`` [num_rows, width] with any non-zero bit, sorted int64 [k].

    Rows are compared as integers, so nan, inf and denormals count, and a row of negative zeros counts too:
    that costs bytes and never a value. It is one pass over the memory: 7 ms for 82 MB on one core, where
    ``(dense != 0).any(1)`` costs 29 ms.
    """
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=dense.device)
    words = row_words(dense)
    if words.shape[1] == 1:
        return words.flatten().nonzero().flatten()
    low, high = words.aminmax(dim=1)
    return (low != 0).logical_or_(high != 0).nonzero().flatten()


def stack_starts(sizes: Sequence[int]) -> list[int]:
    """Return where matrices of so many rows start if they are stacked for `find_rows`, and the rows of the stack.

    Example:
        >>> stack_starts([3, 40, 1])
        [0, 32, 96, 97]
    """
    starts = [0]
    for size in sizes:
        starts[-1] = -(-starts[-1] // STACK_ALIGNMENT) * STACK_ALIGNMENT
        starts.append(starts[-1] + size)
    return starts


def find_rows(dense: Tensor, capacity: int, below: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Find the non-zero rows as `nonzero_rows`, into memory of a fixed size; on a GPU the host does not wait.

    Of `find_rows`, `deal_rows`, `take_rows`, `put_rows` and `merge_rows` no result has a size that depends on data:
    the numbers of ids stay on the device, and ids that are no rows, below 0 or from ``num_rows`` on, are padding that
    all of them skip.

    Args:
        below: further matrices of the same width, device and dtype, stacked below ``dense``; each starts at the next
            multiple of `STACK_ALIGNMENT` rows, and the rows between are no rows of any.

    Returns:
        (ids int64 [capacity], the first ones that fit, increasing, then ``num_rows``; count int64 [1], the number of
        non-zero rows, which is more than ``capacity`` where not all ids fit).

    Example:
        >>> find_rows(torch.tensor([[0.0], [2.0], [0.0], [3.0]]), capacity=3)
        (tensor([1, 3, 4]), tensor([2]))
    """
    matrices = (dense, *below)
    *starts, num_rows = stack_starts([matrix.shape[0] for matrix in matrices])
    result = torch.cat([nonzero_rows(matrix) + start for matrix, start in zip(matrices, starts, strict=True)])
    return _padded(result, capacity, num_rows), result.new_full((1,), result.numel())


def find_bits(bitmap: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Find the ones of a uint8 bitmap of `pack_bits` as `find_rows` finds rows; padding is the number of bits.

    Example:
        >>> find_bits(torch.tensor([0b10001], dtype=torch.uint8), capacity=3)
        (tensor([0, 4, 8]), tensor([2]))
    """
    bits = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return find_rows((bitmap[:, None] >> bits & 1).view(-1, 1), capacity)


def _padded(values: Tensor, size: int, padding: float) -> Tensor:
    """Return the first ``size`` rows of a tensor, or all and then rows of ``padding``."""
    padded = values.new_full((size, *values.shape[1:]), padding)
    padded[: values.shape[0]] = values[:size]
    return padded


def row_words(matrix: Tensor) -> Tensor:
    """Return the bits of a matrix [num_rows, width] as the widest integers that divide its rows and its address.

    The result shares memory with a contiguous matrix; another one is copied. Rows without columns stay empty.
    """
    matrix = matrix.contiguous()
    row_bytes, offset_bytes = matrix.shape[1] * matrix.element_size(), matrix.storage_offset() * matrix.element_size()
    multiples = (row_bytes, offset_bytes, int(matrix.data_ptr()))
    size, word = next((size, word) for size, word in _ROW_WORDS if not any(number % size for number in multiples))
    return matrix.view(-1).view(word).view(matrix.shape[0], row_bytes // size)  # flat: a single row has any stride


def gather_rows(values: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather the rows ``positions`` int64 [k] of ``values`` [num_rows, width] into [k, width], into ``out`` if given.

    ``out`` may be part of a payload, so that rows are read once and written once.

    Raises:
        IndexError: an index is not that of a row.
    """
    return (
        torch.index_select(values, 0, positions) if out is None else torch.index_select(values, 0, positions, out=out)
    )


def scatter_rows(dense: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Write ``values`` [k, width] to the rows ``ids`` (int64 [k], unique) of ``dense``, and return it.

    Raises:
        IndexError: an id is not that of a row.
    """
    return dense.index_copy_(0, ids, values)


def take_rows(values: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather the rows ``positions`` int64 [k] of ``values`` [num_rows, width]; zeros for positions that are no rows.

    Args:
        out: contiguous, [k, width], to write them to; it keeps what it has for positions that are no rows.

    Example:
        >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 2]))
        tensor([[2.],
                [0.],
                [0.]])
    """
    taken = values.new_zeros(positions.numel(), *values.shape[1:]) if out is None else out
    inside = _inside(positions, values.shape[0])
    taken[inside] = values[positions[inside]]
    return taken


def put_rows(dense: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Write ``values`` [k, width] to the rows ``ids`` (int64 [k], unique but for padding) of ``dense``; return it."""
    inside = _inside(ids, dense.shape[0])
    dense[ids[inside]] = values[inside]
    return dense


def _inside(ids: Tensor, num_rows: int) -> Tensor:
    return (ids >= 0) & (ids < num_rows)


def merge_rows(
    ids: Tensor, values: Tensor, num_rows: int, capacity: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the rows of ``values`` [k, width] with equal ``ids`` int64 [k], in their order, as `sum_rows` sums a piece.

    So pieces of several ranks, one behind the other, are summed in the order of the ranks; see `find_rows` for padding.

    Returns:
        (ids int64 [capacity], increasing, then ``num_rows``; sums [capacity, width], then zeros; count int64 [1], the
        number of different ids, which is more than ``capacity`` where not all fit).

    Example:
        >>> merge_rows(torch.tensor([3, 1, 3, 9]), torch.ones(4, 1), num_rows=9, capacity=3)
        (tensor([1, 3, 9]), tensor([[1.],
                [2.],
                [0.]]), tensor([2]))
    """
    inside = _inside(ids, num_rows)
    union, sums = sum_rows([(ids[inside], values[inside])], scale)
    return _padded(union, capacity, num_rows), _padded(sums, capacity, 0), union.new_full((1,), union.numel())


def sum_rows(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sum pieces of (ids int64 [k_i], values [k_i, width]) by id, in the given order.

    Ids of one piece may repeat and be unsorted. Returns (sorted unique ids [u], values [u, width]) in the
    dtype of the pieces. Sixteen-bit values are summed in float32 and rounded once, and ``scale`` is
    applied before that rounding. The order of additions is the order of the pieces, so equal inputs give
    equal bits on every rank and in every run.
    """
    values = pieces[0][1]
    ids, positions = _union([ids for ids, _ in pieces])
    placed = zip(positions, (values for _, values in pieces), strict=True)
    return ids, sum_rows_at(placed, ids.numel(), values.shape[1], values.dtype, scale)


def sum_rows_at(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Sum pieces of (indices int64 [k_i] in the sum, values [k_i, width]) into [num_rows, width].

    Pieces are read from the iterable one by one, so that later ones can still be arriving.
    """
    total = torch.zeros(num_rows, width, dtype=_ACCUMULATE.get(dtype, dtype))
    for positions, values in pieces:
        total = total.to(values.device)
        if values.is_cuda:  # where index_add_ adds rows of equal indices in any order
            total.index_put_((positions,), values.to(total.dtype), accumulate=True)
        else:
            total.index_add_(0, positions, values.to(total.dtype))
    if scale != 1.0:
        total.mul_(scale)
    return total.to(dtype)


def union_positions(pieces: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Return the sorted union of ids int64 in [0, size), and for each piece the indices of its ids in that union.

    Ids of a piece may repeat and be unsorted; increasing ones are faster where they are few.

    Example:
        >>> union_positions([torch.tensor([2, 7]), torch.tensor([1, 7])], size=8)
        (tensor([1, 2, 7]), [tensor([1, 2]), tensor([0, 2])])
    """
    return _union(pieces)


def _union(pieces: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    union, positions = torch.unique(torch.cat(list(pieces)), return_inverse=True)
    return union, list(torch.split_with_sizes(positions, [piece.numel() for piece in pieces]))


def mix(ids: Tensor, seed: int) -> Tensor:
    """Hash int64 ids to 32 well-mixed bits (int64 in [0, 2^32)).

    Two rounds of the MurmurHash3 32-bit finalizer, the high word folded in between; ``seed`` picks the function.
    """
    hashed = _finalize((ids ^ (seed & _UINT32_MASK)) & _UINT32_MASK)
    return _finalize(hashed ^ ((ids >> 32) & _UINT32_MASK) ^ ((seed >> 32) & _UINT32_MASK))


def _finalize(word: Tensor) -> Tensor:
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B) & _UINT32_MASK
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35) & _UINT32_MASK
    return word ^ (word >> 16)


def owner_by_hash(ids: Tensor, world_size: int, seed: int) -> Tensor:
    """Return the owner in [0, world_size) of each id, int64, by the first level of ZEN's hierarchical hashing (3.2)."""
    return (mix(ids, seed) * world_size) >> 32


def deal(ids: Tensor, world_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Deal sorted unique ids int64 [k] to owners, each group of ``world_size`` consecutive ids one to each.

    The order in which a group is dealt is hashed from it: id = q * world_size + r goes to owner
    (r + hash(q)) mod world_size, at position q.

    Returns:
        For each owner the positions of its ids, increasing, and the indices of these in ``ids``.
    """
    groups = torch.div(ids, world_size, rounding_mode="floor")
    owners = (ids + owner_by_hash(groups, world_size, seed)) % world_size
    return [(groups[positions], positions) for positions in group_by_owner(owners, world_size)]


def deal_rows(ids: Tensor, num_rows: int, world_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Deal increasing ids int64 [k] to owners as `deal`; see `find_rows` for padding.

    Returns:
        (ids [k], one owner after the other, each owner's increasing, then padding in its order; positions [k],
        the indices of these in ``ids``; counts [world_size], the numbers of ids of the owners); all int64.

    Example:
        >>> ids, positions, counts = deal_rows(torch.tensor([0, 3, 4, 9]), num_rows=9, world_size=2, seed=0)
        >>> int(counts.sum()), sorted(ids.tolist()), int(positions[-1])
        (3, [0, 3, 4, 9], 3)
    """
    owners = (ids + owner_by_hash(torch.div(ids, world_size, rounding_mode="floor"), world_size, seed)) % world_size
    owners = owners.masked_fill(~_inside(ids, num_rows), world_size)
    positions = owners.argsort(stable=True)
    return ids[positions], positions, (owners == torch.arange(world_size, device=ids.device)[:, None]).sum(1)


def dealt_ids(owner: int, positions: Tensor, world_size: int, seed: int) -> Tensor:
    """Return the ids int64 of an owner at these positions: the inverse of `deal`."""
    return positions * world_size + (owner - owner_by_hash(positions, world_size, seed)) % world_size


def group_by_owner(owners: Tensor, world_size: int) -> list[Tensor]:
    """Return for each of ``world_size`` owners its indices in ``owners`` int64 [k], increasing."""
    counts = torch.bincount(owners, minlength=world_size).tolist()
    return list(torch.argsort(owners, stable=True).split(counts))
