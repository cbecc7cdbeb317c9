"""Training an encoder of XLM-R base's proportions by FSDP2, on emulated hosts: stock, attached, and with the word.

    python benchmarks/fsdp_tables.py --ranks 4 --link 100mbit

69 % of the parameters are in the table of words, as in XLM-R base. All ways make the same steps from the same seed,
each twice in the order ABCCBA; a step takes as long as on its slowest rank. Bytes are those that the busiest host's
interface counted, of all steps. "attach" is `thinwire.attach(model)`: rows of the table travel; "word" is
`init_process_group("thinwire")` with everything coded; "both" is both. With ``--words 150`` the table is too small to
travel as rows, and the model dense. Needs network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

WAYS = ("stock", "attach", "word", "both")
WIDTH, LAYERS, WORDS, LENGTH, BATCH = 192, 4, 20_800, 24, 16


class Encoder(nn.Module):
    """An encoder of sentences: words, layers, the mean of the last one."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.normalize(hidden.mean(1), dim=1)


def train(context: RankContext, way: str, steps: int, words: int) -> tuple[list[float], list[float]]:
    """Return seconds and losses of steps: each sentence is to find its neighbour among the batch."""
    dist.init_process_group("thinwire" if way in ("word", "both") else "gloo")
    torch.manual_seed(0)
    model = Encoder(words)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if way in ("attach", "both"):
        import thinwire

        thinwire.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(context.rank)
    seconds, losses = [], []
    for _ in range(steps):
        first = (torch.rand(BATCH, LENGTH, generator=draw) ** 3 * words).long()
        second = torch.where(torch.rand(BATCH, LENGTH, generator=draw) < 0.3, first.flip(0), first)
        dist.barrier()
        started = time.perf_counter()
        one, other = model(torch.cat([first, second])).chunk(2)
        loss = nn.functional.cross_entropy(20 * one @ other.T, torch.arange(BATCH))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    dist.barrier()
    return seconds, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--words", type=int, default=WORDS, help="rows of the table")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    preload("torch._dynamo")
    os.environ.setdefault("THINWIRE_BACKEND", "dense=lossless")
    link, ways = Link.parse(options.link), options.ways.split(",")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent, losses = dict.fromkeys(ways, 0), {}
    for way in (*ways, *reversed(ways)):
        with EmulatedNetwork(options.ranks, link) as network:
            before = [network.wire_bytes_sent(host) for host in range(options.ranks)]
            outcomes = run_ranks(
                train, way, options.steps, options.words, world_size=options.ranks, network=network,
                timeout_seconds=600, init_process_group=False,
            )  # fmt: skip
            sent[way] = max(network.wire_bytes_sent(host) - before[host] for host in range(options.ranks))
        seconds[way] += list(map(max, zip(*(outcome.value[0][2:] for outcome in outcomes), strict=True)))
        losses[way] = statistics.fmean(outcome.value[1][-1] for outcome in outcomes)
    numel = [
        sum(one.numel() for one in model.parameters())
        for model in (Encoder(options.words).words, Encoder(options.words))
    ]
    print(f"{numel[1] / 1e6:.1f} million parameters, {numel[0] / numel[1]:.0%} of them in the table")
    rows: list[dict[str, Any]] = []
    for way in ways:
        low, median, high = statistics.quantiles(seconds[way])
        faster, share = statistics.median(seconds[ways[0]]) / median, sent[way] / sent[ways[0]]
        rows.append({"way": way, "seconds": seconds[way], "bytes": sent[way], "loss": losses[way]})
        print(
            f"{way:7} {options.link} {options.ranks} ranks  step {median:.2f} s ({low:.2f} to {high:.2f})"
            f"  {faster:.2f}x  {sent[way] / options.steps / 1e6:.2f} MB a step, {share:.3f}  loss {losses[way]:.6f}",
            flush=True,
        )
    if options.json:
        about = {"torch": torch.__version__, "processors": os.cpu_count(), "system": platform.platform()}
        options.json.write_text(json.dumps({"environment": about, "rows": rows}))


if __name__ == "__main__":
    main()
