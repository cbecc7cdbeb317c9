"""A training that goes on after ``kill -9`` of all its workers, from the memory of its host: no disk is involved.

    export THINWIRE_RUN_ID=demo TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/survive_kill.py --kill-at 30

At step 30 every worker kills itself; torchrun starts all of them again, and they go on where they were. Start the same
command again with more --steps to train further, or free the run and its name, and then end the holder:

    thinwire holder --forget demo
    thinwire holder --stop

The second variable is for torchrun of torch 2.13: without it, workers that are started again look for the addresses of
those that died, and Gloo waits for them in vain.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint import Checkpointer, Storage


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-at", type=int, default=0, help="step at which all workers die, once; 0: never")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())  # each rank has data of its own

    with Checkpointer(model, optimizer, storage=Storage(replicas=1)) as checkpointer:
        first = checkpointer.restore() or 0
        say(f"starts at step {first}")
        for step in range(first, options.steps):
            inputs = torch.randn(128, 64)
            optimizer.zero_grad()
            loss = (model(inputs).flatten() - inputs.sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            checkpointer.step()
            if step % 10 == 9:
                say(f"step {step + 1}: loss {loss.item():.6f}")
            if step + 1 == options.kill_at and first == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        stats = checkpointer.stats()
    say(
        f"{stats['checkpoint/versions']:.0f} checkpoints of {stats['checkpoint/bytes']:,.0f} bytes,"
        f" {1e3 * float(stats['checkpoint/blocking_seconds']):.2f} ms each, {stats['checkpoint/skipped']:.0f} skipped"
    )
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
