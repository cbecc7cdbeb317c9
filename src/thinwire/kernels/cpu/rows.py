"""Search, scatter and sum of rows on the CPU, compiled by numba; twins of `reference.rows`."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.bits import ROOM, append_ones
from thinwire.kernels.cpu.memory import as_tensor, empty_rows
from thinwire.kernels.cpu.sum import sum_increasing
from thinwire.kernels.cpu.union import union_positions
from thinwire.kernels.jit import njit
from thinwire.kernels.reference import rows as reference

_MASK_BITS = 64
_FIRST_IDS = 1 << 16  # number of ids that memory is allocated for before the density is known: 512 KiB
_ADDED = (torch.float32, torch.float64, torch.bfloat16)


def nonzero_rows(dense: Tensor) -> Tensor:
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    words = reference.row_words(dense.detach()).numpy()
    num_rows, row_words = words.shape
    flat, start, count = words.reshape(-1), 0, 0
    result = np.empty(min(num_rows, _FIRST_IDS) + _MASK_BITS + ROOM, dtype=np.int64)
    while True:
        if row_words == 1:
            start, count = _find_words(flat, start, result, count)
        else:
            start, count = _find_rows(flat, row_words, start, result, count)
        if start == num_rows:
            return as_tensor(result[:count])
        result = _grown(result, count, start, num_rows)


def _grown(result: np.ndarray, count: int, start: int, num_rows: int) -> np.ndarray:
    """Grow by the density of the rows seen and an eighth more; at least by half, never beyond all rows."""
    expected = count + (num_rows - start) * count // max(1, start) * 9 // 8
    room = np.empty(min(max(expected, result.size * 3 // 2), num_rows) + _MASK_BITS + ROOM, dtype=np.int64)
    room[:count] = result[:count]
    return room


@njit
def _find_words(words: np.ndarray, start: int, result: np.ndarray, count: int) -> tuple[int, int]:
    """Append the indices of non-zero words from ``start`` on, until ``result`` may be full; return where it stopped.

    Comparing 64 words into a mask is vectorized, and the loop over its ones depends on the non-zeros only: 1 ns a word
    at 5 %, where writing every index and advancing on non-zeros costs 2 ns.
    """
    size = words.size
    while start < size and count + _MASK_BITS + ROOM <= result.size:
        mask = np.int64(0)
        if start + _MASK_BITS <= size:
            for bit in range(_MASK_BITS):
                mask |= np.int64(words[start + bit] != 0) << np.int64(bit)
        else:
            for bit in range(size - start):
                mask |= np.int64(words[start + bit] != 0) << np.int64(bit)
        count = append_ones(mask, start, result, count)
        start = min(start + _MASK_BITS, size)
    return start, count


@njit
def _find_rows(words: np.ndarray, row_words: int, start: int, result: np.ndarray, count: int) -> tuple[int, int]:
    """Append the indices of non-zero rows of several words; narrow ones without a branch to mispredict."""
    num_rows = words.size // row_words
    stop = min(num_rows, start + result.size - count)
    if row_words == 2:
        for row in range(start, stop):
            result[count] = row
            count += int((words[2 * row] | words[2 * row + 1]) != 0)
    elif row_words == 4:
        for row in range(start, stop):
            word = 4 * row
            result[count] = row
            count += int((words[word] | words[word + 1] | words[word + 2] | words[word + 3]) != 0)
    else:
        for row in range(start, stop):
            result[count] = row
            count += int(_any_word(words, row * row_words, (row + 1) * row_words))
    return stop, count


@njit
def _any_word(words: np.ndarray, here: int, end: int) -> bool:
    """Return at the first non-zero words; eight words written out are vectorized, a short loop is not."""
    while here + 8 <= end:
        low = words[here] | words[here + 1] | words[here + 2] | words[here + 3]
        high = words[here + 4] | words[here + 5] | words[here + 6] | words[here + 7]
        if (low | high) != 0:
            return True
        here += 8
    while here < end:
        if words[here] != 0:
            return True
        here += 1
    return False


def scatter_rows(dense: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    row_words = reference.row_words(dense), reference.row_words(values.detach())
    if row_words[0].dtype != row_words[1].dtype:
        return dense.index_copy_(0, ids, values)
    target, source = (words.numpy() for words in row_words)
    _check(_write_rows(target, source, ids.numpy()), ids, dense.shape[0])
    return dense


@njit
def _write_rows(target: np.ndarray, source: np.ndarray, positions: np.ndarray) -> int:
    """Write rows to positions and return their number: all, or those before an index out of range."""
    num_rows, width = target.shape
    for row in range(positions.size):
        index = positions[row]
        if index < 0 or index >= num_rows:
            return row
        for column in range(width):
            target[index, column] = source[row, column]
    return positions.size


def sum_rows(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sum increasing pieces block by block of the sum, others one after the other."""
    values = pieces[0][1]
    width, dtype = values.shape[1], values.dtype
    num_rows = max((int(ids.max()) + 1 for ids, _ in pieces if ids.numel()), default=0)
    union, positions = union_positions([ids for ids, _ in pieces], num_rows)
    placed = [(index, values) for index, (_, values) in zip(positions, pieces, strict=True)]
    alike = all(values.dtype == dtype for _, values in placed)
    total = None
    if width and alike and dtype in _ADDED:
        total = sum_increasing(placed, union.numel(), width, dtype, scale)
    return union, sum_rows_at(placed, union.numel(), width, dtype, scale) if total is None else total


def sum_rows_at(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    if dtype not in _ADDED:
        return reference.sum_rows_at(pieces, num_rows, width, dtype, scale)
    # zeros of numpy: their pages are not touched before the first addition
    total = as_tensor(np.zeros((num_rows, width), dtype=np.float64 if dtype == torch.float64 else np.float32))
    for positions, values in pieces:
        _add(total, positions, values)
    if scale != 1.0:
        total.mul_(scale)
    return total if total.dtype == dtype else empty_rows(num_rows, width, dtype).copy_(total)


def _add(total: Tensor, positions: Tensor, values: Tensor) -> None:
    """Add the rows of a piece."""
    is_narrow = values.dtype == torch.bfloat16 and total.dtype == torch.float32
    values = (values if is_narrow else values.to(total.dtype)).detach().contiguous()
    rows = values.view(torch.int16) if is_narrow else values
    done = _add_rows(total.numpy(), positions.contiguous().numpy(), rows.numpy(), is_narrow)
    _check(done, positions, total.shape[0])


@njit
def _add_rows(total: np.ndarray, positions: np.ndarray, values: np.ndarray, is_narrow: bool) -> int:
    """Add rows; where it ``is_narrow`` they are bfloat16, each value the upper half of a float32."""
    num_rows, width = total.shape
    for row in range(positions.size):
        index = positions[row]
        if index < 0 or index >= num_rows:
            return row
        if is_narrow:
            for column in range(width):
                bits = (np.int64(values[row, column]) & 0xFFFF) << 16
                total[index, column] += np.uint32(bits).view(np.float32)
        elif width == 1:  # twice as fast as a loop of one turn
            total[index, 0] += values[row, 0]
        else:
            for column in range(width):
                total[index, column] += values[row, column]
    return positions.size


def _check(done: int, positions: Tensor, num_rows: int) -> None:
    if done < positions.numel():
        raise IndexError(f"row {int(positions[done])} is out of range: there are {num_rows} rows")
