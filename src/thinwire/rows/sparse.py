"""The one value that moves through all exact schemes: sorted unique row ids and their rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.observe.step import ranged

SUPPORTED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows of a matrix [num_rows, width] of which most are zero.

    An embedding gradient has rows that are wholly zero or wholly present, so one index serves a row. An
    unstructured sparse tensor is the case ``width == 1``.

    Args:
        ids: int64 [k], strictly increasing, in [0, num_rows).
        values: [k, width], float32, float64, bfloat16 or float16, on the CPU. Kept, not copied.
        num_rows: rows of the whole matrix.

    Raises:
        ValueError: ids are not int64, not one-dimensional, out of range, repeated or unsorted; or values have
            another length, dtype or device. The message says which.

    Example:
        >>> SparseRows(torch.tensor([1, 4]), torch.ones(2, 3), num_rows=6).to_dense().sum()
        tensor(6.)
    """

    ids: Tensor
    values: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        check_values(self.values)
        if self.ids.dtype != torch.int64 or self.ids.dim() != 1:
            raise ValueError(f"ids must be int64 [k], not {self.ids.dtype} {list(self.ids.shape)}")
        if self.values.dim() != 2 or self.values.shape[0] != self.ids.numel():
            raise ValueError(f"values must be [{self.ids.numel()}, width] to match ids, not {list(self.values.shape)}")
        check_range(self.ids, self.num_rows)
        if bool((self.ids[1:] <= self.ids[:-1]).any()):
            index = int((self.ids[1:] <= self.ids[:-1]).nonzero()[0])
            first, second = self.ids[index].item(), self.ids[index + 1].item()
            raise ValueError(
                f"ids must be strictly increasing, but ids[{index}] = {first} is followed by {second};"
                " sort them and add up duplicates (SparseRows.from_tensor does both)"
            )

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def density(self) -> float:
        """Share of rows that are present; 0.0 for a matrix without rows."""
        return self.ids.numel() / self.num_rows if self.num_rows else 0.0

    def to_dense(self) -> Tensor:
        """Return the matrix [num_rows, width], newly allocated."""
        dense = self.values.new_zeros(self.num_rows, self.width)
        return kernels.scatter_rows(dense, self.ids, self.values)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> SparseRows:
        """Return the rows of a COO tensor (also hybrid or uncoalesced) or of a dense one; see `Layout`."""
        return Layout.of(tensor).rows(tensor)

    @classmethod
    def from_pairs(cls, ids: Tensor, values: Tensor, num_rows: int) -> SparseRows:
        """Return rows from (id, row) pairs in any order; rows of equal id are added up in the given order."""
        check_values(values)
        check_range(ids, num_rows)
        if bool((ids[1:] > ids[:-1]).all()):
            return cls.trusted(ids, values, num_rows)
        return cls.trusted(*kernels.sum_rows([(ids, values)]), num_rows)

    @classmethod
    def trusted(cls, ids: Tensor, values: Tensor, num_rows: int) -> SparseRows:
        """Return rows without checking them, for ids that are sorted and unique by construction."""
        rows = object.__new__(cls)
        for name, value in (("ids", ids), ("values", values), ("num_rows", num_rows)):
            object.__setattr__(rows, name, value)
        return rows


@dataclass(frozen=True)
class Layout:
    """The mapping between a tensor and its rows, in both directions.

    A COO tensor has one row for each index tuple (its sparse dimensions, flattened) as wide as its dense
    dimensions. A dense tensor of two or more dimensions has its first dimension as rows; a one-dimensional
    one has an element a row, so flatten a dense tensor whose zeros are scattered.
    """

    shape: tuple[int, ...]
    sparse_dim: int | None  # None for a dense tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of a tensor.

        Raises:
            ValueError: the tensor is neither COO nor strided, or COO without a sparse dimension.
        """
        if not isinstance(tensor, Tensor):
            raise ValueError(f"a tensor is needed, sparse COO or dense, not {type(tensor).__name__}")
        if tensor.layout == torch.sparse_coo:
            if tensor.sparse_dim() == 0:
                raise ValueError("a sparse tensor needs at least one sparse dimension")
            return cls(tuple(tensor.shape), tensor.sparse_dim())
        if tensor.layout != torch.strided:
            raise ValueError(f"layout {tensor.layout} is not supported: use .to_sparse_coo() or .to_dense()")
        return cls(tuple(tensor.shape), None)

    @cached_property
    def row_dims(self) -> int:
        return min(1, len(self.shape)) if self.sparse_dim is None else self.sparse_dim

    @cached_property
    def num_rows(self) -> int:
        return math.prod(self.shape[: self.row_dims])

    @cached_property
    def width(self) -> int:
        return math.prod(self.shape[self.row_dims :])

    @ranged("find")
    def rows(self, tensor: Tensor) -> SparseRows:
        """Return the rows of a tensor of this layout; values may share memory with it, and it is not written to."""
        tensor = tensor.detach()
        if self.sparse_dim is None:
            return self._rows_of_dense(tensor)
        indices, values = tensor._indices(), tensor._values()
        check_values(values)
        ids = indices[0]
        for dim in range(1, self.sparse_dim):
            check_range(indices[dim], self.shape[dim], f"index of dimension {dim}")
            ids = ids * self.shape[dim] + indices[dim]
        return SparseRows.from_pairs(ids, values.reshape(ids.numel(), self.width), self.num_rows)

    def _rows_of_dense(self, tensor: Tensor) -> SparseRows:
        check_values(tensor)
        if not tensor.is_contiguous():
            raise ValueError(
                f"a dense tensor must be contiguous, this one has strides {tensor.stride()}: call .contiguous() first"
            )
        matrix = tensor.view(self.num_rows, self.width)
        ids = kernels.nonzero_rows(matrix)
        return SparseRows.trusted(ids, kernels.gather_rows(matrix, ids), self.num_rows)

    @ranged("scatter")
    def tensor(self, rows: SparseRows) -> Tensor:
        """Return rows as a new tensor of this layout; a COO result is coalesced."""
        if self.sparse_dim is None:
            return rows.to_dense().view(self.shape)
        indices = rows.ids.new_empty(self.sparse_dim, rows.ids.numel())
        rest = rows.ids
        for dim in range(self.sparse_dim - 1, 0, -1):
            indices[dim] = rest % self.shape[dim]
            rest = torch.div(rest, self.shape[dim], rounding_mode="floor")
        indices[0] = rest
        values = rows.values.view(rows.ids.numel(), *self.shape[self.sparse_dim :])
        return torch.sparse_coo_tensor(indices, values, self.shape, is_coalesced=True, check_invariants=False)


def check_values(values: Tensor) -> None:
    """Raise ValueError unless ``values`` has a supported dtype and is on the CPU."""
    check_dtype(values.dtype)
    if values.device.type != "cpu":
        raise ValueError(
            f"the tensor is on {values.device}, but thinwire's lane is a CPU process group: call .cpu() first"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError unless the dtype is supported."""
    if dtype not in SUPPORTED_DTYPES:
        legal = ", ".join(str(known).removeprefix("torch.") for known in SUPPORTED_DTYPES)
        raise ValueError(f"dtype {dtype} is not supported: use one of {legal}")


def check_range(ids: Tensor, num_rows: int, what: str = "row id") -> None:
    """Raise ValueError if any id is negative or not below ``num_rows``."""
    if ids.numel() == 0:
        return
    low, high = (int(extreme) for extreme in ids.aminmax())
    if low < 0 or high >= num_rows:
        wrong = low if low < 0 else high
        raise ValueError(f"{what} {wrong} is out of range: legal are 0 to {num_rows - 1}")
