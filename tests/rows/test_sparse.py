"""`SparseRows` refuses what is not rows, and says why; torch tensors come out as they went in."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from thinwire.rows.sparse import SUPPORTED_DTYPES, Layout, SparseRows


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def coo(indices: object, values: Tensor | list[float], shape: tuple[int, ...], checked: bool = True) -> Tensor:
    """Says whether to check, because torch warns where one does not."""
    return torch.sparse_coo_tensor(torch.as_tensor(indices), torch.as_tensor(values), shape, check_invariants=checked)


@pytest.mark.parametrize(
    ("row_ids", "values", "message"),
    [
        (ids(1, 1), torch.ones(2, 1), "ids[0] = 1 is followed by 1"),
        (ids(0, 5, 3), torch.ones(3, 1), "ids[1] = 5 is followed by 3"),
        (ids(0, 10), torch.ones(2, 1), "row id 10 is out of range: legal are 0 to 9"),
        (ids(-1, 4), torch.ones(2, 1), "row id -1 is out of range"),
        (ids(1, 2).int(), torch.ones(2, 1), "ids must be int64 [k], not torch.int32 [2]"),
        (ids(1, 2).view(2, 1), torch.ones(2, 1), "ids must be int64 [k], not torch.int64 [2, 1]"),
        (ids(1, 2), torch.ones(3, 1), "values must be [2, width] to match ids, not [3, 1]"),
        (ids(1, 2), torch.ones(2), "values must be [2, width] to match ids, not [2]"),
        (ids(1, 2), torch.ones(2, 1, dtype=torch.int32), "use one of float32, float64, bfloat16, float16"),
        (ids(1, 2), torch.ones(2, 1, dtype=torch.complex64), "dtype torch.complex64 is not supported"),
        (ids(1, 2), torch.ones(2, 1, device="meta"), "the tensor is on meta"),
    ],
)  # fmt: skip
def test_what_is_not_rows_is_refused(row_ids: Tensor, values: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SparseRows(row_ids, values, num_rows=10)


def test_rows_of_nothing() -> None:
    rows = SparseRows(ids(), torch.empty(0, 3), num_rows=0)
    assert (rows.width, rows.density) == (3, 0.0)
    assert rows.to_dense().shape == (0, 3)
    with pytest.raises(ValueError, match="out of range"):
        SparseRows(ids(0), torch.ones(1, 3), num_rows=0)


def test_density_and_dense() -> None:
    rows = SparseRows(ids(1, 3), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), num_rows=5)
    assert rows.density == 0.4
    assert rows.to_dense().tolist() == [[0, 0], [1, 2], [0, 0], [3, 4], [0, 0]]


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_pairs_of_one_id_are_added(dtype: torch.dtype) -> None:
    rows = SparseRows.from_pairs(ids(4, 1, 4), torch.tensor([[9.0], [1.0], [7.0]], dtype=dtype), 6)
    assert rows.ids.tolist() == [1, 4]
    assert rows.values.flatten().tolist() == [1.0, 16.0]
    assert rows.values.dtype == dtype


def test_pairs_out_of_range_are_refused() -> None:
    for wrong in (ids(6), ids(-1), ids(0, 6)):
        with pytest.raises(ValueError, match="out of range"):
            SparseRows.from_pairs(wrong, torch.ones(wrong.numel(), 1), 6)


def random_coo(shape: tuple[int, ...], sparse_dim: int, nnz: int, dtype: torch.dtype) -> Tensor:
    """Uncoalesced, with duplicates."""
    indices = torch.stack([torch.randint(0, size, (nnz,)) for size in shape[:sparse_dim]])
    values = torch.randint(-8, 9, (nnz, *shape[sparse_dim:])).to(dtype)
    return coo(indices, values, shape)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("nnz", [0, 1, 30])
@pytest.mark.parametrize(
    ("shape", "sparse_dim"), [((9,), 1), ((9, 4), 1), ((9, 4), 2), ((9, 4, 3), 1), ((5, 4, 3), 2), ((5, 4, 3), 3)]
)
def test_coo_comes_back_coalesced(shape: tuple[int, ...], sparse_dim: int, nnz: int, dtype: torch.dtype) -> None:
    tensor = random_coo(shape, sparse_dim, nnz, dtype)
    layout = Layout.of(tensor)
    rows = layout.rows(tensor)
    SparseRows(rows.ids, rows.values, rows.num_rows)  # valid
    assert (rows.num_rows, rows.width) == (layout.num_rows, layout.width)
    back = layout.tensor(rows)
    expected = tensor.coalesce()
    assert back.is_coalesced()
    assert back.shape == expected.shape
    assert torch.equal(back.indices(), expected.indices())
    assert torch.equal(back.values(), expected.values())


def test_a_tensor_that_is_already_coalesced_is_not_copied() -> None:
    tensor = random_coo((50, 4), 1, 20, torch.float32).coalesce()
    assert SparseRows.from_tensor(tensor).values.data_ptr() == tensor.values().data_ptr()


def test_nine_and_seven_are_sixteen() -> None:
    tensor = coo([[2, 0, 2]], [9.0, 1.0, 7.0], (4,))
    rows = SparseRows.from_tensor(tensor)
    assert (rows.ids.tolist(), rows.values.flatten().tolist()) == ([0, 2], [1.0, 16.0])
    assert Layout.of(tensor).tensor(rows).to_dense().tolist() == [1.0, 0.0, 16.0, 0.0]


def test_a_tensor_that_requires_grad_is_read_and_not_changed() -> None:
    tensor = torch.ones(3, 2, requires_grad=True)
    rows = SparseRows.from_tensor(tensor)
    assert not rows.values.requires_grad
    assert rows.ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("index", [-1, 4, 100])
@pytest.mark.parametrize("dim", [0, 1])
def test_coo_indices_out_of_range_are_refused(index: int, dim: int) -> None:
    """Such tensors can be made with torch's checks off, as a faulty backward may."""
    indices = torch.zeros(2, 3, dtype=torch.int64)
    indices[dim, 1] = index
    tensor = coo(indices, torch.ones(3), (4, 4), checked=False)
    with pytest.raises(ValueError, match="out of range"):
        SparseRows.from_tensor(tensor)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (7, 3), (7, 3, 2), (0,), (0, 4), (7, 0)])
def test_dense_comes_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    if tensor.dim() and tensor.shape[0] == 7:
        tensor[[0, 3]] = 0
    layout = Layout.of(tensor)
    rows = layout.rows(tensor)
    SparseRows(rows.ids, rows.values, rows.num_rows)
    if tensor.numel() and tensor.dim() and tensor.shape[0] == 7:
        assert rows.ids.tolist() == [1, 2, 4, 5, 6]
    assert torch.equal(layout.tensor(rows), tensor)


def test_dense_with_nan_and_inf_comes_back() -> None:
    tensor = torch.zeros(4, 2)
    tensor[1, 1], tensor[2, 0] = float("nan"), float("inf")
    rows = SparseRows.from_tensor(tensor)
    assert rows.ids.tolist() == [1, 2]
    assert torch.equal(rows.to_dense().isnan(), tensor.isnan())


def test_a_dense_view_into_a_buffer_comes_back() -> None:
    """A gradient in a bucket starts at any element of it."""
    for dtype in SUPPORTED_DTYPES:
        for offset in (1, 2, 3):
            tensor = torch.arange(offset + 8).to(dtype)[offset:].view(2, 4)
            assert torch.equal(SparseRows.from_tensor(tensor).to_dense(), tensor)


def test_a_dense_tensor_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("call .contiguous() first")):
        SparseRows.from_tensor(torch.ones(4, 6).T)
    with pytest.raises(ValueError, match="strides"):
        SparseRows.from_tensor(torch.ones(8)[::2])


def test_coo_of_strided_values_is_read_right() -> None:
    values = torch.arange(12.0).view(2, 6).T[:4]  # [4, 2], strided
    tensor = coo(torch.tensor([[5, 1, 3, 1]]), values, (6, 2))
    assert torch.equal(SparseRows.from_tensor(tensor).to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_other_layouts_are_refused() -> None:
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 2))
    with pytest.raises(ValueError, match=r"sparse_csr is not supported: use \.to_sparse_coo\(\)"):
        SparseRows.from_tensor(csr)
    with pytest.raises(ValueError, match="at least one sparse dimension"):
        SparseRows.from_tensor(coo(torch.empty(0, 1, dtype=torch.int64), torch.ones(1, 3), (3,)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    for tensor in (torch.zeros(3, 2, dtype=dtype), coo([[0]], torch.zeros(1, dtype=dtype), (3,))):
        with pytest.raises(ValueError, match="is not supported: use one of float32"):
            SparseRows.from_tensor(tensor)
