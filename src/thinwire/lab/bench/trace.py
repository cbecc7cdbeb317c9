"""Index traces of real runs: the rows that each rank's gradient touched, step by step.

A trace is an .npz file with the integer scalars `num_rows` and `width` and one integer array
`ids_<step>_<rank>` for every step and rank, both counted from 0. No pickled objects are written or read.
"""

import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_IDS_NAME = re.compile(r"ids_(0|[1-9][0-9]*)_(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class IndexTrace:
    """Row ids of a table [num_rows, width]: `steps[step][rank]` is 1-D int64, increasing, possibly empty.

    Raises ValueError unless there is at least one step, every step has the same ranks, and all ids are in [0,
    num_rows).

    >>> Trace(num_rows=8, width=4, steps=((torch.tensor([0, 3]), torch.tensor([3])),)).world_size
    2
    """

    num_rows: int
    width: int
    steps: tuple[tuple[Tensor, ...], ...]

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.width < 1:
            raise ValueError(f"num_rows and width must be at least 1; got {self.num_rows} and {self.width}")
        if not self.steps or not self.steps[0]:
            raise ValueError("a trace needs at least one step with at least one rank")
        for step, ranks in enumerate(self.steps):
            if len(ranks) != self.world_size:
                raise ValueError(f"step {step} has {len(ranks)} ranks, step 0 has {self.world_size}")
            for rank, ids in enumerate(ranks):
                _check_ids(ids, self.num_rows, f"step {step}, rank {rank}")

    @property
    def world_size(self) -> int:
        """Number of ranks in every step."""
        return len(self.steps[0])


def save_trace(path: str | os.PathLike[str], trace: IndexTrace) -> None:
    """Write `trace` to exactly `path`, compressed; an existing file is replaced. May raise OSError."""
    arrays = {
        f"ids_{step}_{rank}": ids.cpu().numpy()
        for step, ranks in enumerate(trace.steps)
        for rank, ids in enumerate(ranks)
    }
    with Path(path).open("wb") as file:  # given a name, numpy would append .npz to it
        np.savez_compressed(file, allow_pickle=False, num_rows=trace.num_rows, width=trace.width, **arrays)


def load_trace(path: str | os.PathLike[str]) -> IndexTrace:
    """Read a trace. Raises ValueError that names the defect of the file, FileNotFoundError for no file.

    >>> load_trace("run.npz").world_size  # doctest: +SKIP
    8
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no trace at {path}; record one with `thinwire analyze --record {path}`")
    try:
        return _parse(_read_arrays(path))
    except ValueError as error:
        raise ValueError(f"{path} is not a usable trace: {error}") from error


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[np.generic]]:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is not an .npz archive, or cut short")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"the archive is damaged or encrypted ({error})") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns a member that is no array as bytes
            raise ValueError(f"the member {name!r} is not an array")
    return arrays


def _parse(arrays: Mapping[str, NDArray[np.generic]]) -> IndexTrace:
    cells: dict[tuple[int, int], Tensor] = {}
    for name, array in arrays.items():
        if match := _IDS_NAME.fullmatch(name):
            if array.dtype.kind not in "iu":
                raise ValueError(f"{name} must hold integers; got {array.dtype}")
            cells[int(match[1]), int(match[2])] = torch.from_numpy(array.astype(np.int64))
        elif name not in ("num_rows", "width"):
            raise ValueError(f"unexpected array {name!r}; expected num_rows, width and ids_<step>_<rank>")
    if not cells:
        raise ValueError("it has no ids_<step>_<rank> array")
    num_steps = 1 + max(step for step, _ in cells)
    world_size = 1 + max(rank for _, rank in cells)
    if len(cells) != num_steps * world_size:
        needed = num_steps * world_size
        raise ValueError(f"{num_steps} steps x {world_size} ranks need {needed} ids arrays; found {len(cells)}")
    steps = tuple(tuple(cells[step, rank] for rank in range(world_size)) for step in range(num_steps))
    return IndexTrace(_scalar(arrays, "num_rows"), _scalar(arrays, "width"), steps)


def _scalar(arrays: Mapping[str, NDArray[np.generic]], name: str) -> int:
    if name not in arrays:
        raise ValueError(f"the array {name!r} is missing")
    array = arrays[name]
    if array.size != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be one integer; got shape {array.shape}, {array.dtype}")
    return int(array.reshape(()).item())


def _check_ids(ids: Tensor, num_rows: int, where: str) -> None:
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(f"{where}: ids must be 1-D int64; got shape {tuple(ids.shape)}, {ids.dtype}")
    if ids.numel() == 0:
        return
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(f"{where}: ids must be strictly increasing; sort them and drop duplicates")
    if int(ids[0]) < 0 or int(ids[-1]) >= num_rows:
        raise ValueError(f"{where}: ids must lie in [0, {num_rows}); got {int(ids[0])} to {int(ids[-1])}")
