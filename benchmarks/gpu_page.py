"""One page of what a GPU shows, to send back; in ten minutes, with one GPU, from a checkout without any installation.

    python benchmarks/gpu_page.py --output gpu.md                 # with the torch that is there, 2.9 or later
    python benchmarks/gpu_page.py --dry --output /tmp/page.md     # shows that it runs: on CPUs, with small sizes

Each part is a process with a limit of time, the most valuable ones first. Each row is on the page before the next is
measured, so a page that somebody has cut short is worth sending too. The exit status is 1 if a part or a test failed.

Ranks of NCCL may share one GPU here: each says that it is on a host of its own (NCCL_HOSTID), so NCCL connects them by
sockets on the loopback interface. Bits, order, waits and failures are real then; times of links are not. Where NCCL
refuses that, the same sums run over Gloo with tensors of the GPU.
"""

# ruff: noqa: E402  paths come first
from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / name) for name in ("src", "benchmarks", "tests/common")]
sys.path[:0] = [path for path in PATHS if path not in sys.path]  # nothing of it is installed

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from bench_gpu_kernels import copy_bandwidth, measure_all
from thinwire import kernels, schemes
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.comm.collectives import Collectives
from thinwire.comm.process_group import Traffic
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.rows import floats
from thinwire.sums.collective import CollectiveSum, NamedGradient

Row = dict[str, Any]
ASSUMED = {"copy TB/s": "85 % of the data sheet", "GB/s to the host": 50, "us to launch": "6 to 8", "us to wait": 30}
"""What docs/gpu.md counts with."""
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")]),
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # which NCCL asks for from 2.30 on
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


class Page:
    """The rows so far, one JSON line each, and the page that is made of them."""

    def __init__(self, output: Path) -> None:
        self.output, self._lines = output, output.with_suffix(".jsonl")

    def begin(self, dry: bool) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._lines.write_text("")
        if dry:
            self.add("Machine", {"name": "dry run", "value": "no figure of this page is of a GPU"})

    def add(self, part: str, row: Row) -> None:
        """Put a row on the disk, and on the page."""
        with self._lines.open("a") as file:
            file.write(json.dumps({"part": part, **row}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new = self.output.with_suffix(".new")
        new.write_text(page(self.parts()))
        new.replace(self.output)

    def parts(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for line in self._lines.read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row.pop("part"), []).append(row)
        return found

    def knows(self, part: str, name: str) -> Any:
        """Return the value of the row of that name, or None."""
        return next((row.get("value") for row in self.parts().get(part, ()) if row.get("name") == name), None)


@dataclass(frozen=True)
class Here:
    """Where to measure: on a GPU, or without one; and which back end sums tensors of the device."""

    dry: bool
    nccl: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda:0")

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeat: int = 7) -> float:
        samples = []
        for number in range(repeat + 2):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            samples += [time.perf_counter() - began] if number > 1 else []
        return statistics.median(samples)


# --- parts


def machine(here: Here) -> Iterator[Row]:
    """The machine, and what the page of predictions assumes of any."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,mig.mode.current", "--format=csv,noheader"]
    try:
        devices = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError) as error:
        devices = [f"no nvidia-smi ({type(error).__name__})"]
    nccl = "none" if here.dry else ".".join(map(str, torch.cuda.nccl.version()))  # pyrefly: ignore
    found = {
        "devices and drivers": "; ".join(filter(None, devices)),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}",
        **{name: _version(name) for name in ("triton", "numba", "numpy", "pytest", "hypothesis")},
        "python": f"{platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    yield from ({"name": name, "value": value} for name, value in found.items())
    if here.dry:
        return
    works = kernels.dispatch._has_triton(here.device)
    yield {"name": "Triton launches", "value": works}
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there, small = torch.empty(1 << 28, dtype=torch.uint8, device=here.device), torch.ones(8, device=here.device)
    measured = {
        "copy TB/s": copy_bandwidth(here.device, 1 << 30) / 1e12,
        "GB/s to the host": 0.268 / here.seconds(lambda: host.copy_(there, non_blocking=True)),
        "us to launch": 1e6 * _host_seconds(lambda: small.add_(1)),
        "us to wait": 1e6 * _host_seconds(lambda: small.cpu()),
    }
    for name, value in measured.items():
        yield {"name": name, "value": value, "assumed": ASSUMED[name]}


def nccl(here: Here) -> Iterator[Row]:
    """Whether several ranks of NCCL share a GPU: zero splits, odd bytes, coalesced parts."""
    try:
        outcomes = run_ranks(_probe, here, world_size=2, timeout_seconds=60)
    except Exception as error:
        yield {"name": "works", "value": False, "what": f"{_one_line(error)}; the sums below go over Gloo"}
        return
    yield {"name": "works", "value": True}
    for rank, outcome in enumerate(outcomes):
        yield {"name": f"rank {rank}", **outcome.value}


def bits(here: Here) -> Iterator[Row]:
    """Trainings by the collectives of the device's group end with the bits of those by the host's way."""
    for world_size, kinds in ((2, KINDS), (3, KINDS[:2]), (4, ("two_level:zen",))):
        for kind in kinds:
            row = {"ranks": world_size, "training": kind}
            try:
                outcomes = run_ranks(_compare, here, kind, world_size=world_size, timeout_seconds=60)
                yield {**row, **outcomes[0].value}
            except Exception as error:
                yield {**row, "what": f"FAILED: {_one_line(error)}"}


def waits(here: Here) -> Iterator[Row]:
    """How often the host waits for the device in a step, by line, as torch sees it."""
    yield from run_ranks(_count_waits, here, world_size=2, timeout_seconds=60)[0].value


def sum_of_eight(here: Here) -> Iterator[Row]:
    """A sum as rank 0 of 8 with peers like itself, without a link: to hold beside the tables of docs/gpu.md."""
    for rows, width, density, tables in (
        (1_000_000, 64, 0.052, 1), (790_000, 512, 0.011, 1), (20_000, 16, 0.05, 1), (38_000, 64, 0.05, 26),
    ):  # fmt: skip
        rows = rows // 100 if here.dry else rows
        mask = torch.rand(rows, 1, device=here.device) < density
        ids = mask.flatten().nonzero().flatten() // 8 * 8
        gradients = [torch.zeros(rows, width, device=here.device) for _ in range(tables)]
        sums = CollectiveSum(_PeersAlike(8))
        fill = here.seconds(lambda: [one.zero_().index_fill_(0, ids, 1.0) for one in gradients])  # noqa: B023

        def step() -> None:
            for one in gradients:  # noqa: B023
                one.zero_().index_fill_(0, ids, 1.0)  # noqa: B023
            named = [NamedGradient(str(number), one) for number, one in enumerate(gradients)]  # noqa: B023
            sums.all_reduce(named, schemes.ZEN, 1 / 8)  # noqa: B023

        milliseconds = 1e3 * (here.seconds(step) - fill)
        row = {"tables": tables, "rows": rows, "width": width, "density": density, "ms": milliseconds}
        yield {**row, **({} if here.dry else _launches(step))}


def tests(here: Here) -> Iterator[Row]:
    """The tests that need a GPU; in a dry run some that do not."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "junit.xml"
        chosen = ["tests/kernels/test_dispatch.py"] if here.dry else ["-m", "gpu", "tests/gpu"]
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
        found = subprocess.run([*command, f"--junitxml={report}", *chosen], cwd=ROOT, check=False, capture_output=True)
        if not report.exists():
            raise RuntimeError(f"pytest did not run: {(found.stderr or found.stdout).decode()[-300:]}")
        yield from test_rows(report.read_text())


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


def steps(here: Here) -> Iterator[Row]:
    """Steps of stock DDP and of thinwire with each plug and kind of gradient, on two ranks."""
    for name in ("stock", *METHODS):
        try:
            outcomes = run_ranks(_timed_training, here, name, world_size=2, timeout_seconds=60)
            yield {"method": name, **outcomes[0].value}
        except Exception as error:
            yield {"method": name, "what": f"FAILED: {_one_line(error)}"}


def kernel_times(here: Here) -> Iterator[Row]:
    """Kernels, and what part of the bandwidth of a copy they reach."""
    best = copy_bandwidth(here.device, 1 << 24 if here.dry else 1 << 30)
    for result in measure_all(here.device, [100_000] if here.dry else [64_000_000, 10_000_000], [0.052], 5):
        rate = result.moved_bytes / result.seconds if result.seconds else 0.0
        yield {**asdict(result), "of_a_copy": rate / best}


def codes(here: Here) -> Iterator[Row]:
    """The lossless code: bits of a value, speed, and the bytes of the host."""
    for dtype in (torch.bfloat16, torch.float32):
        values = (torch.randn(1 << (14 if here.dry else 27), device=here.device) * 1e-3).bfloat16().to(dtype)
        message, out = floats.encode(values), torch.empty_like(values)
        floats.decode(message, out)
        few = values[:5000].clone()
        yield {
            "dtype": dtype,
            "bits": 8 * message.numel() / values.numel(),
            "the same bits": torch.equal(values.view(torch.uint8), out.view(torch.uint8)),
            "bytes of the host": torch.equal(floats.encode(few).cpu(), floats.encode(few.cpu())),
            "encode GB/s": values.nbytes / here.seconds(lambda: floats.encode(values)) / 1e9,  # noqa: B023
            "decode GB/s": values.nbytes / here.seconds(lambda: floats.decode(message, out)) / 1e9,  # noqa: B023
        }


def checkpoints(here: Here) -> Iterator[Row]:
    """A checkpoint of a state on the device, and its bits after a restore."""
    with tempfile.TemporaryDirectory() as directory:
        yield from (outcome.value for outcome in run_ranks(_checkpoints, here, directory, world_size=2))


def death(here: Here) -> Iterator[Row]:
    """What the others hear when a rank is killed."""
    outcomes = run_ranks(_dies, here, world_size=2, timeout_seconds=60, check=False)
    yield {"rank": 0, "hears": outcomes[0].value or f"FAILED: {outcomes[0].error}"}


def sanitizer(here: Here) -> Iterator[Row]:
    """What NVIDIA's compute-sanitizer says of the kernels of a sum."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or here.dry:
        yield {"what": "no compute-sanitizer"}
        return
    code = (
        "import torch; from thinwire import kernels as k; t = torch.zeros(3001, 3, device='cuda'); t[::7] = 1;"
        "i, c = k.find_rows(t, 500); k.deal_rows(i, 3001, 8, 1); v = k.take_rows(t, i);"
        "k.merge_rows(i.repeat(3), v.repeat(3, 1), 3001, 1400); k.put_rows(t, i, v);"
        "b = k.pack_bits(i, 3001); k.find_bits(b, 430); torch.cuda.synchronize()"
    )
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, sys.executable, "-c", code]
        found = subprocess.run(command, capture_output=True, text=True, timeout=40, env=environment, check=False)
        yield {"tool": kind, "says": " ".join((found.stdout + found.stderr).split())[-400:]}


@dataclass(frozen=True)
class Part:
    """A part of the page, and the seconds that it may take on a GPU."""

    measure: Callable[[Here], Iterator[Row]]
    seconds: int


PARTS = {
    "Machine": Part(machine, 40),
    "NCCL on one GPU": Part(nccl, 70),
    "Bits": Part(bits, 150),
    "Waits of the host": Part(waits, 60),
    "A sum of 8 ranks": Part(sum_of_eight, 60),
    "Tests": Part(tests, 120),
    "Steps": Part(steps, 120),
    "Kernels": Part(kernel_times, 60),
    "Lossless codes": Part(codes, 30),
    "Checkpoints": Part(checkpoints, 45),
    "Death of a rank": Part(death, 60),
    "Sanitizer": Part(sanitizer, 90),
}
NCCL = "NCCL on one GPU"

# --- what ranks do

KINDS = (
    "zen",
    "zen, sparse",
    "agsparse",
    "zen, bfloat16",
    "auto",
    "plain module",
    "side stream",
    "lookups twice",
    "lossless",
)
METHODS = {
    "tables by zen": ("zen", "native"),
    "auto": ("auto", "auto"),
    "lossless": ("zen", "lossless"),
    "top_k": ("zen", thinwire.compress.top_k(0.01)),
    "FSDP2": ("zen", "native"),
    "outer loop": ("zen", "native"),
}


class Net(nn.Module):
    """Two tables and a layer; ``twice`` looks the first one up a second time."""

    def __init__(self, kind: str = "", rows: int = 50_000) -> None:
        super().__init__()
        sparse, self.twice = "sparse" in kind, "twice" in kind
        self.table, self.small = nn.Embedding(rows, 48, sparse=sparse), nn.Embedding(900, 48, sparse=sparse)
        self.layer = nn.Linear(48, 64)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids) + self.small(ids % 900)
        return self.layer(found + self.table(ids.flip(0) // 2) if self.twice else found)


def _group(context: RankContext, here: Here, timeout: float = 30.0) -> dist.ProcessGroup:
    """Return a group of the device; several ranks may share it."""
    os.environ["NCCL_HOSTID"] = f"rank{context.rank}"  # before NCCL is asked for anything
    if not here.dry:
        torch.cuda.set_device(0)
    if not here.nccl:
        os.environ["THINWIRE_ROUTE"] = "collective"
        dist.ProcessGroup.allreduce_coalesced = _one_by_one(dist.ProcessGroup.allreduce_coalesced)  # type: ignore
    group = dist.new_group(backend="nccl" if here.nccl else "gloo", timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _one_by_one(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo coalesces tensors of the CPU only."""

    def all_reduce(group: Any, tensors: Any, options: Any) -> Any:
        if not tensors[0].is_cuda:
            return whole(group, tensors, options)
        return [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors][-1]

    return all_reduce


def _probe(context: RankContext, here: Here) -> Row:
    began = time.monotonic()
    group = _group(context, Here(here.dry, nccl=not here.dry))
    tensor = torch.full((1 << 20,), float(context.rank + 1), device=here.device)
    dist.all_reduce(tensor, group=group)
    total, opened = float(tensor[0]), time.monotonic() - began
    outgoing = torch.arange(5 if context.rank == 0 else 3, dtype=torch.uint8, device=here.device)
    receives = [5, 3] if context.rank == 0 else [0, 0]
    incoming = outgoing.new_empty(sum(receives))
    dist.all_to_all_single(incoming, outgoing, receives, [outgoing.numel(), 0], group=group)
    milliseconds = 1e3 * here.seconds(lambda: dist.all_reduce(tensor, group=group), 5)
    return {"sum": total, "all_to_all": incoming.tolist(), "opened_s": opened, "all_reduce_4MB_ms": milliseconds}


def _train(context: RankContext, here: Here, kind: str, group: dist.ProcessGroup, count: int = 6) -> list[Tensor]:
    """Train by the given group; the parameters at the end."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
    model = Net(kind, 2000 if here.dry else 50_000).to(here.device, dtype)
    scheme = next((name for name in ("agsparse", "auto", "two_level:zen") if name in kind), "zen")
    os.environ["THINWIRE_HOST"] = str(context.rank // 2 if "two_level" in kind else 0)
    dense = "lossless" if "lossless" in kind else "auto"
    if "plain" in kind:
        wrapped: nn.Module = model
        sync = thinwire.attach(model, scheme, dense, process_group=group)
    else:
        wrapped = DistributedDataParallel(model, process_group=group)
        sync = thinwire.attach(wrapped, scheme, dense)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.5), torch.Generator().manual_seed(100 + context.rank)
    is_aside = "side" in kind and not here.dry
    for step in range(count):
        ids = (torch.rand(64 * (1 + 5 * (step == 3)), generator=data) ** 3 * model.table.num_embeddings).long()
        stream = torch.cuda.Stream() if is_aside else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            optimizer.zero_grad()
            wrapped(ids.to(here.device)).float().square().mean().backward()
            optimizer.step()
        here.synchronize()
    sync.detach()
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def _compare(context: RankContext, here: Here, kind: str) -> Row:
    group, host = _group(context, here), dist.new_group(backend="gloo")
    assert isinstance(host, dist.ProcessGroup)
    began = time.monotonic()
    mine = _train(context, here, kind, group)
    seconds = time.monotonic() - began
    os.environ["THINWIRE_ROUTE"] = "rows"
    right = _train(context, Here(dry=True), kind, host) if here.dry else _train_on_host(context, kind, host)
    flat = torch.cat([one.flatten().float() for one in mine])
    everywhere = [torch.empty_like(flat) for _ in range(context.world_size)]
    dist.all_gather(everywhere, flat, group=host)
    off = max(float((one.float() - other.float()).abs().max()) for one, other in zip(mine, right, strict=True))
    alike = all(torch.equal(one, flat) for one in everywhere)
    return {"off_from_the_host": off, "alike_on_ranks": alike, "seconds": seconds, "what": "" if alike else "FAILED"}


def _train_on_host(context: RankContext, kind: str, host: dist.ProcessGroup) -> list[Tensor]:
    class Host(Here):
        @property
        def device(self) -> torch.device:
            return torch.device("cpu")

    return _train(context, Host(dry=False), kind.replace("side stream", "zen"), host)


def _count_waits(context: RankContext, here: Here) -> list[Row]:
    """Every wait of the host that torch sees in the last of six steps, by line."""
    group = _group(context, here)
    model = DistributedDataParallel(Net(rows=2000 if here.dry else 50_000).to(here.device), process_group=group)
    sync = thinwire.attach(model, "zen")
    found = collections.Counter[str]()

    def note(*_: object, **__: object) -> None:
        ours = [frame for frame in traceback.extract_stack() if "/thinwire/" in frame.filename]
        found[f"{ours[-1].filename.rpartition('thinwire/')[2]}:{ours[-1].lineno}" if ours else "torch"] += 1

    for step in range(6):
        if step == 5 and not here.dry:
            warnings.showwarning = note  # type: ignore[assignment]
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        model.zero_grad()
        model(torch.randint(0, 900, (64,), device=here.device)).square().mean().backward()
    if not here.dry:
        torch.cuda.set_sync_debug_mode("default")
    counted = sync.stats().get("comm/host_waits")
    sync.detach()
    return [{"line": "counted by thinwire in 6 steps", "waits": counted}] + [
        {"line": line, "waits": count} for line, count in found.most_common()
    ]


class _PeersAlike(Collectives):
    """Seven peers that send what this rank sends, at no cost."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size, self.host_waits = 0, world_size, 0
        self.global_ranks = self.hosts = range(world_size)
        self.traffic = Traffic()

    def _run(self, function: Callable[..., object], *args: Any) -> None:
        function(*args)

    def _all_to_all(self, incoming: Tensor, outgoing: Tensor, receives: list[int], sends: list[int]) -> None:
        incoming.copy_(outgoing[: sends[0]].repeat(self.world_size)[: incoming.numel()])

    def _all_gather(self, incoming: Tensor, outgoing: Tensor) -> None:
        incoming.copy_(outgoing.repeat(self.world_size))


def _timed_training(context: RankContext, here: Here, name: str) -> Row:
    """The median seconds of a step by one method."""
    group = _group(context, here)
    torch.manual_seed(0)
    model: nn.Module = Net(rows=2000 if here.dry else 500_000).to(here.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, sync = model, None
    if name == "FSDP2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, here.device.type)
        fully_shard(model, mesh=mesh, ignored_params=thinwire.embedding_tables(model))
        sync = thinwire.attach(model, *METHODS[name])
    elif name == "outer loop":
        sync = thinwire.outer.attach(model, optimizer, thinwire.outer.local_sgd(every=4), process_group=group)
    else:
        wrapped = DistributedDataParallel(model, process_group=group)
        sync = None if name == "stock" else thinwire.attach(wrapped, *METHODS[name])
    ids = torch.randint(0, 2000, (4096,), device=here.device)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(ids).square().mean().backward()
        optimizer.step()

    seconds = here.seconds(step, 3 if here.dry else 20)
    sent = None if sync is None else sync.stats().get("comm/bytes_sent")
    if sync is not None:
        sync.detach()
    return {"step_ms": 1e3 * seconds, "bytes_sent": sent}


def _checkpoints(context: RankContext, here: Here, directory: str) -> Row:
    """Whether a state that was changed after a checkpoint comes back with its bits."""
    os.environ["THINWIRE_SECRET"] = "a secret of the page, long enough"
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    group, socket = _group(context, here), f"{directory}/{context.rank}"
    start_holder(HolderOptions(socket=socket, memory_budget="100MB", drain_seconds=0.0))
    try:
        return _kept_and_restored(here, group, Storage("page", holder_socket=socket))
    finally:
        with HolderClient.connect(socket, os.environ["THINWIRE_SECRET"].encode()) as client:
            stop_holder(client)


def _kept_and_restored(here: Here, group: dist.ProcessGroup, storage: Storage) -> Row:
    torch.manual_seed(0)
    model = nn.Linear(512, 512).to(here.device)
    optimizer = torch.optim.Adam(model.parameters())
    wrapped, policy = DistributedDataParallel(model, process_group=group), CheckpointPolicy(max_overhead=None)
    with Checkpointer(model, optimizer, storage=storage, policy=policy) as checkpointer:
        checkpointer.restore()
        kept = {}
        for number in range(1, 7):
            optimizer.zero_grad()
            wrapped(torch.ones(8, 512, device=here.device)).square().mean().backward()
            optimizer.step()
            kept[number] = model.weight.detach().clone()
            checkpointer.step()
        checkpointer.flush(20)
    nn.init.zeros_(model.weight)
    with Checkpointer(model, optimizer, storage=storage, policy=policy) as checkpointer:
        step = checkpointer.restore()
    same = step is not None and torch.equal(kept[step], model.weight)
    return {"restored step": step, "the same bits": same, "what": "" if same else "FAILED"}


def _dies(context: RankContext, here: Here) -> str:
    group = _group(context, here, timeout=10.0)
    table = nn.Embedding(5000, 16).to(here.device)
    thinwire.attach(table, "zen", process_group=group)
    began = 0.0
    for step in range(4):
        if step == 2:
            began = time.monotonic()
            if context.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            table.zero_grad()
            table(torch.arange(9, device=here.device)).sum().backward()
            float(table.weight.grad[0, 0])  # type: ignore[index]
        except Exception as error:
            return f"after {time.monotonic() - began:.1f} s: {_one_line(error)}"
    return "FAILED: nothing"


def _launches(step: Callable[[], None]) -> Row:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    events = trace.key_averages()
    longest = sorted(events, key=lambda event: -event.self_device_time_total)[:5]
    return {
        "launches": sum(event.count for event in events if "LaunchKernel" in event.key),
        "device us": ", ".join(f"{event.key[:40]} {event.self_device_time_total:.0f}" for event in longest),
    }


def _host_seconds(work: Callable[[], object], repeat: int = 200) -> float:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeat):
        work()
    found = (time.perf_counter() - began) / repeat
    torch.cuda.synchronize()
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 500 else f"{text[:150]} ... {text[-340:]}"  # of an error of ranks the end says why


# --- the page


def page(parts: dict[str, list[Row]]) -> str:
    """Return the page in Markdown, a table for each part, and all numbers as JSON at the end."""
    text = ["# thinwire on a GPU", "", "By `benchmarks/gpu_page.py`. Send it as it is, also where something failed."]
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
    rows = [row for rows in parts.values() for row in rows]
    return not any(row.get("failed") or "FAILED" in f"{row.get('what')}{row.get('hears')}" for row in rows)


def measure(name: str, result: Page, dry: bool) -> None:
    """Measure one part in this process; what fails is a row."""
    here = Here(dry, nccl=not dry and bool(result.knows(NCCL, "works")))
    try:
        for row in PARTS[name].measure(here):
            result.add(name, row)
    except Exception as error:
        result.add(name, {"what": f"FAILED: {_one_line(error)}"})


def run(names: Sequence[str], result: Page, dry: bool, seconds: float) -> None:
    """Measure parts, each in a process that is killed at its limit, until the seconds are over."""
    began = time.monotonic()
    environment = {**os.environ, **ENVIRONMENT}
    warm = [sys.executable, "-c", "from thinwire import kernels; kernels.warm_up()"]  # before anything is timed
    warming = subprocess.Popen(warm, env=environment)
    for name in names:
        left = seconds - (time.monotonic() - began)
        if left < 10.0:
            result.add(name, {"what": f"not begun: {left:.0f} s are left"})
            continue
        if name not in ("Machine", NCCL) and warming.poll() is None:
            warming.wait(120)
        if result.knows("Machine", "Triton launches") is False:
            environment["THINWIRE_KERNELS"] = "reference"
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--part", name, "--output", str(result.output), *(["--dry"] * dry)]
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        limit = min(PARTS[name].seconds * (4 if dry else 1), left)  # on processors that others use, too
        try:
            if child.wait(limit):
                result.add(name, {"what": f"FAILED: the process ended with {child.returncode}"})
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            result.add(name, {"what": f"FAILED: killed after {limit:.0f} s"})
    warming.kill()
    warming.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.md"))
    parser.add_argument("--dry", action="store_true", help="without a GPU, to show that this program runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=570.0, help="begin no part later, and kill what runs then")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    result = Page(options.output)
    if options.part is not None:
        return measure(options.part, result, options.dry)
    if not options.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure; --dry shows that this program runs")
    result.begin(options.dry)
    run(options.parts, result, options.dry, options.seconds)
    print(result.output.read_text())
    green = is_green(result.parts())
    print(f"{options.output}: {'all parts measured, all tests passed' if green else 'SOMETHING FAILED'}")
    sys.exit(not green)


if __name__ == "__main__":
    main()
