"""A recommender in Lightning's `Trainer` on two processes: one line more for thinwire.

THINWIRE_ROUTE=rows torchrun --standalone --nproc-per-node 2 examples/lightning_recommender.py
torchrun --standalone --nproc-per-node 2 examples/lightning_recommender.py --stock

THINWIRE_ROUTE=rows sends rows from the first step on. Without it training begins as stock DDP, and rows are tried once
steps have waited for the network for 3 s in all: on one machine hardly ever.
"""

import argparse
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import ThinwireCallback

NUM_ITEMS, WIDTH, BAG = 50_000, 16, 8


class Recommender(L.LightningModule):
    """Scores bags of items; only the rows of the items in a batch have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(NUM_ITEMS, WIDTH)
        self.score = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        bags, clicks = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.score(self.items(bags)).flatten(), clicks)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        bags, clicks = batch
        scores = self.score(self.items(bags)).flatten()
        self.log("valid_loss", nn.functional.binary_cross_entropy_with_logits(scores, clicks), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def clicks(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    bags = (torch.rand(count, BAG, generator=random) ** 4 * NUM_ITEMS).long()
    return TensorDataset(bags, (bags[:, 0] % 2).float())


def trainer(callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """Return a trainer on the ranks of torchrun."""
    return L.Trainer(
        accelerator="cpu", callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=0.5, **{"strategy": "ddp", "devices": 2, **options},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="train without thinwire")
    callbacks = [] if parser.parse_args().stock else [ThinwireCallback()]  # the line more
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(1)
    model = Recommender()
    loop = trainer(callbacks, max_epochs=2, logger=False, enable_checkpointing=False)
    loop.fit(model, DataLoader(clicks(256, seed=1), 32), DataLoader(clicks(64, seed=2), 32))
    if loop.is_global_zero:
        metrics = loop.callback_metrics
        print("losses " + " ".join(f"{loss:.6f}" for loss in model.losses))
        sent, dense = (metrics.get(f"comm/bytes_{of}_per_step", 0) for of in ("sent", "dense"))
        print(f"bytes {float(sent):,.0f} of {float(dense):,.0f}")


if __name__ == "__main__":
    main()
