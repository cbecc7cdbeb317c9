"""One page of what a GPU shows, to send back: tests, kernels, steps of a training, waits, NCCL; by `make test-gpu`.

    python benchmarks/gpu_page.py --output benchmarks/results/gpu.md
    python benchmarks/gpu_page.py --cpu --output /tmp/page.md     # shows that it runs, on the CPU, with small sizes

Each part is measured by itself: one that fails is a line on the page, and the others go on. The exit status is 1 if a
test failed or a part did.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_gpu_kernels import DENSITIES, SIZES, copy_bandwidth, measure_all, seconds_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

Row = dict[str, Any]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
NUM_ROWS, WIDTH, BATCH = 500_000, 64, 4096
PROBED_BYTES = (1 << 20, 1 << 26)


def run_tests(cpu: bool) -> list[Row]:
    """Run the tests that need a GPU and return their counts, and a row for each that failed."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "junit.xml"
        chosen = ["tests/unit/test_gpu_dispatch.py"] if cpu else ["-m", "gpu", "tests/gpu"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]
        subprocess.run(command, cwd=root, check=False)
        return test_rows(report.read_text())


def test_rows(junit: str) -> list[Row]:
    """Return the counts of a report of pytest, and the first line of each failure."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failures = [(case, failure) for case in cases for failure in (*case.iter("failure"), *case.iter("error"))]
    skipped = sum(1 for case in cases for _ in case.iter("skipped"))
    counts = {"passed": len(cases) - len({id(case) for case, _ in failures}) - skipped, "failed": len(failures)}
    rows: list[Row] = [{"test": "all", **counts, "skipped": skipped, "what": ""}]
    for case, failure in failures:
        reason = (failure.get("message") or "").split("\n")[0][:200]
        rows.append({"test": f"{case.get('classname')}::{case.get('name')}", "what": reason})
    return rows


class Tagger(nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_rows, WIDTH)
        self.hidden = nn.Linear(WIDTH, 1024)
        self.out = nn.Linear(1024, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.words(words))))


def _train(context: RankContext, backend: str, cpu: bool, attached: bool, num_rows: int, steps: int) -> Row:
    """Return the median seconds of a step, and how often the training's thread and others wait for the device."""
    shared = cpu or torch.cuda.device_count() < context.world_size
    device = torch.device("cpu") if cpu else torch.device("cuda", 0 if shared else context.rank)
    if not cpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    group = dist.new_group(backend=backend)
    model = DistributedDataParallel(Tagger(num_rows).to(device), process_group=group)
    sync = thinwire.attach(model) if attached else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(context.rank)
    batches = [(torch.rand(BATCH, generator=data) ** 3 * num_rows).long().to(device) for _ in range(8)]
    seconds = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batches[number % len(batches)]).square().mean().backward()
        optimizer.step()

    warm_steps = 2 if cpu else 10
    for number in range(warm_steps + steps):
        _synchronize(cpu)
        started = time.perf_counter()
        step(number)
        _synchronize(cpu)
        seconds += [time.perf_counter() - started] if number >= warm_steps else []
    activities = [ProfilerActivity.CPU] + ([] if cpu else [ProfilerActivity.CUDA])
    with profile(activities=activities) as trace:
        for number in range(4):
            step(number)
    _synchronize(cpu)
    waits = sum(event.count for event in trace.key_averages() if event.key in WAITS) / 4
    sent = sync.stats()["comm/bytes_sent"] / sync.stats()["comm/steps"] if sync is not None else None
    if sync is not None:
        sync.detach()
    return {"step_ms": 1e3 * statistics.median(seconds), "waits_a_step": waits, "bytes_a_step": sent}


def _synchronize(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()


def step_rows(cpu: bool) -> list[Row]:
    """Measure stock DDP and thinwire, each with the process groups that this machine has."""
    gpus = 0 if cpu else torch.cuda.device_count()
    num_rows, steps = (10_000, 2) if cpu else (NUM_ROWS, 30)
    setups = [(1, "gloo" if cpu else "nccl"), (2, "gloo"), *([(gpus, "nccl")] if gpus > 1 else [])]
    rows = []
    for world_size, backend in setups:
        for attached in (False, True):
            name = {"ranks": world_size, "backend": backend, "method": "thinwire" if attached else "stock DDP"}
            try:
                call = (_train, backend, cpu, attached, num_rows, steps)
                outcomes = run_ranks(*call, world_size=world_size, timeout_seconds=300)
                rows.append({**name, **max((outcome.value for outcome in outcomes), key=lambda row: row["step_ms"])})
            except Exception as error:
                rows.append({**name, "what": f"FAILED: {_one_line(error)}"})
    return rows


def _probe(context: RankContext, backend: str, cpu: bool) -> list[Row]:
    device = torch.device("cpu") if cpu else torch.device("cuda", context.rank)
    if not cpu:
        torch.cuda.set_device(device)
    group = dist.new_group(backend=backend)
    rows = []
    for num_bytes in PROBED_BYTES:
        tensor = torch.ones(num_bytes // 4, device=device)
        seconds = seconds_of(lambda tensor=tensor: dist.all_reduce(tensor, group=group), device, 5)
        rate = 2 * (context.world_size - 1) / context.world_size * num_bytes / seconds
        rows.append({"all_reduce_bytes": num_bytes, "ms": 1e3 * seconds, "gigabytes_a_second": rate / 1e9})
    return rows


def probe_rows(cpu: bool) -> list[Row]:
    """Measure the all-reduce of a group with a GPU for each rank; nothing with fewer than two GPUs."""
    world_size = 2 if cpu else torch.cuda.device_count()
    if world_size < 2:
        return [{"what": "one GPU: nothing to probe"}]
    return run_ranks(_probe, "gloo" if cpu else "nccl", cpu, world_size=world_size, timeout_seconds=200)[0].value


def kernel_rows(cpu: bool) -> list[Row]:
    """Measure kernels, and what part of the bandwidth of a copy they reach."""
    device = torch.device("cpu" if cpu else "cuda")
    bandwidth = copy_bandwidth(device, 1 << 24 if cpu else 1 << 30)
    rows: list[Row] = [{"operation": "copy", "gigabytes_a_second": bandwidth / 1e9, "of_a_copy": 1.0}]
    for result in measure_all(device, [100_000] if cpu else SIZES, [0.05] if cpu else DENSITIES, 3 if cpu else 9):
        rate = result.moved_bytes / result.seconds if result.seconds else 0.0
        rows.append({**asdict(result), "gigabytes_a_second": rate / 1e9, "of_a_copy": rate / bandwidth})
    return rows


def machine_rows(cpu: bool) -> list[Row]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        devices = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError) as error:
        devices = [f"no nvidia-smi ({type(error).__name__})"]
    nccl = "none" if cpu else ".".join(map(str, torch.cuda.nccl.version()))
    found = {
        "measured on": "the CPU: no figure of this page is of a GPU" if cpu else torch.cuda.get_device_name(),
        "devices and drivers": "; ".join(filter(None, devices)),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}",
        "triton, numba, thinwire": ", ".join(_version(name) for name in ("triton", "numba", "thinwire")),
        "python": f"{platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return [{"name": name, "value": value} for name, value in found.items()]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "Machine": machine_rows,
    "Tests": run_tests,
    "A step of a training": step_rows,
    "Kernels": kernel_rows,
    "All-reduce": probe_rows,
}


def measured(parts: Iterable[str], cpu: bool) -> dict[str, list[Row]]:
    """Return the rows of each part; one that fails has its error as a row."""
    found = {}
    for name in parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found[name] = PARTS[name](cpu)
        except Exception as error:
            found[name] = [{"what": f"FAILED: {_one_line(error)}"}]
    return found


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def page(parts: dict[str, list[Row]]) -> str:
    """Return the page in Markdown, a table for each part, and all numbers as JSON at the end."""
    text = [
        "# thinwire on a GPU",
        "",
        "Written by `make test-gpu`. Send it back as it is, also where something failed.",
    ]
    for name, rows in parts.items():
        text += ["", f"## {name}", "", *_table(rows)]
    numbers = json.dumps(parts, default=str)
    return "\n".join([*text, "", "<details><summary>All numbers</summary>", "", numbers, "", "</details>", ""])


def _table(rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|")


def is_green(parts: dict[str, list[Row]]) -> bool:
    """Return whether all parts were measured and no test failed."""
    return not any(
        row.get("failed") or row.get("what", "").startswith("FAILED") for rows in parts.values() for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.md"))
    parser.add_argument("--cpu", action="store_true", help="measure the CPU, to show that this program runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure; --cpu shows that this program runs")
    found = measured(options.parts, options.cpu)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page(found))
    print(f"{options.output}: {'all parts measured, all tests passed' if is_green(found) else 'SOMETHING FAILED'}")
    sys.exit(not is_green(found))


if __name__ == "__main__":
    main()
