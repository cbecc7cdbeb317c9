"""Steps of a model under stock DDP and under thinwire's lossless sums, in the same processes, in turn.

    python benchmarks/lossless_auto.py --job gpt:autocast=bfloat16 --link 100mbit --hosts 8 --json out.json
    python benchmarks/lossless_auto.py --job benchmarks/lossless_auto.py:masked_bert --autocast --link none --hosts 4

Each way trains a model of its own from the same parameters, through the same batches: ``stock`` is DDP, ``auto`` and
``lossless`` are `thinwire.attach(ddp, dense=...)`, ``bf16`` casts around the all-reduce. First each trains alone for a
few steps, in which "auto" measures and decides; they are told apart. Then all step in turn, in another order in every
round, after a barrier that is not timed; a step takes as long as on its slowest rank. A ratio is the median over rounds
of a way's step over stock DDP's right beside it, its spread the quartiles. `masked_bert` is a
`transformers.BertForMaskedLM`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.bench.jobs.named import parse_job
from thinwire.lab.bench.train.methods import method_of
from thinwire.lab.bench.turns import quantile
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

METHODS = {"stock": "ddp", "auto": "lossless:auto", "lossless": "lossless", "bf16": "bf16"}
SLOWER_FROM = 1.03
"""Ratio to stock DDP from which "auto" counts as slower."""


def masked_bert() -> tuple[nn.Module, Callable[[], Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    """A small BERT of Hugging Face, 1.4 million parameters, on random words: a job that is not thinwire's."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=4000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=64,
    )  # fmt: skip

    def batch() -> Tensor:
        return (torch.rand(8, 32) ** 3 * 4000).long()

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        hidden = torch.rand(words.shape) < 0.15
        labels = torch.where(hidden, words, -100)
        return model(input_ids=words.masked_fill(hidden, 3), labels=labels).loss

    return BertForMaskedLM(config), batch, loss


class _Way:
    """A model in training by one method."""

    def __init__(self, context: RankContext, text: str, autocast: bool, data: Data | None, name: str) -> None:
        job = parse_job(text)
        job = replace(job, autocast="bfloat16") if autocast else job
        self.training = job.training(data, context.rank, context.world_size, seed=0)
        torch.manual_seed(context.rank)
        self.optimizer = job.optimizer_of(self.training)
        self.model = DistributedDataParallel(self.training.model, bucket_cap_mb=25)
        method = method_of(METHODS[name], job, job.steps, context.world_size)
        self.method = method.attach(self.model, self.optimizer)
        self.seconds: list[float] = []
        self.bits: list[float | None] = []

    def step(self) -> None:
        batch = self.training.batch()
        dist.barrier()
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.training.loss(self.model, batch).backward()
        if self.training.after_backward is not None:
            self.training.after_backward(self.model)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.bits.append(self.method.account().lossless_bits_per_value)


def train(
    context: RankContext, text: str, autocast: bool, data: Data | None, names: tuple[str, ...], steps: int, skip: int
) -> dict[str, tuple[list[float], float | None, list[str]]]:
    """Return for each way the seconds of its steps, the bits of a value, and what it says about its dense gradients."""
    ways = {name: _Way(context, text, autocast, data, name) for name in names}
    for name in names:
        for _ in range(skip):
            ways[name].step()
    for step in range(steps - skip):
        first = step % len(names)
        for name in (*names[first:], *names[:first]):
            ways[name].step()
        if context.rank == 0:
            context.send(step)
    return {name: (way.seconds, way.bits[-1], _reasons(way)) for name, way in ways.items()}


def _reasons(way: _Way) -> list[str]:
    synchronizer: Any = getattr(way.method, "_synchronizer", None)
    rows = [] if synchronizer is None else synchronizer.table()
    return sorted({f"{row['scheme']}: {row['reason']}" for row in rows})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", default="gpt:autocast=bfloat16", help="a job of bench train, or file.py:function")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--ways", default="stock,auto")
    parser.add_argument("--link", default="none", help="none, or a rate such as 1gbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--skip", type=int, default=24, help="first steps that do not count")
    parser.add_argument("--json", type=Path, help="rows are added to those in the file")
    options = parser.parse_args(arguments)
    preload("torch._dynamo")
    preload("thinwire.lab.bench.train.stock")
    link, data, names = Link.parse(options.link), parse_job(options.job).load(), tuple(options.ways.split(","))
    with EmulatedNetwork(options.hosts, link) if link.mbit else nullcontext() as network:
        mbit = network.measure() if network else None
        outcomes = run_ranks(
            train, options.job, options.autocast, data, names, options.steps, options.skip,
            world_size=options.hosts, network=network, timeout_seconds=600,
        )  # fmt: skip
    seconds = {
        name: [max(each) for each in zip(*(of.value[name][0] for of in outcomes), strict=True)] for name in names
    }
    rows = []
    for name in names:
        counted, stock = seconds[name][options.skip :], seconds["stock"][options.skip :]
        ratios = [mine / theirs for mine, theirs in zip(counted, stock, strict=True)]
        row = {
            "job": options.job,
            "autocast": options.autocast or "autocast" in options.job,
            "hosts": options.hosts,
            "link": options.link,
            "link_mbit": mbit,
            "way": name,
            "step_seconds": statistics.median(counted),
            "ratio": statistics.median(ratios),
            "ratio_p25": quantile(ratios, 0.25),
            "ratio_p75": quantile(ratios, 0.75),
            "first_seconds": sum(seconds[name][: options.skip]) / sum(seconds["stock"][: options.skip]),
            "bits_per_value": outcomes[0].value[name][1],
            "says": outcomes[0].value[name][2],
        }
        rows.append(row)
        bits = "" if row["bits_per_value"] is None else f"  {row['bits_per_value']:.1f} bits"
        verdict = "  SLOWER" if name == "auto" and row["ratio"] > SLOWER_FROM else ""
        print(
            f"{options.job:32} {options.link:>8} {options.hosts} hosts  {name:9} {1e3 * row['step_seconds']:8.1f} ms"
            f"  {row['ratio']:.3f} of stock ({row['ratio_p25']:.3f} to {row['ratio_p75']:.3f}){bits}{verdict}",
            flush=True,
        )
    if options.json:
        earlier = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        options.json.write_text(json.dumps({"environment": environment(), "rows": [*earlier, *rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
