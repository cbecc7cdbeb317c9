"""A recommender-like model with a large embedding, on any number of workers, synchronized by thinwire.

    THINWIRE_ROUTE=rows torchrun --standalone --nproc-per-node 4 examples/ddp_sparse.py

THINWIRE_ROUTE=rows sends rows from the first step on. Without it training begins as stock DDP, and rows are tried once
steps have waited for the network for 3 s in all: on one machine hardly ever.

On two machines, on each:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/ddp_sparse.py
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

NUM_ITEMS, WIDTH, BATCH, BAG = 200_000, 32, 64, 8


class Recommender(nn.Module):
    """Scores bags of items; only the rows of the items in a batch have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(NUM_ITEMS, WIDTH, sparse=True)
        self.score = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        return self.score(self.items(bags)).flatten()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Recommender())
    sync = thinwire.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        popularity = torch.rand(BATCH, BAG, generator=data) ** 4  # a few items are in most bags
        bags = (popularity * NUM_ITEMS).long()
        loss = nn.functional.binary_cross_entropy_with_logits(model(bags), (bags[:, 0] % 2).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        stats = sync.stats()
        print(f"loss {loss.item():.4f}")
        print(f"bytes sent per step: {stats['comm/bytes_sent'] / stats['comm/steps']:,.0f}")
        print(f"stock DDP sends:     {stats['comm/bytes_dense'] / stats['comm/steps']:,.0f}")
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        print(f"a dense all-reduce:  {ring * sum(parameter.nbytes for parameter in model.parameters()):,.0f}")
    sync.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
