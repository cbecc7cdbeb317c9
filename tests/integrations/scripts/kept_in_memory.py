"""Trains with each trainer and its plug for checkpoints in memory: once through, and stopped in an epoch and resumed.

Writes ``result.json`` in the folder that is its argument: the digests of the parameters of all ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from accelerate import Accelerator
from ending import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import thinwire
from thinwire.checkpoint import CheckpointPolicy, Storage
from thinwire.checkpoint.holder.start import HolderOptions, ensure_holder, stop_holder
from thinwire.integrations import accelerate, lightning, torchtitan, transformers

FOLDER = Path(sys.argv[1])
ROWS, BATCH, STEPS, STOP = 48, 4, 14, 9  # six batches an epoch and rank: it stops in the middle of the second one


SYNCS = {
    "compressed": {"dense": thinwire.compress.leave_small(thinwire.compress.top_k(0.2), 0, 0)},
    "outer": {"outer": thinwire.outer.diloco(every=4)},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(inputs).flatten() - labels).square().mean()}


def rows() -> list[dict[str, torch.Tensor]]:
    values = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3))
    return [{"inputs": value, "labels": value.sum()} for value in values]


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters())).hexdigest()


def options(run: str) -> dict[str, Any]:
    return {"storage": Storage(run_id=run, replicas=1), "policy": CheckpointPolicy(max_overhead=None)}


class Stop(TrainerCallback):
    def __init__(self, at: int, fails: bool) -> None:
        self._at, self._fails = at, fails

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._fails and state.global_step == STOP:
            self._fails = False
            raise InterruptedError
        control.should_training_stop = state.global_step >= self._at


def hf(run: str, until: int, fails: bool = False, **sync: Any) -> tuple[int, str]:
    set_seed(1)
    model = Model()
    arguments = TrainingArguments(
        str(FOLDER / run), per_device_train_batch_size=BATCH, max_steps=STEPS, use_cpu=True, report_to=[], seed=1,
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False, logging_strategy="no", data_seed=5,
    )  # fmt: skip
    callbacks = [transformers.CheckpointCallback(**options(run)), Stop(until, fails)]
    if sync:
        callbacks.insert(0, transformers.ThinwireCallback(**sync))
    first = []

    class First(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            first.append(state.global_step)

    trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[*callbacks, First()])
    with suppress(InterruptedError):
        trainer.train()
    if fails:
        first.clear()
        trainer.train()
    return first[0], digest(model)


class Module(L.LightningModule):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.model, self.first, self._fails = Model(), -1, fails

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.first = self.global_step if self.first < 0 else self.first
        if self._fails and self.global_step == STOP:
            self.first, self._fails = -1, False
            raise InterruptedError
        return self.model(**batch)["loss"]


def fit(run: str, until: int, fails: bool = False, **sync: Any) -> tuple[int, str]:
    L.seed_everything(1)
    module, callbacks = Module(fails), [lightning.CheckpointCallback(**options(run))]
    if sync:
        callbacks.insert(0, lightning.ThinwireCallback(**sync))
    for _ in range(1 + fails):
        trainer = L.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_steps=until, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER, callbacks=callbacks,
        )  # fmt: skip
        with suppress(InterruptedError):
            trainer.fit(module, DataLoader(rows(), BATCH, shuffle=True))
    return module.first, digest(module)


def loop(run: str, until: int) -> tuple[int, str]:
    """A loop of Accelerate, whose position in the data is an object that it registers."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(), BATCH)
    position = Position()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(position)
    checkpointer = accelerate.checkpointer(accelerator, **options(run))
    first = step = checkpointer.restore() or 0
    assert position.batches == step
    while step < until:
        for batch in accelerator.skip_first_batches(loader, position.batches % (ROWS // BATCH // 2)):
            torch.manual_seed(100 + step)  # of dropout: a new loader draws
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            step, position.batches = step + 1, position.batches + 1
            checkpointer.step()
            if step == until:
                break
    checkpointer.flush()
    checkpointer.close()
    return first, digest(model)


class Position:
    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Titan:
    """What the plug uses of a torchtitan trainer (0.3.0), whose own checkpointer has nothing."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model_parts = [DistributedDataParallel(Model())]
        self.optimizers = [torch.optim.AdamW(self.model_parts[0].parameters(), lr=1e-2)]
        self.lr_schedulers = self
        self.schedulers = [torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3, 0.5)]
        self.dataloader, self.step, self.saved = Position(), 0, 0
        self.checkpointer: Any = self

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def load(self, step: int) -> bool:
        return False

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        self.saved += 1
        return False

    def close(self) -> None:
        self.closed = True

    def train(self, until: int) -> int:
        self.checkpointer.load(-1)
        first, batches = self.step, rows()
        while self.step < until:
            self.step += 1
            batch = batches[2 * self.dataloader.batches % ROWS + dist.get_rank()]
            self.dataloader.batches += 1
            self.model_parts[0](batch["inputs"][None], batch["labels"][None])["loss"].backward()
            for part in (*self.optimizers, *self.schedulers):
                part.step()
            self.optimizers[0].zero_grad()
            self.checkpointer.save(self.step, self.step == until)
        self.checkpointer.close()
        assert self.closed
        assert self.saved == until - first
        return first


def titan(run: str, until: int) -> tuple[int, str]:
    trainer = Titan()
    trainer.checkpointer = torchtitan.MemoryCheckpoints(trainer, **options(run))
    return trainer.train(until), digest(trainer.model_parts[0])


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["THINWIRE_HOLDER"] = str(FOLDER / "holder.sock")
    client = ensure_holder(HolderOptions(memory_budget="256MiB"))
    result = {}
    for train in (hf, fit, loop, titan):
        whole, stopped, resumed = train(f"{train.__name__}-whole", STEPS), train(train.__name__, STOP), None
        resumed = train(train.__name__, STEPS)
        result[train.__name__] = {"whole": whole, "stopped": stopped, "resumed": resumed}
    for train in (hf, fit):
        name = train.__name__
        result[name]["failed"] = train(f"{name}-failed", STEPS, fails=True)
        runs = {"whole": STEPS, "stopped": STOP, "resumed": STEPS}
        for of, sync in SYNCS.items():
            names = {run: f"{name}-{of}-whole" if run == "whole" else f"{name}-{of}" for run in runs}
            result[f"{name}, {of}"] = {run: train(names[run], until, **sync) for run, until in runs.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, result)
    if dist.get_rank() == 0:
        (FOLDER / "result.json").write_text(json.dumps({"ranks": ranks}))
        stop_holder(client)
    leave()


if __name__ == "__main__":
    main()
