"""The same bits through the loss of ranks: train with processes that are killed, and once more with one.

    python examples/same_bits.py --ranks 4 --kill 2

Each process is one `train`; none of them is started again. `Members` meet in a store that outlives them, here in the
parent. In a cluster, `train` is the script that you start on each host, with a store on another one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import time

import torch
from torch import nn

from thinwire import reproducible
from thinwire.outer import Members


def train(port: int, rank: int, world_size: int, steps: int, digests: multiprocessing.SimpleQueue) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    members = Members(store, rank, world_size)
    all_steps = reproducible.Steps(model, 24, steps, seed=0, optimizer=optimizer, process_group=members)
    for step in all_steps:
        for index in step:
            draw = torch.Generator().manual_seed(24 * step.number + index)  # the data of this micro-batch
            images, labels = torch.randn(16, 64, generator=draw), torch.randint(10, (16,), generator=draw)
            nn.functional.cross_entropy(model(images), labels).backward()
            time.sleep(0.002)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        store.add("steps made", 1)
    digests.put((rank, reproducible.digest(model), int(all_steps.stats()["reproducible/losses"])))


def run(ranks: int, kill: int, steps: int) -> set[str]:
    """Train, kill some of the ranks meanwhile, and return the digests of those that are left."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    digests = context.SimpleQueue()
    processes = [context.Process(target=train, args=(store.port, rank, ranks, steps, digests)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for number, process in enumerate(random.sample(processes, kill), 1):
        while store.add("steps made", 0) < number * ranks * steps * 0.8 / (kill + 1):
            time.sleep(0.05)
        os.kill(process.pid or 0, signal.SIGKILL)
        print(f"killed rank {processes.index(process)}", flush=True)
    for process in processes:
        process.join()
    found = set()
    while not digests.empty():
        rank, text, losses = digests.get()
        print(f"rank {rank} of {ranks}: {text}, {losses} losses", flush=True)
        found.add(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    found = run(options.ranks, options.kill, options.steps) | run(1, 0, options.steps)
    print("the same bits" if len(found) == 1 else f"{len(found)} digests", flush=True)
    raise SystemExit(len(found) != 1)


if __name__ == "__main__":
    main()
