"""What `stats()` says was sent is what the interface of a host has seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from namespaces import needs_namespaces
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link

pytestmark = pytest.mark.ranks

NUM_WORDS, WIDTH, STEPS = 100_000, 32, 8


def _interface_bytes() -> int:
    """Sent so far by the interface of this host: what a rank handed over, and a header for each segment."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(EmulatedNetwork.interface))
    return int(counters[8])


def _train(context: RankContext, is_sparse: bool) -> tuple[float, int]:
    """Bytes by `stats()`, and by the interface."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH, sparse=is_sparse), nn.Linear(WIDTH, 8))
    )
    generator = torch.Generator().manual_seed(context.rank)
    dist.barrier()
    before = _interface_bytes()
    sync = thinwire.attach(model)
    for step in range(STEPS):
        words = torch.randint(NUM_WORDS, ([6000, 2000][step % 2],), generator=generator)
        model.zero_grad()
        model(words).square().sum().backward()
    stats = sync.stats()
    dist.barrier()
    seen = _interface_bytes() - before
    sync.detach()
    return stats["comm/bytes_sent"] + stats["comm/setup_bytes"], seen


@pytest.mark.few(1)
@needs_namespaces
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_sparse", [True, False])
def test_stats_are_what_the_interface_counts(is_sparse: bool) -> None:
    with EmulatedNetwork(3, Link(None)) as network:
        outcomes = run_ranks(_train, is_sparse, world_size=3, network=network, timeout_seconds=50)
    for outcome in outcomes:
        said, seen = outcome.value
        assert said <= seen <= 1.06 * said
