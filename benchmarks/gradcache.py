"""One synchronization a step: sentence-transformers' CachedMultipleNegativesRankingLoss on emulated hosts.

    python benchmarks/gradcache.py --ranks 4

The encoder has the mean of embeddings of 6,000 words, and two dense layers. The loss runs it in eight mini-batches,
each with a backward of its own inside of that of the loss, and stock DDP all-reduces all gradients in each. So that it
does here too, the loss gets the model in a wrapper: sentence-transformers 6.2 holds gradients back itself if it sees a
DDP model, which is "stock, held". Bytes are those that a host's interface sent in a step with barriers around it: the
median of steps after the first three, and the mean over hosts. Needs network namespaces and sentence-transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

WAYS: dict[str, Any] = {"stock": None, "stock, held": None, "attach": {}, "attach, zen": {"rows": "zen"}}
WORDS, WIDTH, MINI_BATCHES, MINI_BATCH = 6_000, 64, 8, 2


class Words(nn.Module):
    """The mean of the embeddings of words, as a module of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features | {"sentence_embedding": self.table(features["input_ids"]).mean(1)}


class Wrapped(nn.Module):
    """A DDP model that the loss does not know as one, as other implementations of GradCache do not."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.model(features)
        return found


def sent_bytes() -> int:
    """Return the bytes that this host's interfaces have sent, other than to itself."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def train(context: RankContext, way: str, steps: int) -> tuple[list[int], list[float], float]:
    """Return bytes and losses of steps, and the sum of all parameters."""
    from sentence_transformers import SentenceTransformer, losses, models

    import thinwire

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    modules = [Words(), models.Dense(WIDTH, WIDTH), models.Dense(WIDTH, WIDTH)]
    inner = SentenceTransformer(modules=modules, device="cpu")
    model = DistributedDataParallel(inner)
    options = WAYS[way]
    if options is not None:
        thinwire.attach(model, **options)
    loss_of = losses.CachedMultipleNegativesRankingLoss(inner, mini_batch_size=MINI_BATCH)
    loss_of.model = model if "held" in way else Wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(context.rank)
    size = MINI_BATCH * MINI_BATCHES // 2  # of each of two columns
    sent, found = [], []
    for _ in range(steps):
        columns = [{"input_ids": (torch.rand(size, 10, generator=draw) ** 3 * WORDS).long()} for _ in range(2)]
        dist.barrier()
        before = sent_bytes()
        optimizer.zero_grad()
        loss = loss_of(columns, torch.arange(size))
        loss.backward()
        optimizer.step()
        dist.barrier()
        sent.append(sent_bytes() - before)
        found.append(loss.item())
    return sent, found, float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        with EmulatedNetwork(options.ranks, Link.parse(options.link)) as network:
            outcomes = run_ranks(
                train, way, options.steps, world_size=options.ranks, network=network,
                timeout_seconds=300, init_process_group=False,
            )  # fmt: skip
        each = [outcome.value for outcome in outcomes]
        sent = statistics.fmean(statistics.median(one[0][3:]) for one in each)
        losses = [statistics.fmean(of_ranks) for of_ranks in zip(*(one[1] for one in each), strict=True)]
        assert len({one[2] for one in each}) == 1, "ranks have other parameters"
        rows.append({"way": way, "bytes": sent, "losses": losses, "parameters": each[0][2]})
        fewer, apart = rows[0]["bytes"] / sent, max(map(abs, map(float.__sub__, losses, rows[0]["losses"])))
        print(
            f"{way:12} {options.ranks} ranks  {sent / 1e6:8.4f} MB a step and host, {fewer:6.1f} times fewer"
            f"  loss {losses[-1]:.7f}, apart {apart:.1e}",
            flush=True,
        )
    if options.json:
        about = {"torch": torch.__version__, "processors": os.cpu_count(), "system": platform.platform()}
        options.json.write_text(json.dumps({"environment": about, "ranks": options.ranks, "rows": rows}))


if __name__ == "__main__":
    main()
