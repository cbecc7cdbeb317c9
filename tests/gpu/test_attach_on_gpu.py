"""`attach` on a GPU: several processes share one over Gloo, and train as stock DDP does; two GPUs use NCCL as well."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_WORDS, WIDTH, STEPS = 5000, 16, 4
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


class Tagger(nn.Module):
    """A table of which a batch touches few rows, and dense layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH, sparse=sparse)
        self.hidden = nn.Linear(WIDTH, 300)
        self.out = nn.Linear(300, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.words(words))))


def train(
    context: RankContext,
    device: torch.device,
    sparse: bool,
    attached: bool,
    dtype: torch.dtype = torch.float32,
    process_group: dist.ProcessGroup | None = None,
    options: dict[str, Any] | None = None,
    scheme: str = "auto",
) -> tuple[list[Tensor], thinwire.Synchronizer | None]:
    """The parameters after a few steps, on the CPU."""
    torch.manual_seed(0)
    model = Tagger(sparse).to(device, dtype)
    ddp = DistributedDataParallel(model, process_group=process_group, **(options or {}))
    sync = thinwire.attach(ddp, scheme) if attached else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(100 + context.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        words = (torch.rand(24, generator=data) ** 3 * NUM_WORDS).long().to(device)
        ddp(words).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()], sync


def _same_as_stock(
    context: RankContext, sparse: bool, dtype: torch.dtype, options: dict[str, Any], scheme: str
) -> None:
    """Stock DDP always with dense gradients: its sparse ones over Gloo are another matter."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    stock, _ = train(context, device, False, False, dtype, options=options)
    mine, sync = train(context, device, sparse, True, dtype, options=options, scheme=scheme)
    assert sync is not None
    _check(context, mine, stock, dtype)
    stats = sync.stats()
    assert stats["comm/steps"] == STEPS
    assert 0 < stats["cuda/pinned_bytes"] < 1 << 26
    if scheme == "zen":
        assert stats["comm/bytes_sent"] < stats["comm/bytes_dense"]
    sync.detach()


def _check(context: RankContext, mine: list[Tensor], stock: list[Tensor], dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(mine, stock, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    flat = torch.cat([parameter.flatten() for parameter in mine])
    everyone = [torch.empty_like(flat) for _ in range(context.world_size)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(other, flat) for other in everyone), "the same bits on all ranks"


@pytest.mark.parametrize("scheme", ["auto", "zen", "dense"])
@pytest.mark.parametrize("sparse", [False, True])
def test_processes_on_one_gpu_train_as_stock_ddp(sparse: bool, scheme: str) -> None:
    run_ranks(_same_as_stock, sparse, torch.float32, {}, scheme, world_size=3, timeout_seconds=100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype: torch.dtype) -> None:
    run_ranks(_same_as_stock, False, dtype, {}, "zen", world_size=2, timeout_seconds=100)


@pytest.mark.parametrize(
    "options", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.01}], ids=str
)
def test_modes_of_ddp(options: dict[str, Any]) -> None:
    run_ranks(_same_as_stock, False, torch.float32, options, "auto", world_size=2, timeout_seconds=100)


def _plain_module(context: RankContext) -> None:
    """Without DDP, and with a compressor that keeps everything."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    stock, _ = train(context, device, False, False)
    torch.manual_seed(0)
    model = Tagger(False).to(device)
    sync = thinwire.attach(model, "zen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(100 + context.rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        words = (torch.rand(24, generator=data) ** 3 * NUM_WORDS).long().to(device)
        model(words).square().mean().backward()
        optimizer.step()
    _check(context, [parameter.detach().cpu() for parameter in model.parameters()], stock, torch.float32)
    sync.detach()


def test_a_plain_module_on_a_gpu() -> None:
    run_ranks(_plain_module, world_size=2, timeout_seconds=100)


def _table_alone(context: RankContext) -> None:
    """The device is kept busy, so that an optimizer that does not wait for the mean reads something else."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    table = nn.Embedding(NUM_WORDS, WIDTH).to(device)
    sync = thinwire.attach(table, "zen")
    for step in range(STEPS):
        table.zero_grad()
        words = [torch.arange(20) * (1 + rank + step) for rank in range(context.world_size)]
        loss = table(words[context.rank].to(device)).sum()
        with torch.cuda.stream(sync._staging._device._stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(1 << 28)
        loss.backward()
        gradient = table.weight.grad.clone()  # type: ignore[union-attr]
        expected = torch.zeros(NUM_WORDS, WIDTH)
        for each in words:
            expected.index_add_(0, each, torch.full((20, WIDTH), 1 / context.world_size))
        torch.testing.assert_close(gradient.cpu(), expected)
    sync.detach()


def test_a_mean_is_there_when_backward_has_ended() -> None:
    run_ranks(_table_alone, world_size=2, timeout_seconds=100)


# --- two GPUs


def _over_nccl(context: RankContext, sparse: bool) -> None:
    device = torch.device("cuda", context.rank)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    stock, _ = train(context, device, False, False, process_group=group)
    mine, sync = train(context, device, sparse, True, process_group=group, scheme="zen")
    _check(context, mine, stock, torch.float32)
    assert sync is not None
    others = next(row for row in sync.table() if row["name"] == "all other parameters")
    assert others["scheme"] == "NCCL", "dense gradients as stock DDP sends them"
    sync.detach()
    torch.cuda.synchronize()
    dist.destroy_process_group(group)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("sparse", [False, True])
def test_two_gpus_over_nccl(sparse: bool) -> None:
    run_ranks(_over_nccl, sparse, world_size=2, timeout_seconds=100)


# --- what the training stream waits for


def _trace_of_steps(context: RankContext) -> list[dict[str, Any]]:
    """The trace events of two steps, after some in which kernels are compiled and memory is pinned."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(Tagger(False).to(device), gradient_as_bucket_view=True)
    sync = thinwire.attach(model, "zen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randint(0, NUM_WORDS, (24,), device=device) for _ in range(8)]

    def step(words: Tensor) -> None:
        optimizer.zero_grad()
        model(words).square().mean().backward()
        optimizer.step()

    for words in batches[:6]:
        step(words)
    torch.cuda.synchronize()
    config = _ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, experimental_config=config, acc_events=True) as trace:
        for words in batches[6:]:
            with record_function("step"):
                step(words)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"trace-{os.getpid()}.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sync.detach()
    kept = ("name", "cat", "ts", "dur", "tid", "args")
    return [{key: event[key] for key in kept if key in event} for event in events if event.get("ph") == "X"]


def test_the_training_stream_waits_for_nothing() -> None:
    """By the evidence of the profiler: no synchronization on its threads, no copy to the host on its streams."""
    for outcome in run_ranks(_trace_of_steps, world_size=2, timeout_seconds=110):
        events = outcome.value
        lanes = {event["tid"] for event in events if event["name"] == "thinwire::find"}
        steps = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "step"]
        assert len(lanes) == 1
        assert len(steps) >= 2
        runtime = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
        training = [event for event in runtime if event["tid"] not in lanes and _within(event, steps)]
        assert training, "the trace has what the training threads asked of the GPU"
        assert [event["name"] for event in training if event["name"] in WAITS] == []
        launched = {event["args"].get("correlation") for event in training}
        kernels = [event for event in events if event.get("cat") == "kernel"]
        streams = {event["args"]["stream"] for event in kernels if event["args"].get("correlation") in launched}
        assert streams
        copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]]
        assert copies, "compact rows go to the host"
        assert not {event["args"]["stream"] for event in copies} & streams
        found = {event["name"] for event in events if event["name"].startswith("thinwire::")}
        assert found == {f"thinwire::{name}" for name in ("find", "pack", "exchange", "sum", "scatter")}


def _within(event: dict[str, Any], spans: list[tuple[float, float]]) -> bool:
    return any(start <= event["ts"] <= stop for start, stop in spans)
