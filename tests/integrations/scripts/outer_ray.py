"""Trains under an outer loop with Ray Train on two workers, and resumes in the middle of a round.

Writes ``result.json`` in the folder that is its argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import thinwire
import thinwire.integrations.ray

STEPS, HALF = 8, 4


def train(config: dict[str, Any]) -> None:
    """Train, saving in the middle of a round; and then the second half again from what was saved."""
    found: dict[str, Any] = {}
    for name in ("whole", "resumed"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        recipe = thinwire.outer.diloco(every=3, fragments=2, delay=1, mix=0.5)
        model, sync = thinwire.integrations.ray.prepare_model(model, outer=recipe, optimizer=optimizer)
        if name == "resumed":
            sync.load(config["folder"])
        for step in range(HALF if name == "resumed" else 0, STEPS):
            random = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=random)).square().mean().backward()
            optimizer.step()
            if step + 1 == HALF and name == "whole":
                sync.save(config["folder"])
        found[name] = [None] * dist.get_world_size()
        dist.all_gather_object(found[name], [parameter.tolist() for parameter in model.parameters()])
        sync.synchronize()
        sync.detach()
    if dist.get_rank() == 0:
        Path(config["folder"], "result.json").write_text(json.dumps(found))


def main() -> None:
    folder = Path(sys.argv[1])
    ray.init(num_cpus=3, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="outer", storage_path=str(folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
