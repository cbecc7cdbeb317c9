"""Trains under an outer loop with each trainer, on every rank of a torchrun, and resumes in the middle of a round.

Writes ``result.json`` in the folder that is its argument: hashes of the parameters of all ranks.
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
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ending import leave
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

import thinwire
import thinwire.integrations.accelerate
import thinwire.integrations.lightning
import thinwire.integrations.transformers

FOLDER = Path(sys.argv[1])
STEPS, HALF = 8, 4
RECIPE = thinwire.outer.diloco(every=3, fragments=2, delay=1, mix=0.5)


class Scores(nn.Module):
    """Scores bags of items."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(2000, 16)
        self.score = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, bags: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.score(self.items(bags)).flatten()
        return {"loss": nn.functional.binary_cross_entropy_with_logits(scores, labels), "logits": scores}


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    bags = (torch.rand(count, 8, generator=random) ** 4 * 2000).long()
    return [{"bags": bag, "labels": (bag[0] % 2).float()} for bag in bags]


def digests(model: nn.Module) -> list[str]:
    """The hash of the parameters and buffers of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    values = [*model.parameters(), *model.buffers()]
    mine = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()
    dist.all_gather_object(found, mine)
    return found


class Own(TrainerCallback):
    """Keeps what ranks have before the end of the training."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == STEPS - 1:
            self.found = digests(kwargs["model"])


def hf(name: str, resume: str | None = None, best: bool = False) -> dict[str, Any]:
    set_seed(1)
    args = TrainingArguments(
        str(FOLDER / name), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=1e-2, save_steps=HALF,
        eval_strategy="steps", eval_steps=HALF, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        load_best_model_at_end=best, resume_from_checkpoint=resume, gradient_accumulation_steps=2,
        label_names=["labels"],
    )  # fmt: skip
    own = Own()
    callback = thinwire.integrations.transformers.ThinwireCallback(outer=RECIPE)
    trainer = Trainer(
        Scores(), args, train_dataset=samples(512, 2), eval_dataset=samples(32, 3), callbacks=[own, callback]
    )
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    end = digests(trainer.model)
    if best:
        trainer._load_best_model()
    return {
        "reloaded": digests(trainer.model),
        "own": own.found,
        "end": end,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "bytes": [entry["comm/bytes_sent_per_step"] for entry in history if "comm/bytes_sent_per_step" in entry],
    }


class Recommender(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.losses, self.own = Scores(), [], []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if self.trainer.global_step == STEPS - 1:
            self.own = digests(self.scores)
        loss = self.scores(**batch)["loss"]
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("valid", self.scores(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightning(name: str, resume: str | None = None) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    model = Recommender()
    trainer = L.Trainer(
        accelerator="cpu", strategy="ddp", devices=dist.get_world_size(), max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(FOLDER / name, filename="{epoch}", save_top_k=-1),
            thinwire.integrations.lightning.ThinwireCallback(outer=RECIPE),
        ],
    )  # fmt: skip
    data = samples(4 * HALF * dist.get_world_size(), 2)
    trainer.fit(model, DataLoader(data, 4), DataLoader(samples(32, 3), 8), ckpt_path=resume, weights_only=False)
    return {
        "own": model.own,
        "end": digests(model.scores),
        "losses": model.losses,
        "valid": float(trainer.callback_metrics["valid"]),
    }


def accelerate(name: str, resume: str = "") -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    model = Scores()
    loader = DataLoader(samples(4 * STEPS * dist.get_world_size(), 2), 4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), loader)
    sync = thinwire.integrations.accelerate.attach(accelerator, model, outer=RECIPE, optimizer=optimizer)
    done = 0
    if resume:
        accelerator.load_state(resume)
        loader, done = accelerator.skip_first_batches(loader, HALF), HALF
    found: dict[str, Any] = {"losses": []}
    for batch in loader:
        loss = model(**batch)["loss"]
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
            found["own"] = digests(accelerator.unwrap_model(model))
    sync.synchronize()
    return {**found, "end": digests(accelerator.unwrap_model(model)), "stats": sync.stats()}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = {
        "hf": hf("hf"),
        "hf_resumed": hf("hf_resumed", str(FOLDER / "hf" / f"checkpoint-{HALF}")),
        "hf_best": hf("hf_best", best=True),
        "lightning": lightning("lightning"),
        "lightning_resumed": lightning("lightning_resumed", str(FOLDER / "lightning" / "epoch=0.ckpt")),
        "accelerate": accelerate("accelerate"),
        "accelerate_resumed": accelerate("accelerate_resumed", str(FOLDER / "accelerate")),
    }
    if dist.get_rank() == 0:
        (FOLDER / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
