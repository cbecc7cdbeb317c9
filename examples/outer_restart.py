"""Train on three processes, kill one of them, and start it again: the others go on, and it comes back.

    python examples/outer_restart.py

Each process could be a job of its own, on a host of its own: all that they share is a store.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import thinwire

RANKS, STEPS = 3, 400


def train(rank: int, port: int, last_step: int | None) -> None:
    """Train until step `STEPS`, by the count of all; or die after so many steps."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    members = thinwire.outer.Members(dist.TCPStore("127.0.0.1", port), rank, RANKS, timedelta(seconds=60))
    recipe = thinwire.outer.diloco(every=8, min_ranks=1)
    sync = thinwire.outer.attach(model, optimizer, recipe, process_group=members, timeout=timedelta(seconds=20))
    print(f"rank {rank} begins at step {sync.stats()['outer/inner_steps']:.0f}", flush=True)
    while (step := sync.stats()["outer/inner_steps"]) < STEPS:
        if step == last_step:
            print(f"rank {rank} dies at step {step:.0f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    sync.synchronize()
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"rank {rank} ends with loss {loss.item():.4f} and parameters that add up to {total!r}", flush=True)
    sync.detach()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train, args=(rank, store.port, 50 if rank == 2 else None)) for rank in range(3)]
    for process in processes:
        process.start()
    processes[2].join()
    again = context.Process(target=train, args=(2, store.port, None))
    again.start()
    for process in (*processes[:2], again):
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main()
