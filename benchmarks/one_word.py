"""Trainings by `init_process_group("gloo")` and by `init_process_group("thinwire")`, on emulated hosts.

    python benchmarks/one_word.py --jobs fsdp2_bf16,fsdp2,ddp_sparse,ddp --ranks 4 --link 100mbit
    python benchmarks/one_word.py --sizes --ranks 2

Only the word differs. Both words train the same job from the same seed, twice, in the order of ABBA; a step takes as
long as on its slowest rank, and the first ``--skip`` ones, in which thinwire decides, are left out. Bytes are those
that the busiest host's interface counted, of all steps. With ``--sizes`` single collectives are timed instead, of
tensors from 4 bytes to 64 MB, in turn over a group of the word and two of Gloo in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

WORDS = "gloo", "thinwire"
SIZES = "4,4096,65536,1048576,16777216,67108864"


class Transformer(nn.Module):
    """A small language model: 2,000 words, four layers, 4.2 million parameters."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 256, sparse=is_sparse)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(256, 2000)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def made(job: str, world_size: int) -> nn.Module:
    """Return the model of a job."""
    torch.manual_seed(0)
    model = Transformer(is_sparse=job == "ddp_sparse")
    if job.startswith("ddp"):
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world_size,))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    policy = {"mp_policy": bf16} if job == "fsdp2_bf16" else {}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def train(context: RankContext, word: str, job: str, steps: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Return seconds and losses of steps, and what thinwire counted."""
    dist.init_process_group(word)
    if job == "pipeline":
        return train_stages(word, steps)
    model = made(job, context.world_size)
    rows = [model.module.words.weight] if job == "ddp_sparse" else []
    others = [one for one in model.parameters() if not any(one is row for row in rows)]
    optimizers = [torch.optim.AdamW(others, lr=3e-4), *([torch.optim.SparseAdam(rows, lr=3e-4)] if rows else [])]
    generator = torch.Generator().manual_seed(context.rank)
    seconds, losses = [], []
    for _ in range(steps):
        words = torch.randint(0, 2000, (4, 33), generator=generator).square() // 2000
        dist.barrier()
        started = time.perf_counter()
        loss = functional.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    counts = {}
    if word == "thinwire":
        from thinwire import backend

        counts = backend.stats()
    dist.barrier()
    dist.destroy_process_group()
    return seconds, losses, counts


def train_stages(word: str, steps: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Do what `train` does in a pipeline: a stage of layers on each rank, eight micro-batches of 512 words a step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Transformer(is_sparse=False)
    share = -(-len(model.layers) // world_size)
    layers: list[nn.Module] = list(model.layers[rank * share : (rank + 1) * share])
    last = rank == world_size - 1
    mine = nn.Sequential(*([model.words] if rank == 0 else []), *layers, *([model.head] if last else []))
    stage = PipelineStage(mine, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, 8, loss_fn=lambda logits, words: functional.cross_entropy(logits.flatten(0, 1), words.flatten())
    )
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(0)
    seconds, losses = [], []
    for _ in range(steps):
        words = torch.randint(0, 2000, (128, 33), generator=generator).square() // 2000
        parts: list[Tensor] = []
        dist.barrier()
        started = time.perf_counter()
        if rank == 0:
            schedule.step(words[:, :-1])
        elif last:
            schedule.step(target=words[:, 1:], losses=parts)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(sum(part.item() for part in parts) / 8)
    counts = {}
    if word == "thinwire":
        from thinwire import backend

        counts = backend.stats()
    dist.barrier()
    return seconds, losses, counts


def compared(job: str, link: Link, ranks: int, steps: int, skip: int) -> dict[str, Any]:
    """Train a job by both words and return its figures."""
    seconds: dict[str, list[float]] = {word: [] for word in WORDS}
    sent, losses, counts = dict.fromkeys(WORDS, 0), {}, {}
    for word in (*WORDS, *reversed(WORDS)):
        with EmulatedNetwork(ranks, link) if link.mbit else nullcontext() as network:
            before = [network.wire_bytes_sent(host) for host in range(ranks)] if network else []
            outcomes = run_ranks(
                train,
                word,
                job,
                steps,
                world_size=ranks,
                network=network,
                timeout_seconds=600,
                init_process_group=False,
            )
            if network:
                sent[word] = max(network.wire_bytes_sent(host) - before[host] for host in range(ranks))
        seconds[word] += list(map(max, zip(*(outcome.value[0][skip:] for outcome in outcomes), strict=True)))
        losses[word] = max(outcome.value[1][-1] for outcome in outcomes)
        counts = outcomes[0].value[2] or counts
    stock, ours = (statistics.quantiles(seconds[word]) for word in WORDS)
    return {
        "job": job, "ranks": ranks, "link_mbit": link.mbit, "steps": steps,
        "seconds": {"gloo": stock, "thinwire": ours},
        "faster": stock[1] / ours[1], "bytes": sent, "bytes_ratio": sent["thinwire"] / max(1, sent["gloo"]),
        "losses": losses, "stats": counts,
    }  # fmt: skip


def collectives(context: RankContext, sizes: str, repeats: int) -> dict[str, dict[int, list[list[float]]]]:
    """Return the quartiles of the ratio of seconds by the word to those by Gloo, and of Gloo's to those of another
    group of Gloo, which is what nothing differs by; both ratios, and Gloo's seconds, of the quickest tenth, to which
    other programs do least. Of each collective and size in bytes."""
    dist.init_process_group("thinwire")
    groups = [dist.new_group(backend=word) for word in (*WORDS, WORDS[0])]
    rank, world_size, found = context.rank, context.world_size, {}

    def passed_on(tensor: Tensor, into: Tensor, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, (rank + 1) % world_size, group=group)
        dist.recv(into, (rank - 1) % world_size, group=group)
        assert work is not None
        work.wait()

    for num_bytes in map(int, sizes.split(",")):
        numel = max(1, num_bytes // 4)
        whole, part, other = torch.ones(numel * world_size), torch.ones(numel), torch.ones(numel)
        parts = list(whole.split(numel))
        calls = {
            "all_reduce": partial(dist.all_reduce, part),
            "broadcast": partial(dist.broadcast, part, 0),
            "reduce": partial(dist.reduce, part, 0),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "all_gather list": partial(dist.all_gather, parts, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole),
            "gather": partial(dist.gather, part, parts if rank == 0 else None),
            "scatter": partial(dist.scatter, part, parts if rank == 0 else None),
            "send, recv": partial(passed_on, part, other),
            "barrier": dist.barrier,
        }
        several = max(1, min(10, (1 << 20) // num_bytes))  # calls at once, where one is short beside the clock
        for name, call in calls.items():
            rows: list[list[float]] = []
            for number in range(max(8, min(repeats, (64 << 20) // num_bytes))):
                taken = torch.zeros(3)
                for index in (0, 1, 2) if number % 2 else (2, 1, 0):
                    dist.barrier(group=groups[0])
                    started = time.perf_counter()
                    for _ in range(several):
                        call(group=groups[index])
                    taken[index] = (time.perf_counter() - started) / several
                dist.all_reduce(taken, dist.ReduceOp.MAX, group=groups[0])
                rows.append(taken.tolist())
            ratios = [(2 * ours / (first + second), first / second) for first, ours, second in rows]
            first, ours, second = (statistics.quantiles(one, n=10)[0] for one in zip(*rows, strict=True))
            quick = 2 * ours / (first + second), first / second, (first + second) / 2
            found.setdefault(name, {})[num_bytes] = [*map(statistics.quantiles, zip(*ratios, strict=True)), quick]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="fsdp2_bf16,fsdp2,ddp_sparse,ddp,pipeline")
    parser.add_argument("--sizes", nargs="?", const=SIZES, help="time single collectives, of tensors of these bytes")
    parser.add_argument("--link", default="100mbit", help="none, or a rate such as 1gbit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    preload("torch._dynamo")
    link, rows = Link.parse(options.link), []
    if options.sizes:
        value = run_ranks(
            collectives,
            options.sizes,
            options.repeats,
            world_size=options.ranks,
            timeout_seconds=600,
            init_process_group=False,
        )[0].value
        for name, sizes in value.items():
            for size, (ours, stock, quick) in sizes.items():
                texts = (f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in (ours, stock))
                print(
                    f"{name:15} {size:>10,} bytes  {' and gloo by itself '.join(texts)}; of the quickest tenth"
                    f" {quick[0]:.3f} and {quick[1]:.3f}, {1e6 * quick[2]:.0f} us"
                )
        rows.append(value)
    for job in [] if options.sizes else options.jobs.split(","):
        row = compared(job, link, options.ranks, options.steps, options.skip)
        rows.append(row)
        stock, ours = (row["seconds"][word][1] for word in WORDS)
        print(
            f"{job:11} {options.link:>8} {options.ranks} ranks  gloo {1e3 * stock:7.1f} ms"
            f"  thinwire {1e3 * ours:7.1f} ms  {row['faster']:.2f}x  bytes {row['bytes_ratio']:.3f}  losses"
            f" {' and '.join(f'{loss:.4f}' for loss in row['losses'].values())}",
            flush=True,
        )
        for name, count in row["stats"].items():
            print(f"    {name}: {count}")
    if options.json:
        about = {"torch": torch.__version__, "processors": os.cpu_count(), "system": platform.platform()}
        options.json.write_text(json.dumps({"environment": about, "rows": rows}))


if __name__ == "__main__":
    main()
