"""What `thinwire.backend.stats()` says was sent is what the interface of a host has seen, of each collective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from namespaces import needs_namespaces
from thinwire import backend
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.observe.step import Name

pytestmark = pytest.mark.ranks
Counted = tuple[dict[str, Any], dict[str, int], set[str]]


def test_each_collective_of_this_torch_has_a_method() -> None:
    """C++ runs one that has none with the interpreter locked, for which a thread of Gloo may wait."""
    others = {"_end_coalescing", "_register_on_completion_hook", "reconfigure"}
    calls = {name for name, method in vars(dist.ProcessGroup).items() if "Work" in (method.__doc__ or "")}
    assert calls - others <= vars(backend.ThinwireGroup).keys()


def _interface_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(EmulatedNetwork.interface))
    return int(counters[8])


def _counted(context: RankContext) -> Counted:
    """What is counted of each collective, what the interface sees of it, and the ranges of a trace."""
    dist.init_process_group("thinwire", pg_options=backend.Options(dense="lossless", rows="zen", least_bytes=1000))
    generator = torch.Generator().manual_seed(context.rank)
    whole, part = torch.randn(600_000, generator=generator), torch.randn(200_000, generator=generator)
    rows = torch.sparse_coo_tensor(torch.arange(9000)[None], torch.randn(9000, 16, generator=generator), (50_000, 16))
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole.clone()),
        "all_reduce_sparse": lambda: dist.all_reduce(rows.clone()),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part.clone(), whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole.clone(), part),
        "broadcast": lambda: dist.broadcast(whole.clone(), 0),
        "send": lambda: _passed_on(part, context),
    }
    dist.all_reduce(torch.ones(1000))  # connects, and discovers hosts
    group = dist.group.WORLD
    assert isinstance(group, backend.ThinwireGroup)
    group.counts.clear()
    seen = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        for name, call in calls.items():
            dist.barrier()
            before = _interface_bytes()
            call()
            dist.barrier()
            seen[name] = _interface_bytes() - before
    parts = {f"thinwire::{part}" for part in get_args(Name)}  # here where this thread began a sum beside the last one
    ranges = {event.key for event in trace.key_averages() if event.key.startswith("thinwire::")} - parts
    return {name: backend.stats()[name] for name in calls}, seen, ranges


def _passed_on(tensor: torch.Tensor, context: RankContext) -> None:
    work = dist.isend(tensor, (context.rank + 1) % context.world_size)
    dist.recv(tensor.clone(), (context.rank - 1) % context.world_size)
    assert work is not None
    work.wait()


@needs_namespaces
@pytest.mark.timeout(90)
def test_each_collective_counts_what_the_interface_sees() -> None:
    with EmulatedNetwork(3, Link(None)) as network:
        found: list[Counted] = [
            outcome.value
            for outcome in run_ranks(
                _counted, world_size=3, network=network, timeout_seconds=80, init_process_group=False
            )
        ]
    for rank, (counts, seen, ranges) in enumerate(found):
        differs = ranges ^ {f"thinwire::{name}" for name in (*counts, "recv")}
        assert not differs, f"rank {rank}: {differs}"
        for name, count in counts.items():
            assert count["calls"] == 1
            assert count["seconds"] > 0
            assert count["bytes_sent"] <= seen[name] <= 1.08 * count["bytes_sent"] + 20_000, (name, count, seen[name])
