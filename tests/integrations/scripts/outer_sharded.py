"""Trains under an outer loop over FSDP2 with replicas in two trainers, and resumes in the middle of a round.

Accelerate and Lightning, on ranks of a torchrun, which are two hosts. Writes ``result.json`` in the folder that is
its argument.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, set_seed
from ending import leave
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import thinwire
import thinwire.integrations.accelerate
import thinwire.integrations.lightning

FOLDER = Path(sys.argv[1])
STEPS, HALF = 8, 4
RECIPE = thinwire.outer.diloco(every=3, fragments=2, delay=1, mix=0.5)


class Scores(nn.Module):
    """Scores bags of items."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(2000, 16)
        self.score = nn.Sequential(nn.Linear(16, 65), nn.LayerNorm(65), nn.ReLU(), nn.Linear(65, 1))

    def forward(self, bags: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.score(self.items(bags)).flatten(), labels)


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    bags = (torch.rand(count, 8, generator=random) ** 4 * 2000).long()
    return [{"bags": bag, "labels": (bag[0] % 2).float()} for bag in bags]


def digests(model: nn.Module) -> list[str]:
    """The hash of the shards of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    values: Any = model.parameters()
    mine = hashlib.sha256(b"".join(value.to_local().detach().numpy().tobytes() for value in values)).hexdigest()
    dist.all_gather_object(found, mine)
    return found


class Recommender(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.losses, self.own = Scores(), [], []

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("hosts", "host"))
        if not isinstance(self.scores, torch.distributed.fsdp.FSDPModule):
            fully_shard(self.scores.items, mesh=mesh)
            fully_shard(self.scores, mesh=mesh)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if self.trainer.global_step == STEPS - 1:
            self.own = digests(self.scores)
        loss = self.scores(**batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightning(name: str, resume: str | None = None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model, ranks = Recommender(), dist.get_world_size()
    trainer = L.Trainer(
        accelerator="cpu", strategy=ModelParallelStrategy(ranks, 1), devices=ranks, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(FOLDER / name, filename="{epoch}", save_top_k=-1),
            thinwire.integrations.lightning.ThinwireCallback(outer=RECIPE),
        ],
    )  # fmt: skip
    trainer.fit(model, DataLoader(samples(4 * HALF * ranks, 2), 4), ckpt_path=resume, weights_only=False)
    return {"own": model.own, "end": digests(model.scores), "losses": model.losses}


def accelerate(name: str, resume: str = "") -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_seed(1)
    accelerator, layout = Accelerator(cpu=True), ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    # Without a GPU Accelerate takes DDP whatever it is asked for, so this is what it would do with one.
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.parallelism_config, accelerator.state.device_mesh = layout, layout.get_device_mesh("cpu")
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT"
    )
    model = Scores()
    loader = DataLoader(samples(4 * STEPS * 4, 2), 4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), loader)
    sync = thinwire.integrations.accelerate.attach(accelerator, model, outer=RECIPE, optimizer=optimizer)
    done = 0
    if resume:
        accelerator.load_state(resume)
        loader, done = accelerator.skip_first_batches(loader, HALF), HALF
    found: dict[str, Any] = {"losses": []}
    for batch in loader:
        loss = model(**batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        done += 1
        if done == HALF and not resume:
            with sync.global_parameters():
                accelerator.save_state(str(FOLDER / name))
        if done == STEPS - 1:
            found["own"] = digests(model)
    sync.synchronize()
    return {**found, "end": digests(model), "stats": sync.stats()}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    result = {
        "lightning": lightning("lightning"),
        "lightning_resumed": lightning("lightning_resumed", str(FOLDER / "lightning" / "epoch=0.ckpt")),
    }
    if dist.get_world_size() > 2:
        result["accelerate"] = accelerate("accelerate")
        result["accelerate_resumed"] = accelerate("accelerate_resumed", str(FOLDER / "accelerate"))
    if dist.get_rank() == 0:
        (FOLDER / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
