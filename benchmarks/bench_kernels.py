"""Kernels on the CPU: what each must move, what it takes in plain torch and compiled: docs/internals/kernels.md.

    python benchmarks/bench_kernels.py --sizes 1000 100000 --densities 0.01
    python benchmarks/bench_kernels.py --sizes 214000000 --densities 0.052 --threads 2 --operations "find + deal"
    python benchmarks/bench_kernels.py --json benchmarks/results/kernels-cpu.json

Each time stands beside two floors: that of reading and writing the bytes of the operation once, at the bandwidth that
one thread measures here, and the same in plain torch, the reference. Twins take turns, so that what else the machine
does falls on both, and the first call of a turn does not count. Times are medians, spreads their quartiles: of the
processor with one thread, so that a busy machine does not count, and of the clock with more. The largest size comes
last and takes 12 GB; of more than 32 million ids only the search is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from thinwire import kernels

TWINS = ("reference", "numba")
NUM_PIECES = 8
ROW_ELEMENTS = 64
SIZES = [1_000, 100_000, 10_000_000, 214_000_000]  # the last: the embedding gradients of an LSTM language model
DENSITIES = [0.001, 0.01, 0.052, 0.5]
MAX_IDS = 32_000_000  # in a list; 8 lists and what is made of them must fit into memory
SAMPLE_SECONDS = 2e-3  # calls that are shorter are timed many at once
TWIN_SECONDS = 3.0  # of calls of one twin; those that are longer are repeated less often, but twice


@dataclass(frozen=True)
class Operation:
    """``read_bytes`` and ``written_bytes`` are what any implementation has to move, indices included."""

    name: str
    run: Callable[[], object]
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second of one thread."""

    read: float
    write: float

    @classmethod
    def measure(cls) -> Bandwidth:
        memory = torch.ones(1 << 25, dtype=torch.int64)
        read = min(seconds(memory.sum, 1) for _ in range(7))
        write = min(seconds(lambda: memory.fill_(1), 1) for _ in range(7))
        return cls(memory.nbytes / read, memory.nbytes / write)

    def floor_seconds(self, operation: Operation) -> float:
        return operation.read_bytes / self.read + operation.written_bytes / self.write


@dataclass(frozen=True)
class Result:
    operation: str
    size: int
    density: float
    moved_bytes: int
    floor_seconds: float
    reference_seconds: float
    reference_spread_seconds: float
    numba_seconds: float
    numba_spread_seconds: float


class Inputs:
    """Tensors of ``size`` float32 of which a share is not zero, made when an operation first asks."""

    def __init__(self, size: int, density: float) -> None:
        self.size, self.density = size, density

    def ids(self) -> Tensor:
        return (torch.rand(self.size) < self.density).nonzero().flatten()

    @cached_property
    def one(self) -> Tensor:
        return self.ids()

    @cached_property
    def elements(self) -> Tensor:
        return torch.zeros(self.size).index_fill_(0, self.one, 1.0).view(-1, 1)

    @cached_property
    def rows(self) -> Tensor:
        rows = torch.zeros(max(1, self.size // ROW_ELEMENTS), ROW_ELEMENTS)
        rows[torch.rand(rows.shape[0]) < self.density] = 1.0
        return rows

    @cached_property
    def pieces(self) -> list[tuple[Tensor, Tensor]]:
        return [(ids, torch.randn(ids.numel(), 1)) for ids in (self.ids() for _ in range(NUM_PIECES))]

    @cached_property
    def wide_pieces(self) -> list[tuple[Tensor, Tensor]]:
        num_rows = max(1, self.size // ROW_ELEMENTS)
        ids = [(torch.rand(num_rows) < self.density).nonzero().flatten() for _ in range(NUM_PIECES)]
        return [(piece, torch.randn(piece.numel(), ROW_ELEMENTS)) for piece in ids]


def row_operations(inputs: Inputs) -> Iterator[Operation]:
    elements, rows, ids = inputs.elements, inputs.rows, inputs.one
    found = kernels.nonzero_rows(rows)
    yield Operation("find elements", lambda: kernels.nonzero_rows(elements), elements.nbytes, ids.nbytes)
    yield Operation("find rows of 64", lambda: kernels.nonzero_rows(rows), rows.nbytes, found.nbytes)
    picked = found.numel() * ROW_ELEMENTS * 4
    values = kernels.gather_rows(rows, found)
    yield Operation("gather elements", lambda: kernels.gather_rows(elements, ids), 12 * ids.numel(), 4 * ids.numel())
    yield Operation("gather rows of 64", lambda: kernels.gather_rows(rows, found), found.nbytes + picked, picked)
    yield Operation(
        "scatter rows of 64", lambda: kernels.scatter_rows(rows, found, values), found.nbytes + picked, picked
    )


def id_operations(inputs: Inputs) -> Iterator[Operation]:
    ids, size, elements = inputs.one, inputs.size, inputs.elements
    dealt = kernels.deal(ids, NUM_PIECES, 0)[0][0]
    slots = 2 * ids.numel()
    yield Operation("deal to 8 owners", lambda: kernels.deal(ids, NUM_PIECES, 0), ids.nbytes, 2 * ids.nbytes)
    yield Operation(
        "find + deal",
        lambda: kernels.deal(kernels.nonzero_rows(elements), NUM_PIECES, 0),
        elements.nbytes + ids.nbytes,
        3 * ids.nbytes,
    )
    yield Operation(
        "encode + decode",
        lambda: round_trip(elements, size),
        elements.nbytes + 2 * (4 * ids.numel() + size // 8),
        2 * (4 * ids.numel() + size // 8) + ids.nbytes,
    )
    yield Operation("ids of an owner", lambda: kernels.dealt_ids(0, dealt, NUM_PIECES, 0), dealt.nbytes, dealt.nbytes)
    yield Operation(
        "published hash",
        lambda: kernels.hierarchical_hash(ids, NUM_PIECES, 0, parallel_slots=slots, serial_slots=slots // 10),
        ids.nbytes,
        ids.nbytes,
    )
    bitmap, coded = kernels.pack_bits(ids, size), kernels.elias_fano_encode(ids, size)
    yield Operation("pack bits", lambda: kernels.pack_bits(ids, size), ids.nbytes, bitmap.nbytes)
    yield Operation("unpack bits", lambda: kernels.unpack_bits(bitmap), bitmap.nbytes, ids.nbytes)
    yield Operation("Elias-Fano encode", lambda: kernels.elias_fano_encode(ids, size), ids.nbytes, coded.nbytes)
    yield Operation(
        "Elias-Fano decode", lambda: kernels.elias_fano_decode(coded, ids.numel(), size), coded.nbytes, ids.nbytes
    )
    payload = torch.zeros(4 * ids.numel() // 8 * 8, dtype=torch.uint8)
    yield Operation("checksum", lambda: kernels.checksum(payload), payload.nbytes, 0)


def round_trip(elements: Tensor, size: int) -> None:
    """What a rank sends to 8 owners, in hash bitmaps, and the ids that they make of it."""
    ids = kernels.nonzero_rows(elements)
    for owner, (positions, places) in enumerate(kernels.deal(ids, NUM_PIECES, 0)):
        kernels.gather_rows(elements, kernels.gather_rows(ids.view(-1, 1), places).view(-1))
        bitmap = kernels.pack_bits(positions, -(-size // NUM_PIECES))
        kernels.dealt_ids(owner, kernels.unpack_bits(bitmap), NUM_PIECES, 0)


def sum_operations(inputs: Inputs) -> Iterator[Operation]:
    lists = [ids for ids, _ in inputs.pieces]
    union, positions = kernels.union_positions(lists, inputs.size)
    num_bytes = sum(ids.nbytes for ids in lists)
    join = partial(kernels.union_positions, lists, inputs.size)
    yield Operation("union of 8", join, num_bytes, num_bytes + union.nbytes)
    placed = [(each, values) for each, (_, values) in zip(positions, inputs.pieces, strict=True)]
    yield Operation(
        "sum 8 at, elements",
        lambda: kernels.sum_rows_at(placed, union.numel(), 1, torch.float32),
        num_bytes * 3 // 2,
        4 * union.numel(),
    )
    wide = inputs.wide_pieces
    wide_bytes = sum(ids.nbytes + values.nbytes for ids, values in wide)
    total_bytes = kernels.sum_rows(wide)[1].nbytes
    narrow = [(ids, values.bfloat16()) for ids, values in wide]
    yield Operation("sum 8, rows of 64", lambda: kernels.sum_rows(wide), wide_bytes, total_bytes)
    yield Operation("sum 8, bf16 rows of 64", lambda: kernels.sum_rows(narrow), wide_bytes // 2, total_bytes // 2)
    num_rows, values = wide[0][1].shape[0], wide[0][1]
    same = [(torch.arange(num_rows), torch.roll(values, piece, dims=0)) for piece in range(NUM_PIECES)]
    yield Operation(
        "sum 8 at, the same rows of 64",
        lambda: kernels.sum_rows_at(same, num_rows, ROW_ELEMENTS, values.dtype),
        NUM_PIECES * (8 * num_rows + values.nbytes),
        values.nbytes,
    )


def seconds(call: Callable[[], object], times: int) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(times):
        call()
    return (clock() - started) / times


def measure(operation: Operation, inputs: Inputs, bandwidth: Bandwidth, repeat: int) -> Result:
    times, slowest = {}, 0.0
    for twin in TWINS:
        with kernels.using(twin):
            operation.run()  # compiled, and memory touched
            once = seconds(operation.run, 1)
        times[twin], slowest = max(1, int(SAMPLE_SECONDS / once)), max(slowest, once)
    repeat = max(2, min(repeat, int(TWIN_SECONDS / slowest)))
    samples: dict[str, list[float]] = {twin: [] for twin in TWINS}
    for _ in range(repeat):
        for twin in TWINS:
            with kernels.using(twin):
                operation.run()  # a training has one twin, which does not get its memory back from the other
                samples[twin].append(seconds(operation.run, times[twin]))
    return Result(
        operation.name,
        inputs.size,
        inputs.density,
        operation.read_bytes + operation.written_bytes,
        bandwidth.floor_seconds(operation),
        *(figure for twin in TWINS for figure in (statistics.median(samples[twin]), spread(samples[twin]))),
    )


def spread(samples: list[float]) -> float:
    """Between the quartiles."""
    first, _, third = statistics.quantiles(samples, n=4)
    return third - first


def show(result: Result) -> None:
    reference, compiled = result.reference_seconds, result.numba_seconds
    print(
        f"{result.operation:24} {result.size:>11,} {100 * result.density:5.1f} % {result.moved_bytes / 1e6:9.3f} MB"
        f"  floor {1e3 * result.floor_seconds:9.4f} ms"
        f"  reference {1e3 * reference:9.4f} +- {1e3 * result.reference_spread_seconds / 2:.4f}"
        f"  numba {1e3 * compiled:9.4f} +- {1e3 * result.numba_spread_seconds / 2:.4f}"
        f"  {reference / compiled:6.2f}x  {compiled / result.floor_seconds if result.floor_seconds else 0:6.1f} floors",
        flush=True,
    )


def machine() -> dict[str, object]:
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "torch": torch.__version__,
        "numba": version("numba"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor() -> str:
    """As Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--operations", nargs="+", help="only those whose names begin so")
    parser.add_argument("--threads", type=int, default=1, help="of torch; compiled kernels have one")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bandwidth = Bandwidth.measure()
    torch.set_num_threads(options.threads)
    print(f"one thread reads {bandwidth.read / 1e9:.1f} GB/s and writes {bandwidth.write / 1e9:.1f} GB/s")
    print(f"torch has {options.threads} threads; kernels compiled or loaded in {kernels.warm_up():.1f} s")
    results = []
    for size, density in ((size, density) for size in sorted(options.sizes) for density in options.densities):
        few = size * density <= MAX_IDS
        for make in (row_operations, id_operations, sum_operations) if few else (row_operations,):
            inputs = Inputs(size, density)  # anew, so that memory is given back
            for operation in make(inputs):
                if not options.operations or operation.name.startswith(tuple(options.operations)):
                    results.append(measure(operation, inputs, bandwidth, options.repeat))
                    show(results[-1])
    if options.json:
        found = {**machine(), "torch_threads": options.threads, "bandwidth": asdict(bandwidth)}
        found["results"] = [asdict(result) for result in results]
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
