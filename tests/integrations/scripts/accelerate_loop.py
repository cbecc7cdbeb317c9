"""Trains a small BERT with Accelerate on every rank of a torchrun, stock and with thinwire; and what is refused.

Writes ``result.json`` in the folder that is its argument.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, set_seed
from ending import leave
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import thinwire
from accelerate_nlp import padded, sentences
from thinwire.gradients.steps.state import packed
from thinwire.integrations.accelerate import attach

FOLDER = Path(sys.argv[1])
HALF = 4
"""Steps before the checkpoint, and after it."""


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def bert() -> torch.nn.Module:
    return BertForSequenceClassification(
        BertConfig(vocab_size=5000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    )


def train(name: str, options: dict[str, Any] | None, precision: str = "no", resume: str = "") -> dict[str, Any]:
    """Train with accumulation, clipping, and a checkpoint in the middle, which a resumed training starts from."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(FOLDER / name), logging_dir=str(FOLDER / name)),
    )  # fmt: skip
    accelerator.init_trackers("run")
    set_seed(1)
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(sentences(16 * 2 * HALF * 2, seed=1), 8, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sync = None if options is None else attach(accelerator, model, **options)
    seen = 0
    if resume:
        accelerator.load_state(resume)
        loader, seen = accelerator.skip_first_batches(loader, 2 * HALF), HALF
    losses = []
    for batch in loader:
        torch.manual_seed(100 + 2 * HALF * bool(resume) + len(losses))  # of dropout: a new loader draws
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            seen += 1
            if sync is not None:
                sync.log({"loss": loss.item()}, step=seen)
            if seen == HALF and not resume:
                accelerator.save_state(str(FOLDER / name / "half"))
    found = {"losses": losses, "parameters": digest(accelerator.unwrap_model(model)), "steps": seen}
    if sync is not None:
        found["stats"] = sync.stats()
        sync.detach()
    for tracker in accelerator.trackers:
        tracker.finish()
    return found


def in_one_file(half: Path, old: Path) -> list[str]:
    """Copy a checkpoint, with all states in one file as earlier versions wrote it; return the files that it had."""
    paths = sorted(half.glob("thinwire-*.pt"))
    if dist.get_rank() == 0:
        shutil.copytree(half, old, ignore=shutil.ignore_patterns("thinwire-*"))
        states = [packed(torch.load(path, weights_only=True)["state"]) for path in paths]
        torch.save({"ranks": states}, old / "custom_checkpoint_0.pkl")
    dist.barrier()
    return [path.name for path in paths]


def refused(wrong: str) -> str:
    """What is raised for a model that is not prepared, or was unwrapped."""
    accelerator = Accelerator(cpu=True)
    model = bert()
    if wrong == "unwrapped":
        model = accelerator.unwrap_model(accelerator.prepare(model))
    try:
        attach(accelerator, model)
    except ValueError as error:
        return str(error)
    return "nothing"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    low_rank = {"dense": thinwire.compress.power_sgd(2)}
    result = {
        "stock": train("stock", None),
        "exact": train("exact", {"rows": "zen"}),
        "exact_resumed": train("exact_resumed", {"rows": "zen"}, resume=str(FOLDER / "exact" / "half")),
        "low_rank": train("low_rank", low_rank),
        "low_rank_resumed": train("low_rank_resumed", low_rank, resume=str(FOLDER / "low_rank" / "half")),
        "files": in_one_file(FOLDER / "low_rank" / "half", FOLDER / "old"),
        "old_resumed": train("old_resumed", low_rank, resume=str(FOLDER / "old")),
        "bf16": train("bf16", None, "bf16"),
        "bf16_exact": train("bf16_exact", {"rows": "zen"}, "bf16"),
    }
    result["refused"] = {wrong: refused(wrong) for wrong in ("not prepared", "unwrapped")}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: of["parameters"] for name, of in result.items() if "parameters" in of})
    result["ranks"] = ranks
    if dist.get_rank() == 0:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folders = {path.parent for path in (FOLDER / "exact").rglob("events.out.tfevents*")}
        result["scalars"] = [tag for path in folders for tag in EventAccumulator(str(path)).Reload().Tags()["scalars"]]
        (FOLDER / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
