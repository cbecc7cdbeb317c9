"""Ray Train: two workers, rows of tables by thinwire, checkpoints in the memory of the nodes, restarts by Ray.

    python deploy/ray/train.py --workers 2

On a cluster: ray job submit --working-dir . -- python deploy/ray/train.py --workers 16 --gpus. Ray starts all workers
again when one fails; they restore what the holder of their node has. With ``--kill-at N`` one worker kills itself once.
On CPUs rows travel from the first step on with THINWIRE_ROUTE=rows, else once steps have waited for the network for 3 s
in all. Workers on several nodes need a holder on each: see deploy/torchrun/train.sh for its line.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import thinwire
from thinwire.checkpoint import Checkpointer, Storage

ROWS, WIDTH, BATCH = 5_000, 32, 64


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH), nn.Linear(WIDTH, 1))
    model, sync = thinwire.integrations.ray.prepare_model(net)
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + context.get_world_rank())  # each worker has data of its own
    storage = Storage(run_id=context.get_experiment_name(), replicas=config["replicas"])
    with Checkpointer(model, optimizer, synchronizer=sync.synchronizer, storage=storage) as checkpointer:
        first = checkpointer.restore() or 0
        step = first
        for step in range(first, config["steps"]):
            bags = torch.randint(ROWS, (BATCH, 4)).to(device)
            loss = nn.functional.mse_loss(model(bags).squeeze(1), (bags.sum(1) % 2).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step()
            sync.report({"step": step, "first": first, "loss": loss.item()})
            if step + 1 == config["kill_at"] and first == 0 and context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.flush()
    if context.get_world_rank() == 0:
        stats = sync.stats()
        saved = stats["comm/bytes_dense"] / max(1.0, stats["comm/bytes_sent"])
        print(f"trained to step {step}, from step {first} on in this start, in {saved:.1f} times fewer bytes")
    sync.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument(
        "--replicas", type=int, default=1, help="copies of each checkpoint; 2 survive the loss of a node"
    )
    parser.add_argument("--name", default="thinwire", help="of the run: the same name continues it")
    parser.add_argument("--storage", help="a directory that all nodes see, for what Ray writes")
    options = parser.parse_args()

    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=options.workers)
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "kill_at": options.kill_at, "replicas": options.replicas},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(
            name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
