"""Trains in one process, without a process group, stock and with thinwire, which does nothing."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import set_seed

import thinwire.integrations.accelerate
from lightning_recommender import Recommender, clicks, trainer
from sentence_transformers_xlmr import pairs, train, xlm_roberta
from thinwire.integrations.lightning import ThinwireCallback as LightningCallback
from thinwire.integrations.transformers import ThinwireCallback


def accelerated(attached: bool) -> list[float]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if attached:
        sync = thinwire.integrations.accelerate.attach(accelerator, model)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if attached:
        sync.log({"loss": losses[-1]}, step=3)
        accelerator.save_state(str(Path(sys.argv[1]) / "state"))
        accelerator.load_state(str(Path(sys.argv[1]) / "state"))
        assert sync.stats() == {}
        assert not hasattr(copy.copy(sync), "no_sync")
        sync.detach()
    return losses


def embedding(callbacks: list[ThinwireCallback]) -> list[float]:
    set_seed(1)
    model = xlm_roberta(Path(sys.argv[1]), 1000, 32, 1)
    return [entry["loss"] for entry in train(model, pairs(8, 1000), callbacks, max_steps=2)]


def lightning(callbacks: list[L.Callback]) -> list[float]:
    L.seed_everything(1, verbose=False)
    model = Recommender()
    loop = trainer(callbacks, max_steps=4, strategy="auto", devices=1, logger=False, default_root_dir=sys.argv[1])
    loop.fit(model, DataLoader(clicks(64, seed=1), 16))
    return model.losses


warnings.simplefilter("ignore")
logging.basicConfig(format="%(name)s %(message)s")
logging.getLogger("thinwire").setLevel(logging.INFO)
assert accelerated(False) == accelerated(True)
print("equal losses")
assert embedding([]) == embedding([ThinwireCallback()])
print("equal losses")
assert lightning([]) == lightning([LightningCallback()])
print("equal losses")
