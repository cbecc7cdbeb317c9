"""Fine-tune an embedding model with sentence-transformers on emulated hosts: stock, and with one line more.

    python benchmarks/sentence_transformers_8x1gbit.py --link 1gbit --json benchmarks/results/sentence-transformers.json

The training is the one of examples/sentence_transformers_xlmr.py: SentenceTransformerTrainer,
MultipleNegativesRankingLoss, AdamW, a model of XLM-R's vocabulary (250,002 tokens). Its width and depth are those that
two cores can train on 8 ranks; `table_share` says how much of it is the table. Both trainings start from the same
model and see the same batches, in the same processes, in turn; with thinwire as many more steps as ``--more`` says. A
step takes as long as on its slowest rank; the first steps of each training are left out. `settled` leaves out of
thinwire's those before ``--warm-up`` too, in which "auto" tries schemes; `table` says what each step was. Needs network
namespaces and the extra ``integrations``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from thinwire import kernels
from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

LEFT_OUT = 2
"""First steps of a training, which build buckets and measure the machine."""
OF_TABLE = ("scheme", "reason", "bytes", "predicted_bytes")
"""What is kept of each step from the row of the embedding table in `Synchronizer.table`."""

MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Freed memory stays with a process: page faults take a third of the processor time otherwise, in both trainings."""


def train_rank(context: RankContext, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train in turn, stock and with thinwire, and return losses, bytes and seconds of steps."""
    import torch.distributed as dist
    from sentence_transformers import SentenceTransformer, models
    from transformers import TrainerCallback, set_seed

    from sentence_transformers_xlmr import pairs, train
    from thinwire.integrations.transformers import ThinwireCallback

    class Stopwatch(TrainerCallback):
        """Seconds of each step, from before its batch to after the optimizer, and how its table was sent."""

        def __init__(self, ours: ThinwireCallback | None) -> None:
            self.ours = ours
            self.seconds: list[float] = []
            self.table: list[dict[str, Any]] = []
            self.exposed = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            sync = None if self.ours is None or self.ours.attachment is None else self.ours.attachment.synchronizer
            if sync is not None:
                row = next(row for row in sync.table() if str(row["name"]).endswith("word_embeddings.weight"))
                exposed = sync.stats()["comm/exposed_seconds"]
                stats = {"exposed_seconds": exposed - self.exposed, "rehearsals": sync.stats()["comm/rehearsals"]}
                self.table.append({key: row[key] for key in OF_TABLE} | stats)
                self.exposed = exposed

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the trainer prints what it logs
    model = SentenceTransformer(modules=[models.Transformer(folder), models.Pooling(settings["width"])], device="cpu")
    start = {key: value.clone() for key, value in model.state_dict().items()}
    found: dict[str, Any] = {"stock": [], "thinwire": []}
    steps = {"stock": settings["steps"], "thinwire": settings["steps"] + settings["more"]}
    data = pairs(steps["thinwire"] * settings["batch"] * context.world_size, settings["vocabulary"], settings["length"])
    for name in ("stock", "thinwire") * settings["rounds"]:
        set_seed(1)
        model.load_state_dict(start)
        ours = None if name == "stock" else ThinwireCallback()
        watch = Stopwatch(ours)
        callbacks = [watch] if ours is None else [watch, ours]
        logged = train(
            model, data, callbacks, per_device_train_batch_size=settings["batch"], max_steps=steps[name],
            learning_rate=1e-3, lr_scheduler_type="constant",
        )  # fmt: skip
        found[name].append(
            {
                "losses": [entry["loss"] for entry in logged],
                "seconds": watch.seconds,
                "table": watch.table,
                "bytes_sent": [entry.get("comm/bytes_sent_per_step") for entry in logged],
                "bytes_dense": [entry.get("comm/bytes_dense_per_step") for entry in logged],
                "checksum": float(sum(value.detach().double().sum() for value in model.parameters())),
            }
        )
    dist.destroy_process_group()
    found["parameters"] = sum(value.numel() for value in model.parameters())
    tables = sum(value.numel() for key, value in model.named_parameters() if key.endswith("word_embeddings.weight"))
    found["table_share"] = tables / found["parameters"]
    return found


def _seconds(ranks: list[list[dict[str, Any]]], left_out: int) -> dict[str, Any]:
    """Return quantiles of the steps of all rounds but the first ones, each as long as on its slowest rank."""
    rounds = [
        [max(step) for step in zip(*(run["seconds"] for run in runs), strict=True)] for runs in zip(*ranks, strict=True)
    ]
    counted = [seconds for steps in rounds for seconds in steps[left_out:]]
    tenths = statistics.quantiles(counted, n=10, method="inclusive")
    return {"median": statistics.median(counted), "p10": tenths[0], "p90": tenths[-1], "steps": rounds}


def result(ranks: list[dict[str, Any]], link_mbit: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the figures: seconds are medians over steps of the slowest rank, bytes means over a rank's steps."""
    seconds = {name: _seconds([rank[name] for rank in ranks], LEFT_OUT) for name in ("stock", "thinwire")}
    settled = _seconds([rank["thinwire"] for rank in ranks], max(LEFT_OUT, settings["warm_up"]))
    stock, ours = ([run["losses"] for run in ranks[0][name]] for name in ("stock", "thinwire"))
    largest = max(
        abs(one - other) / abs(one)
        for first, second in zip(stock, ours, strict=True)
        for one, other in zip(first, second, strict=False)  # thinwire's has more steps
    )
    sent = [value for rank in ranks for run in rank["thinwire"] for value in run["bytes_sent"][LEFT_OUT:]]
    dense = [value for rank in ranks for run in rank["thinwire"] for value in run["bytes_dense"][LEFT_OUT:]]
    return {
        "link_mbit": link_mbit,
        "hosts": len(ranks),
        "settings": settings,
        "parameters": ranks[0]["parameters"],
        "table_share": ranks[0]["table_share"],
        "losses": {"stock": stock[0], "thinwire": ours[0]},
        "loss_max_relative_difference": largest,
        "checksums_equal_across_ranks": len({rank["thinwire"][0]["checksum"] for rank in ranks}) == 1,
        "bytes_per_step": {"stock": statistics.mean(dense), "thinwire": statistics.mean(sent)},
        "bytes_ratio": statistics.mean(dense) / statistics.mean(sent),
        "step_seconds": seconds,
        "speedup": seconds["stock"]["median"] / seconds["thinwire"]["median"],
        "settled_seconds": {key: settled[key] for key in ("median", "p10", "p90")},
        "settled_speedup": seconds["stock"]["median"] / settled["median"],
        "table": [run["table"] for run in ranks[0]["thinwire"]],
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--vocabulary", type=int, default=250_002)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="pairs of a rank")
    parser.add_argument("--length", type=int, default=24, help="words of a sentence, at most")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--more", type=int, default=0, help="steps of the training with thinwire on top of these")
    parser.add_argument("--warm-up", type=int, default=LEFT_OUT, help="first steps that `settled` leaves out")
    parser.add_argument("--rounds", type=int, default=1, help="how often each training is run")
    parser.add_argument("--json", help="file of results; one for each link")
    options = parser.parse_args()
    settings = {
        name: getattr(options, name)
        for name in ("vocabulary", "width", "layers", "batch", "length", "steps", "more", "warm_up", "rounds")
    }
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | MEMORY
    from sentence_transformers_xlmr import xlm_roberta

    preload("sentence_transformers_xlmr")
    kernels.warm_up()  # compiled once a machine; beside a training of few steps it would be part of each
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedNetwork(options.hosts, Link.parse(options.link)) as network,
    ):
        xlm_roberta(Path(folder), settings["vocabulary"], settings["width"], settings["layers"])
        rate = network.measure()
        outcomes = run_ranks(
            train_rank,
            settings,
            folder,
            world_size=options.hosts,
            network=network,
            timeout_seconds=600,
            init_process_group=False,
        )
    found = result([outcome.value for outcome in outcomes], rate, settings)
    print(json.dumps(found, indent=1))
    if options.json:
        path = Path(options.json)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, options.link: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
