"""Trains a recommender with Lightning and Fabric on every rank of a torchrun, stock and with thinwire.

Writes ``result.json`` in the folder that is its argument.
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
from ending import leave
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import thinwire
from lightning_recommender import Recommender, clicks, trainer
from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy

FOLDER = Path(sys.argv[1])


class Wide(Recommender):
    """With a matrix that is large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(16, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 1))


class Scores(nn.Module):
    """The same without Lightning, and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50_000, 16)
        self.score = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 1))

    def forward(self, bags: torch.Tensor) -> torch.Tensor:
        return self.score(self.items(bags)).flatten()


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def train(name: str, callbacks: list[L.Callback], resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Train 8 steps of two batches each, with validation and a checkpoint after each of 2 epochs."""
    L.seed_everything(1, verbose=False)
    model = Wide()
    checkpoint = ModelCheckpoint(FOLDER / name, filename="{epoch}", save_top_k=-1)
    logger = CSVLogger(str(FOLDER), name=name, version="logs")
    loop = trainer(
        [checkpoint, *callbacks], max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=1, logger=logger, **options
    )
    data = clicks(8 * 2 * 8, seed=1)
    loop.fit(model, DataLoader(data, 8), DataLoader(clicks(32, seed=2), 8), ckpt_path=resume, weights_only=False)
    return {
        "losses": model.losses,
        "valid": float(loop.callback_metrics["valid_loss"]),
        "metrics": sorted(key for key in loop.callback_metrics if "/" in key),
        "bytes": [float(loop.callback_metrics.get(f"comm/bytes_{of}_per_step", 0)) for of in ("sent", "dense")],
        "logged": (FOLDER / name / "logs" / "metrics.csv").read_text() if loop.is_global_zero else "",
        "steps": loop.global_step,
        "parameters": digest(model),
    }


def evaluate(name: str, callback: L.Callback) -> float:
    """Return the loss of a model of the first epoch's checkpoint, which has states of the callback too."""
    loop = trainer([callback], logger=False)
    path = str(FOLDER / name / "epoch=0.ckpt")
    (found,) = loop.validate(Wide(), DataLoader(clicks(32, seed=2), 8), path, verbose=False, weights_only=False)
    return found["valid_loss"]


class Reseed(L.Callback):
    """Gives dropout the same numbers in a step, whether the training is resumed or not."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        torch.manual_seed(100 * trainer.current_epoch + batch_idx)


class Watch(L.Callback):
    """Keeps what a user reads while the model is trained."""

    def __init__(self, callback: ThinwireCallback) -> None:
        self.callback = callback

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.table = self.callback.synchronizer.table()


def fabric(name: str, attached: bool) -> dict[str, Any]:
    """Train with Fabric, save in the middle, restore, and train the rest twice: both must end alike."""
    from lightning.fabric import Fabric

    loop = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    loop.launch()
    L.seed_everything(1, verbose=False)
    model = Scores()
    model, optimizer = loop.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    sync = thinwire.attach(model, dense=thinwire.compress.power_sgd(2)) if attached else None
    random = torch.Generator().manual_seed(dist.get_rank())

    def steps(count: int) -> list[float]:
        losses = []
        for _ in range(count):
            bags = (torch.rand(16, 8, generator=random) ** 4 * 50_000).long()
            loss = nn.functional.binary_cross_entropy_with_logits(model(bags), (bags[:, 0] % 2).float())
            optimizer.zero_grad()
            loop.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    first = steps(3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if sync is not None:
        state["thinwire"] = sync.gathered()
    loop.save(FOLDER / f"{name}.ckpt", state)
    data = random.get_state()
    second = steps(3)
    loop.load(FOLDER / f"{name}.ckpt", state)
    random.set_state(data)
    again = steps(3)
    if sync is not None:
        sync.detach()
    return {"losses": [*first, *second], "again": again}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    factors = thinwire.compress.power_sgd(2, values=thinwire.compress.mxfp4())
    low_rank = {"dense": thinwire.compress.ef21(factors)}
    callback = ThinwireCallback(**low_rank)
    watch = Watch(callback)
    result: dict[str, Any] = {
        "stock": train("stock", [Reseed()]),
        "exact": train("exact", [Reseed(), ThinwireCallback(rows="zen")]),
        "strategy": train(
            "strategy", [Reseed()], strategy=ThinwireStrategy({"rows": "zen"}, find_unused_parameters=True)
        ),
        "low_rank": train("low_rank", [Reseed(), callback, watch]),
        "low_rank_evaluated": {"valid": evaluate("low_rank", callback)},
        "low_rank_again": train("low_rank_again", [Reseed(), callback]),  # nothing is left of the first training
        "low_rank_resumed": train(
            "low_rank_resumed", [Reseed(), ThinwireCallback(**low_rank)], str(FOLDER / "low_rank" / "epoch=0.ckpt")
        ),
        "strategy_low_rank": train("strategy_low_rank", [Reseed()], strategy=ThinwireStrategy(attach=low_rank)),
        "strategy_low_rank_resumed": train(
            "strategy_low_rank_resumed", [Reseed()], str(FOLDER / "strategy_low_rank" / "epoch=0.ckpt"),
            strategy=ThinwireStrategy(attach=low_rank),
        ),
        "bf16": train("bf16", [Reseed()], precision="bf16-mixed"),
        "bf16_exact": train("bf16_exact", [Reseed(), ThinwireCallback()], precision="bf16-mixed"),
        "fabric": fabric("fabric", attached=False),
        "fabric_low_rank": fabric("fabric_low_rank", attached=True),
    }  # fmt: skip
    try:
        train("refused", [Reseed(), ThinwireCallback()], strategy=ThinwireStrategy())
    except ValueError as error:
        result["refused"] = str(error)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: of["parameters"] for name, of in result.items() if "parameters" in of})
    result["ranks"] = ranks
    result["after"], result["table"] = callback.synchronizer, watch.table[0]
    if dist.get_rank() == 0:
        (FOLDER / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
