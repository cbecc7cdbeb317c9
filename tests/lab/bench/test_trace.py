"""Index traces: what is saved is loaded again, and files that are not traces are named as such."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.lab.bench.trace import IndexTrace, load_trace, save_trace

A = torch.tensor([0, 3, 7])
B = torch.tensor([2])
EMPTY = torch.empty(0, dtype=torch.int64)


def write(path: Path, **arrays: object) -> Path:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # pyrefly: ignore
    return path


def good_arrays() -> dict[str, object]:
    return {"num_rows": 8, "width": 4, "ids_0_0": A.numpy(), "ids_0_1": B.numpy()}


@pytest.mark.parametrize("name", ["run.npz", "run.trace"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    trace = IndexTrace(num_rows=8, width=4, steps=((A, B, EMPTY), (EMPTY, A, B)))
    save_trace(tmp_path / name, trace)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    loaded = load_trace(tmp_path / name)
    assert (loaded.num_rows, loaded.width, loaded.world_size, len(loaded.steps)) == (8, 4, 3, 2)
    for saved_step, loaded_step in zip(trace.steps, loaded.steps, strict=True):
        for saved, got in zip(saved_step, loaded_step, strict=True):
            assert got.dtype == torch.int64
            assert torch.equal(saved, got)


def test_more_than_ten_steps_keep_their_order(tmp_path: Path) -> None:
    steps = tuple((torch.tensor([step]),) for step in range(12))
    save_trace(tmp_path / "t.npz", IndexTrace(num_rows=12, width=1, steps=steps))
    assert [int(step[0]) for step in load_trace(tmp_path / "t.npz").steps] == list(range(12))


def test_other_integer_types_are_widened(tmp_path: Path) -> None:
    path = write(tmp_path / "t.npz", **good_arrays() | {"ids_0_0": np.array([1, 2], dtype=">u2")})
    ids = load_trace(path).steps[0][0]
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": None}, "'num_rows' is missing"),
        ({"width": None}, "'width' is missing"),
        ({"width": 1.5}, "width must be one integer"),
        ({"num_rows": np.array([8, 8])}, "num_rows must be one integer"),
        ({"num_rows": 0}, "at least 1"),
        ({"ids_0_0": None, "ids_0_1": None}, "no ids_"),
        ({"ids_1_0": np.array([1])}, "2 steps x 2 ranks need 4 ids arrays; found 3"),
        ({"ids_0_0": None}, "found 1"),
        ({"ids_99999999999_0": np.array([1])}, "found 3"),
        ({"ids_00_1": np.array([1])}, "unexpected array 'ids_00_1'"),
        ({"weights": np.array([1])}, "unexpected array 'weights'"),
        ({"ids_0_1": np.array([1.0])}, "must hold integers"),
        ({"ids_0_1": np.array([[1]])}, "step 0, rank 1: ids must be 1-D"),
        ({"ids_0_1": np.array([3, 3])}, "strictly increasing"),
        ({"ids_0_1": np.array([3, 2])}, "strictly increasing"),
        ({"ids_0_1": np.array([8])}, r"\[0, 8\)"),
        ({"ids_0_1": np.array([-1])}, r"\[0, 8\)"),
        ({"ids_0_1": np.array([2**64 - 1], dtype=np.uint64)}, r"\[0, 8\)"),
        ({"ids_0_1": np.array([None])}, "allow_pickle"),
    ],
)
def test_malformed_contents(tmp_path: Path, change: dict[str, object], message: str) -> None:
    arrays = {name: value for name, value in (good_arrays() | change).items() if value is not None}
    path = write(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message) as failure:
        load_trace(path)
    assert str(path) in str(failure.value)


def test_files_that_are_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    save_trace(path, IndexTrace(8, 4, ((A, B),)))
    whole = path.read_bytes()
    for content in (b"", b"step,rank,ids\n", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not an \.npz archive"):
            load_trace(path)
    with path.open("wb") as file:
        np.save(file, A.numpy())
    with pytest.raises(ValueError, match=r"not an \.npz archive"):
        load_trace(path)


def test_damaged_contents_and_foreign_members(tmp_path: Path) -> None:
    path = write(tmp_path / "t.npz", **good_arrays())
    whole = bytearray(path.read_bytes())
    whole[whole.index(A.numpy().tobytes()) + 8] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="damaged"):
        load_trace(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ValueError, match=r"'readme\.txt' is not an array"):
        load_trace(path)


def test_a_missing_file_says_how_to_record_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="analyze --record"):
        load_trace(tmp_path / "none.npz")


@pytest.mark.parametrize("steps", [(), ((),), ((A, B), (A,)), ((A,), (A, B)), ((A.int(),),), ((A.flip(0),),)])
def test_trace_checks_its_steps(steps: tuple[tuple[torch.Tensor, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"step|rank"):
        IndexTrace(num_rows=8, width=4, steps=steps)
