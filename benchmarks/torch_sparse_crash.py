"""Train a model with a sparse table by stock DDP over Gloo, again and again: how many runs end by a signal?

    python benchmarks/torch_sparse_crash.py --runs 20

Nothing of thinwire is imported without `--attached`. The two threads of a Gloo group write the names of their
collectives into one `std::string`, without a lock. "_ALLREDUCE_SPARSE" is too long to be stored in the string itself,
so one thread writes into a block that the other has freed. (A malloc that keeps freed blocks sees "ALLREDUCE" there.)
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel


class Recommender(nn.Module):
    """One table with sparse gradients, and a network on top."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(5000, 16, sparse=True, mode="mean")
        self.score = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, bags: Tensor) -> Tensor:
        return self.score(self.items(bags)).flatten()


def train(rank: int, folder: str, world_size: int, steps: int, is_attached: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    model = DistributedDataParallel(Recommender())
    if is_attached:
        import thinwire

        thinwire.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        bags = (torch.rand(64, 8, generator=data) ** 4 * 5000).long()
        dist.barrier()
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(bags), (bags[:, 0] % 2).float()).backward()
        optimizer.step()
    Path(folder, f"rank {rank} has trained").touch()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3000, help="of each run")
    parser.add_argument("--attached", action="store_true", help="with thinwire.attach(model)")
    options = parser.parse_args()
    job = options.ranks, options.steps, options.attached
    crashed = Counter[str]()
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                multiprocessing.spawn(train, (folder, *job), options.ranks)
            except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
                when = "at exit" if len(list(Path(folder).glob("* has trained"))) == options.ranks else "in a step"
                crashed[when] += 1
                print(f"run {number}: {str(error).strip().splitlines()[-1]} {when}", flush=True)
    in_step, at_exit = crashed["in a step"], crashed["at exit"]
    print(f"torch {torch.__version__}: of {options.runs} runs {in_step} crashed in a step, {at_exit} at exit")


if __name__ == "__main__":
    main()
