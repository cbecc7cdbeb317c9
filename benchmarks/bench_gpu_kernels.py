"""Kernels on a GPU: seconds, and the bytes that they must move by the second, beside what a plain copy moves.

    python benchmarks/bench_gpu_kernels.py --sizes 214000000 --densities 0.052

Written without a GPU at hand; no figure of it is in the documentation. `make test-gpu` puts its rows on a page. Times
are medians between CUDA events, so launches, and waits for sizes, are in them. The reference is plain torch on the GPU.
Without a GPU it measures the reference on the CPU, which shows only that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire import kernels

SIZES = [1_000_000, 10_000_000, 64_000_000]  # elements
DENSITIES = [0.01, 0.052]
WIDTH, WORLD_SIZE, LONGEST_RUN = 64, 8, 5000
COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Operation:
    """``moved_bytes`` is what any implementation has to read and write, indices included."""

    name: str
    run: Callable[[], object]
    moved_bytes: int


@dataclass(frozen=True)
class Result:
    """Seconds are None where the memory of the GPU did not suffice."""

    operation: str
    size: int
    density: float
    moved_bytes: int
    reference_seconds: float | None
    seconds: float | None


def operations(size: int, density: float, device: torch.device) -> Iterator[Operation]:
    """Yield what a step does with a table of ``size`` elements, of which ``density`` of the rows are not zero."""
    num_rows = size // WIDTH
    table = torch.randn(num_rows, WIDTH, device=device) * (torch.rand(num_rows, 1, device=device) < density)
    elements = (torch.rand(size, 1, device=device) < density).float()
    ids = kernels.nonzero_rows(table)
    capacity, row_bytes = ids.numel() * 5 // 4 + 1, 4 * WIDTH
    rows = kernels.take_rows(table, ids)
    id_bytes, rows_bytes = 8 * ids.numel(), row_bytes * ids.numel()
    yield Operation("find rows of 64", lambda: kernels.find_rows(table, capacity), table.nbytes + id_bytes)
    yield Operation("find elements", lambda: kernels.find_rows(elements, size // 8), elements.nbytes + size)
    yield Operation("take rows of 64", lambda: kernels.take_rows(table, ids), id_bytes + 2 * rows_bytes)
    yield Operation("put rows of 64", lambda: kernels.put_rows(table, ids, rows), id_bytes + 2 * rows_bytes)
    dealt = kernels.deal_rows(ids, num_rows, WORLD_SIZE, 0)[0]
    yield Operation("deal to 8 owners", lambda: kernels.deal_rows(ids, num_rows, WORLD_SIZE, 0), 3 * id_bytes)
    yield Operation("merge 8 pieces", merging(ids, rows, num_rows), WORLD_SIZE * (id_bytes + 2 * rows_bytes))
    yield Operation("sum a long run", summing(num_rows, rows), id_bytes + 2 * rows_bytes)
    bitmap = kernels.pack_bits(ids, num_rows)
    yield Operation("pack bits", lambda: kernels.pack_bits(dealt, num_rows), id_bytes + bitmap.nbytes)
    yield Operation("find bits", lambda: kernels.find_bits(bitmap, ids.numel()), id_bytes + bitmap.nbytes)


def merging(ids: Tensor, rows: Tensor, num_rows: int) -> Callable[[], object]:
    """Sum pieces that hardly overlap, as those of ranks."""
    pieces = torch.cat([(ids + 7 * piece) % num_rows for piece in range(WORLD_SIZE)])
    values = rows.repeat(WORLD_SIZE, 1)
    return lambda: kernels.merge_rows(pieces, values, num_rows, pieces.numel())


def summing(num_rows: int, rows: Tensor) -> Callable[[], object]:
    """Sum the gradient of a lookup, in which one token occurs `LONGEST_RUN` times."""
    ids = torch.randint(0, max(1, num_rows), (rows.shape[0],), device=rows.device)
    ids[:LONGEST_RUN] = 7
    return lambda: kernels.sum_rows([(ids, rows)])


def seconds_of(call: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the median of so many calls, after two that compile and touch memory."""
    samples = []
    for number in range(repeat + 2):
        if device.type == "cuda":
            started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            started.record()
            call()
            ended.record()
            ended.synchronize()
            seconds = started.elapsed_time(ended) / 1e3
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        samples += [seconds] if number > 1 else []
    return statistics.median(samples)


def copy_bandwidth(device: torch.device, copied_bytes: int = COPIED_BYTES) -> float:
    """Return bytes a second, read and written ones together."""
    source = torch.ones(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, 10)


def measure(operation: Operation, size: int, density: float, device: torch.device, repeat: int) -> Result:
    found: list[float | None] = []
    for mode in ("reference", "auto"):
        try:
            with kernels.using(mode):
                found.append(seconds_of(operation.run, device, repeat))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            found.append(None)
    return Result(operation.name, size, density, operation.moved_bytes, *found)


def measure_all(device: torch.device, sizes: list[int], densities: list[float], repeat: int) -> Iterator[Result]:
    torch.manual_seed(0)
    for size in sizes:
        for density in densities:
            for operation in operations(size, density, device):
                yield measure(operation, size, density, device, repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the results there")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for result in measure_all(device, options.sizes, options.densities, options.repeat):
        results.append(asdict(result))
        print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": str(device), "results": results}, indent=1))


if __name__ == "__main__":
    main()
