"""What one index stands for: a row of the matrix, a single element, or a block of consecutive elements.

Embedding gradients have rows. Published schemes index the flattened tensor instead: ZEN and SparCML single
elements (ZEN, section 3.3), OmniReduce blocks of 256. Here their tensors are matrices too, of another width, so
that everything that sums rows sums units.

Units do not know which rows were present, so what comes back has fewer rows, never more. Elements bring back each
row that has an element that is not zero on some rank: rows of zeros vanish. Blocks hold elements of other rows too
and bring back each row whose sum is not zero: rows that cancel each other vanish as well, as after a dense sum.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from thinwire.kernels import nonzero_rows
from thinwire.sparse import SparseRows

BLOCK_ELEMENTS = 256


class Unit(StrEnum):
    """What an index names."""

    ROWS = "rows"
    ELEMENTS = "elements"
    BLOCKS = "blocks"  # of BLOCK_ELEMENTS elements of the flattened tensor, the last one filled up with zeros


def unit_shape(num_rows: int, width: int, unit: Unit) -> tuple[int, int]:
    """The matrix [units, elements of a unit] that a matrix [num_rows, width] is, seen in units.

    Example:
        >>> unit_shape(100, 8, Unit.BLOCKS)
        (4, 256)
    """
    if unit is Unit.ROWS:
        return num_rows, width
    unit_width = 1 if unit is Unit.ELEMENTS else BLOCK_ELEMENTS
    return -(-num_rows * width // unit_width), unit_width


def unit_ids(ids: Tensor, width: int, unit: Unit) -> Tensor:
    """Units of the rows ``ids`` (sorted, int64), by arithmetic: no value of these rows is taken to be zero."""
    if unit is Unit.ROWS:
        return ids
    elements = (ids[:, None] * width + torch.arange(width)).flatten()
    return elements if unit is Unit.ELEMENTS else _block_of(elements).unique_consecutive()


def to_units(rows: SparseRows, unit: Unit) -> SparseRows:
    """The units that are not zero. A negative zero counts as a value: that costs bytes and never a value."""
    if unit is Unit.ROWS:
        return rows
    num_units, unit_width = unit_shape(rows.num_rows, rows.width, unit)
    places = nonzero_rows(rows.values.reshape(-1, 1))
    values = rows.values.reshape(-1).index_select(0, places)
    row = torch.div(places, max(1, rows.width), rounding_mode="floor")
    elements = places + (rows.ids - torch.arange(rows.ids.numel())).index_select(0, row) * rows.width
    if unit is Unit.ELEMENTS:
        return SparseRows.trusted(elements, values.view(-1, 1), num_units)
    blocks, place = _block_of(elements).unique_consecutive(return_inverse=True)
    filled = values.new_zeros(blocks.numel(), unit_width)
    filled.view(-1)[place * unit_width + elements % unit_width] = values
    return SparseRows.trusted(blocks, filled, num_units)


def from_units(units: SparseRows, like: SparseRows, unit: Unit) -> SparseRows:
    """The rows of a matrix shaped as ``like`` that ``units`` tell of: the inverse of `to_units`, but for zero rows."""
    if unit is Unit.ROWS:
        return units
    flat = units.values.reshape(-1, 1)
    places = torch.arange(flat.numel()) if unit is Unit.ELEMENTS else nonzero_rows(flat)
    unit_of = torch.div(places, units.width, rounding_mode="floor")
    elements = places + (units.ids - torch.arange(units.ids.numel())).index_select(0, unit_of) * units.width
    ids, place = torch.div(elements, max(1, like.width), rounding_mode="floor").unique_consecutive(return_inverse=True)
    values = units.values.new_zeros(ids.numel(), like.width)
    targets = (place - ids.index_select(0, place)) * like.width + elements
    values.view(-1)[targets] = flat.view(-1).index_select(0, places)
    return SparseRows.trusted(ids, values, like.num_rows)


def _block_of(elements: Tensor) -> Tensor:
    return torch.div(elements, BLOCK_ELEMENTS, rounding_mode="floor")
