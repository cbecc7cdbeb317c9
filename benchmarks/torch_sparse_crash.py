"""Train a model with a sparse table by stock DDP over Gloo, again and again: how many runs end by a signal?

    python benchmarks/torch_sparse_crash.py --runs 12

Nothing of thinwire is imported. With torch 2.13.0 on two cores, 1 of 12 runs of 3,000 steps ended by SIGSEGV: the heap
was damaged by then, and the thread of Gloo's process group that made the sum met it first.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2


class Recommender(nn.Module):
    """One table with sparse gradients, and a network on top."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(5000, 16, sparse=True, mode="mean")
        self.score = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, bags: Tensor) -> Tensor:
        return self.score(self.items(bags)).flatten()


def train(rank: int, port: int, steps: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    model = DistributedDataParallel(Recommender())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        bags = (torch.rand(64, 8, generator=data) ** 4 * 5000).long()
        dist.barrier()
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(bags), (bags[:, 0] % 2).float()).backward()
        optimizer.step()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3000, help="of each run")
    options = parser.parse_args()
    crashed = 0
    for number in range(options.runs):
        try:
            multiprocessing.spawn(train, (free_port(), options.steps), WORLD_SIZE)
        except multiprocessing.ProcessRaisedException as error:
            print(f"run {number}: a rank lost the other one: {str(error).splitlines()[-1]}", flush=True)
            crashed += 1
        except multiprocessing.ProcessExitedException as error:
            print(f"run {number}: {error}", flush=True)
            crashed += 1
    print(f"torch {torch.__version__}: {crashed} of {options.runs} runs crashed")


if __name__ == "__main__":
    main()
