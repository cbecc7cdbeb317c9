"""Kernels on a GPU beside two floors: their bytes at the measured copy bandwidth, and the same pipeline in plain torch.

    python benchmarks/bench_gpu_kernels.py --json benchmarks/results/gpu-kernels.json
    python benchmarks/bench_gpu_kernels.py --sizes 214000000 --densities 0.052 --operations "find + deal" "published"

Written without a GPU at hand: THIS HAS NOT RUN ON ONE YET, and no figure of it is in the documentation. Its operations
and the bytes that they must move are those of bench_kernels.py. Times are medians between CUDA events, so launches and
waits for sizes are in them; spreads are between the quartiles. "Plain torch" is the reference on the GPU, of which
bitmaps, Elias-Fano and the checksum are numpy on the host, copies included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from bench_kernels import DENSITIES, SIZES, Inputs, Operation, id_operations, row_operations, spread, sum_operations

from thinwire import kernels
from thinwire.kernels import dispatch

COPIED_BYTES = 1 << 30
TWINS = {"torch": "reference", "triton": "auto"}


@dataclass(frozen=True)
class Result:
    """Seconds are None where the memory of the GPU did not suffice."""

    operation: str
    size: int
    density: float
    moved_bytes: int
    floor_seconds: float
    torch_seconds: float | None
    torch_spread_seconds: float | None
    triton_seconds: float | None
    triton_spread_seconds: float | None


def samples_of(call: Callable[[], object], repeat: int) -> list[float]:
    """Seconds of each of so many calls, after two that compile and touch memory."""
    for _ in range(2):
        call()
    seconds = []
    for _ in range(repeat):
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        started.record()
        call()
        ended.record()
        ended.synchronize()
        seconds.append(started.elapsed_time(ended) / 1e3)
    return seconds


def copy_bandwidth() -> float:
    """Bytes a second, read and written ones together."""
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(samples_of(lambda: target.copy_(source), 10))


def median_and_spread(operation: Operation, mode: str, repeat: int) -> tuple[float, float] | tuple[None, None]:
    try:
        with kernels.using(mode):
            samples = samples_of(operation.run, repeat)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, None
    return statistics.median(samples), spread(samples)


def operations(inputs: Inputs) -> Iterator[Operation]:
    """All for which the memory suffices to make the input."""
    for make in (row_operations, id_operations, sum_operations):
        try:
            yield from make(inputs)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            print(f"{make.__name__}: too little GPU memory for {inputs.size:,} at {inputs.density}", file=sys.stderr)


def measure(operation: Operation, inputs: Inputs, bandwidth: float, repeat: int) -> Result:
    moved = operation.read_bytes + operation.written_bytes
    figures = [figure for mode in TWINS.values() for figure in median_and_spread(operation, mode, repeat)]
    return Result(operation.name, inputs.size, inputs.density, moved, moved / bandwidth, *figures)


def show(result: Result) -> None:
    floor, reference, compiled = result.floor_seconds, result.torch_seconds, result.triton_seconds
    print(
        f"{result.operation:24} {result.size:>11,} {100 * result.density:5.1f} % {result.moved_bytes / 1e6:9.3f} MB"
        f"  floor {1e3 * floor:9.4f} ms  torch {milliseconds(reference)}  triton {milliseconds(compiled)}"
        f"  {ratio(reference, compiled)}x  {ratio(compiled, floor)} floors",
        flush=True,
    )


def milliseconds(seconds: float | None) -> str:
    return "out of memory" if seconds is None else f"{1e3 * seconds:10.4f} ms"


def ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:7.2f}" if above is not None and below else "      -"


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.split("\n")[0]
    import triton  # pyrefly: ignore [missing-import]

    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver or "unknown",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--operations", nargs="+", help="only those whose names begin so")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the results there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure. benchmarks/bench_kernels.py measures the CPU")
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    if not dispatch.runs_on_gpu(torch.ones(1)):
        sys.exit("no Triton, a GPU too old for it, or THINWIRE_KERNELS=reference: both columns would be one")
    bandwidth, results = copy_bandwidth(), []
    print(f"{machine()}\ncopies move {bandwidth / 1e9:.0f} GB/s, read and written bytes together")
    for inputs in (Inputs(size, density) for size in options.sizes for density in options.densities):
        for operation in operations(inputs):
            if not options.operations or operation.name.startswith(tuple(options.operations)):
                results.append(measure(operation, inputs, bandwidth, options.repeat))
                show(results[-1])
    if options.json:
        found = {**machine(), "copy_bytes_per_second": bandwidth, "results": [asdict(result) for result in results]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
