"""The training that the files beside this one start: a recommender, its rows by thinwire, a checkpoint every step.

    torchrun --standalone --nproc-per-node 2 deploy/train.py --steps 50

Put your own model, data and loop in its place. What matters is the order: wrap, attach, restore, and `step` after the
optimizer's. On CPUs tables begin with stock DDP, and rows are tried once steps have waited for the network for 3 s in
all: on one machine never. THINWIRE_ROUTE=rows sends rows from the first step on. With ``--kill-at N`` one worker kills
itself after step N, once, to show that training goes on.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.checkpoint import Checkpointer, Disk, Storage

ROWS, WIDTH, BATCH = 10_000, 32, 64


class Recommender(nn.Module):
    """Two tables and a small network on top."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.over = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.over(torch.cat([self.users(users), self.items(items)], dim=1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--replicas", type=int, default=1, help="copies of each checkpoint; 2 survive the loss of a host"
    )
    parser.add_argument("--persistent", help="a directory that all hosts see, for a checkpoint on a disk now and then")
    parser.add_argument(
        "--persistent-every",
        default="10m",
        help="how often; a job that fails earlier starts over on other nodes; on the same it needs restore(fresh=True)",
    )
    parser.add_argument("--kill-at", type=int, default=0, help="step after which the last rank dies, once; 0: never")
    options = parser.parse_args()

    is_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_gpu else "gloo")
    rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else "cpu"
    torch.manual_seed(0)
    model = DistributedDataParallel(Recommender().to(device))
    sync = thinwire.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)  # each rank has data of its own

    disk = Disk(options.persistent, every=options.persistent_every) if options.persistent else None
    storage = Storage(replicas=options.replicas, disk=disk)
    with Checkpointer(model, optimizer, synchronizer=sync, storage=storage) as checkpointer:
        first = checkpointer.restore() or 0
        if rank == 0:
            print(f"{dist.get_world_size()} ranks start at step {first}", flush=True)
        loss = torch.tensor(float("nan"))  # if the run was at its end already
        for step in range(first, options.steps):
            users, items = torch.randint(ROWS, (2, BATCH)).to(device)
            loss = nn.functional.mse_loss(model(users, items), ((users + items) % 2).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step()
            is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and first == 0
            if step + 1 == options.kill_at and rank == dist.get_world_size() - 1 and is_first_life:
                os.kill(os.getpid(), signal.SIGKILL)
        stats = sync.stats()
        checkpointer.flush()
    if rank == 0:
        share = stats["comm/bytes_sent"] / max(stats["comm/bytes_dense"], 1.0)
        print(f"step {options.steps}: loss {loss.item():.6f}, {share:.1%} of the bytes of stock DDP", flush=True)
    sync.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
