"""The ten workloads of the papers at their published size: stock DDP, thinwire, and a row in a file as each run ends.

    python benchmarks/published_size.py --output benchmarks/results/published-size.json
    python benchmarks/published_size.py --output benchmarks/results/published-size.json --table

It goes on where it was stopped: a run whose row is there is not run again. ``--memory-gb`` says how much all ranks may
take together. It chooses four ranks or two, and for word2vec the number of words. Emulated hosts need CAP_NET_ADMIN.
"""

from __future__ import annotations

import argparse
import gettext
import json
import os
import re
import resource
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.lab.bench.jobs import images, named
from thinwire.lab.bench.jobs.job import Data, Samples
from thinwire.lab.bench.jobs.language import LstmJob, NmtJob, Word2VecJob
from thinwire.lab.bench.jobs.text import load_text
from thinwire.lab.bench.jobs.transformers import BertJob, GptJob, XlmrJob
from thinwire.lab.bench.train.benchmark import TrainBenchmark, run
from thinwire.lab.testbed.network import Link

CATALOGS = Path("/usr/share/locale/de/LC_MESSAGES")
OVERHEAD_GB = 0.7  # of a rank: torch, activations, and what Gloo buffers


def few(data: Data, held_out: int = 4) -> Data:
    """Leave few held-out samples: a softmax over all words of a published vocabulary takes gigabytes for many."""
    return Data(data.train, data.held_out.take(torch.arange(held_out)))


@dataclass(frozen=True)
class Lstm(LstmJob):
    def load(self) -> Data:
        return few(super().load())


@dataclass(frozen=True)
class Gpt(GptJob):
    def load(self) -> Data:
        return few(super().load())


@dataclass(frozen=True)
class Bert(BertJob):
    def load(self) -> Data:
        return few(super().load(), 8)


@dataclass(frozen=True)
class Xlmr(XlmrJob):
    def load(self) -> Data:
        return few(super().load(), 8)


@dataclass(frozen=True)
class Word2Vec(Word2VecJob):
    def load(self) -> Data:
        text = load_text(self.num_words, 2 * self.window, num_samples=20_000, num_held_out=40)
        return Data(self._pairs(text.train), self._pairs(text.held_out))


@dataclass(frozen=True)
class Nmt(NmtJob):
    """English and German of the message catalogs that programs of a Linux system have."""

    def load(self) -> Data:
        pairs = set()
        for path in sorted(CATALOGS.glob("*.mo")):
            with path.open("rb") as file, suppress(UnicodeDecodeError):  # some have another encoding in their header
                catalog: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
                pairs |= {(text, german) for text, german in catalog.items() if text and isinstance(text, str)}
        split = [[re.findall(r"\w+|[^\w\s]", text.lower()) for text in pair] for pair in sorted(pairs)]
        kept = [pair for pair in split if all(len(words) >= 4 for words in pair)]
        counts = Counter(word for pair in kept for words in pair for word in words)
        ids = {word: index + 2 for index, (word, _) in enumerate(counts.most_common(self.num_words - 2))}
        source, german = (torch.stack([self._ids(pair[side], ids) for pair in kept]) for side in (0, 1))
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))
        inputs = torch.cat((source, functional.pad(german, (1, -1))), 1)[order]
        print(f"nmt: {len(kept)} pairs of {len(list(CATALOGS.glob('*.mo')))} catalogs, {len(counts)} words", flush=True)
        samples = Samples(inputs, german[order])
        return Data(samples.take(torch.arange(8, len(kept))), samples.take(torch.arange(8)))

    def _ids(self, words: list[str], ids: dict[str, int]) -> Tensor:
        """The ids of the first words; 1 for a rare word, and 0 behind the end."""
        found = torch.tensor([ids.get(word, 1) for word in words[: self.length]], dtype=torch.int32)
        return functional.pad(found, (0, self.length - len(found)))


def photographs(size: int) -> Data:
    """Crops of the two photographs that scikit-learn ships; a class is a quarter of one of them."""
    from sklearn.datasets import load_sample_images

    generator, crops, labels = torch.Generator().manual_seed(0), [], []
    for number, photograph in enumerate(load_sample_images().images):
        whole = torch.tensor(photograph).permute(2, 0, 1) / 255.0
        height, width = (whole.shape[1] - size, whole.shape[2] - size)
        for _ in range(68):
            top, left = (int(torch.randint(most + 1, (), generator=generator)) for most in (height, width))
            crops.append(whole[:, top : top + size, left : left + size].clone())
            labels.append(4 * number + 2 * (2 * top > height) + (2 * left > width))
    order = torch.randperm(len(crops), generator=generator)
    samples = Samples(torch.stack(crops)[order], torch.tensor(labels, dtype=torch.int16)[order])
    return Data(samples.take(torch.arange(8, len(crops))), samples.take(torch.arange(8)))


@dataclass(frozen=True)
class Vgg(images.VggJob):
    def load(self) -> Data:
        return photographs(self.size)


@dataclass(frozen=True)
class ResNet(images.ResNetJob):
    def load(self) -> Data:
        return photographs(self.size)


TEXT = "Python's standard library, 7.07 million words"
PHOTOGRAPHS = "crops of 224 x 224 of the two photographs in scikit-learn"
CLICKS = "generated: Zipf's law over the cardinalities of Criteo's features"


@dataclass(frozen=True)
class Workload:
    """A workload at its published size.

    Args:
        settings: what differs from the job at scale 1, and why in ``note``.
        copies: tensors of the size of the model on a rank of stock DDP: parameters, gradients, buckets, moments.
        methods: besides stock DDP.
        paper: a published figure.
    """

    settings: str
    copies: float
    methods: tuple[str, ...]
    data: str
    paper: str
    note: str = ""


WORKLOADS = {
    "lstm": Workload(
        ":sampled=8192:momentum=0.0", 3, ("exact", "zen"), TEXT,
        "ZEN, 16 x 8 V100, 25 Gbit/s: 3.1x all-reduce; Espresso +101 % over FP32 (EF-SignSGD)", "plain SGD",
    ),
    "nmt": Workload(
        ":learning_rate=0.0005", 5, ("exact", "zen"), "message catalogs of a Linux system, English to German",
        "ZEN, 16 x 8 V100, 100 Gbit/s: 1.38x all-reduce",
    ),
    "deepfm": Workload("", 4, ("exact", "zen"), CLICKS, "ZEN, 16 x 8 V100, 100 Gbit/s: 1.33x all-reduce"),
    "dlrm": Workload(":sparse=True", 2, ("exact",), CLICKS, "no throughput over all-reduce", "sparse=True"),
    "bert": Workload(
        ":sampled=2048:length=128:batch_size=4", 5, ("exact", "lossless"), TEXT,
        "ZEN: density and densification only; Espresso: random-k", "128 words, batches of 4",
    ),
    "xlmr": Workload(
        ":length=128:batch_size=4:optimizer=sgd:momentum=0.0:learning_rate=0.05", 3, ("exact", "lossless"), TEXT,
        "none", "128 words, batches of 4, plain SGD",
    ),
    "word2vec": Workload(
        ":sparse=True:optimizer=sgd:momentum=0.0:learning_rate=0.5", 1.1, ("exact",), TEXT, "none",
        "sparse=True, plain SGD as in the paper",
    ),
    "resnet": Workload(
        ":batch_size=2", 4, ("lossless", "dgc"), PHOTOGRAPHS, "Espresso, 8 x 8 V100: up to +20 % (DGC)", "batches of 2"
    ),
    "gpt": Workload(
        ":batch_size=1:length=256", 5, ("lossless", "ef_sign_sgd"), TEXT, "Espresso: EF-SignSGD", "256 words, batch 1"
    ),
    "vgg": Workload(
        ":batch_size=2", 4, ("lossless", "random_k"), PHOTOGRAPHS,
        "Espresso, PCIe and 25 Gbit/s: +269 % over FP32 (random-k)", "batches of 2",
    ),
}  # fmt: skip


def sized(name: str, memory_gb: float) -> tuple[str, int]:
    """Return the settings and the number of ranks that fit."""
    workload, job = WORKLOADS[name], named.JOBS[name]
    at_size = job.published.parameters * 4e-9 * workload.copies + OVERHEAD_GB
    if 4 * at_size <= memory_gb:
        return workload.settings, 4
    if 2 * at_size <= memory_gb or name != "word2vec":
        return workload.settings, 2
    share = (memory_gb / 2 - OVERHEAD_GB) / (at_size - OVERHEAD_GB)
    words = round(int(share * 30) / 30 * job.published.sizes["num_words"])
    return f"{workload.settings}:num_words={words}", 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(WORKLOADS))
    parser.add_argument("--methods", help="besides stock DDP; by default those of each workload")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--memory-gb", type=float, default=12.0)
    parser.add_argument("--table", action="store_true", help="print what is there as Markdown, and run nothing")
    options = parser.parse_args()
    found = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    if options.table:
        print(table(found))
        return
    named.JOBS.update(
        lstm=Lstm(), gpt=Gpt(), bert=Bert(), xlmr=Xlmr(), word2vec=Word2Vec(), nmt=Nmt(), vgg=Vgg(), resnet=ResNet()
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    for name in options.jobs.split(","):
        settings, ranks = sized(name, options.memory_gb)
        methods = options.methods.split(",") if options.methods else WORKLOADS[name].methods
        for method in ("ddp", *methods):
            if any(row["workload"] == name and row["method"] == method for row in found):
                continue
            benchmark = TrainBenchmark(
                name + settings, (method,), ranks, Link.parse(options.link), 1, options.steps, 1.0, 0.0
            )
            started = time.perf_counter()

            def show(method: str, seed: int, step: int, loss: float, name: str = name) -> None:
                print(f"{datetime.now(UTC):%H:%M:%S} {name} {method} step {step}, loss {loss:.4f}", flush=True)

            result = run(benchmark, show)
            (row,) = result["rows"]
            row |= {
                "workload": name,
                "settings": settings,
                "published_parameters": named.JOBS[name].published.parameters,
                "data": WORKLOADS[name].data,
                "commit": commit.strip(),
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "run_seconds": time.perf_counter() - started,
                "load_average": os.getloadavg(),
                "environment": result["environment"],
            }
            found.append(row)
            unfinished = options.output.with_suffix(".part")
            unfinished.write_text(json.dumps({"rows": found}, indent=1) + "\n")
            unfinished.replace(options.output)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
            print(
                f"{name} {method}: {row['step_seconds_median']:.2f} s a step, children up to {peak:.1f} GB", flush=True
            )


def table(rows: list[dict[str, Any]]) -> str:
    """Return two tables in Markdown: the medians over steps with bytes of the busiest rank, and beside the papers."""
    lines = [
        "| workload | million parameters (of the published) | ranks | method | MB a step | s a step | faster |"
        " fewer bytes | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    beside = ["| workload | data | conditions | the papers | here, over stock |", "|---|---|---|---|---|"]
    for name, workload in WORKLOADS.items():
        own = [row for row in rows if row["workload"] == name]
        here = []
        for row in own:
            megabytes, before = row["bytes_sent_max"] / 1e6, own[0]["bytes_sent_max"] / 1e6
            seconds, share = row["step_seconds_median"], row["parameters"] / row["published_parameters"]
            faster, fewer = f"{own[0]['step_seconds_median'] / seconds:.2f}x", f"{before / max(megabytes, 1e-9):.1f}x"
            cells = [
                f"`{name}`", f"{row['parameters'] / 1e6:,.1f} ({share:.2f})", str(row["hosts"]), f"`{row['method']}`",
                f"{megabytes:,.1f}", f"{seconds:.2f}", faster, fewer, f"{row['final_loss']:.4f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
            here += [] if row is own[0] else [f"`{row['method']}` {faster}, {fewer} fewer bytes"]
        beside.append(
            f"| `{name}` | {workload.data} | {workload.note or 'as published'} | {workload.paper} |"
            f" {'; '.join(here) or 'not run'} |"
        )
    return "\n".join([*lines, "", *beside])


if __name__ == "__main__":
    main()
