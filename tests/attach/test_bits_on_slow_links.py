"""Default jobs, run twice on emulated slow links, once beside a load: the same bits under deterministic algorithms."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from namespaces import NEEDS_NAMESPACES
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link

pytestmark = [*NEEDS_NAMESPACES, pytest.mark.ranks]

NUM_WORDS, WIDTH = 6000, 32


class Network(nn.Module):
    """A dense table, a sparse one, and layers: everything that a default job decides about."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.places = nn.Embedding(NUM_WORDS, WIDTH, sparse=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 200), nn.Tanh(), nn.Linear(200, 10))

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.words(words) + self.places(words // 2)).square().mean()


def train(context: RankContext, is_loaded: bool, steps: int) -> list[str]:
    """The digests of the parameters after training as DDP and as a plain module."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(is_loaded)]
    torch.use_deterministic_algorithms(True)
    try:
        return [_digest(context.rank, wrap, steps) for wrap in (DistributedDataParallel, nn.Module.train)]
    finally:
        for process in load:
            process.kill()
            process.wait()


def _digest(rank: int, wrap: type[nn.Module], steps: int) -> str:
    torch.manual_seed(0)
    module = Network()
    model = wrap(module)
    sync = thinwire.attach(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        words = (torch.rand(500, generator=generator) ** 2 * NUM_WORDS).long()
        optimizer.zero_grad()
        model(words).backward()
        optimizer.step()
    sync.detach()
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in module.parameters())).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [8, pytest.param(60, marks=pytest.mark.timeout(300))])
def test_two_runs_of_a_job_have_the_same_bits_one_of_them_beside_a_load(steps: int) -> None:
    with EmulatedNetwork(3, Link(100.0)) as network:
        once, again = (
            [
                outcome.value
                for outcome in run_ranks(train, is_loaded, steps, world_size=3, network=network, timeout_seconds=100)
            ]
            for is_loaded in (False, True)
        )
    assert once == again
    assert all(digests == once[0] for digests in once)
