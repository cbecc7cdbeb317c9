"""Trainings that are made by any number of ranks, and what befalls them, for the tests of `thinwire.reproducible`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from injected import stop
from thinwire import reproducible
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.rank import RankContext
from thinwire.outer import Members

PORT_SECONDS = 60


class Transformer(nn.Module):
    def __init__(self, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layers(self.words(ids) + self.places.weight[: ids.shape[1]], mask=mask, is_causal=True))


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense = nn.Embedding(300, 8, sparse=True), nn.Embedding(40, 8)
        self.bag = nn.EmbeddingBag(100, 8, mode="sum", sparse=True)
        self.rest = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found = self.sparse(ids[:, 0] % 300), self.dense(ids[:, 1] % 40), self.bag(ids % 100)
        return self.rest(torch.cat(found, 1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout2d(0.2),
            nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@dataclass
class Training:
    """A model, its optimizers, and the loss of a micro-batch."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    loss: Callable[[int, int], Tensor]
    clip: float | None = None

    def step(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def drawn(step: int, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + index)


def transformer(width: int = 32, autocast: bool = False) -> Training:
    model = Transformer(width)

    def loss(step: int, index: int) -> Tensor:
        ids = torch.randint(50, (2, 17), generator=drawn(step, index))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Training(model, [torch.optim.AdamW(model.parameters(), 1e-3)], loss, clip=1.0)


def tables() -> Training:
    model = Tables()
    sparse = [model.sparse.weight, model.bag.weight]
    dense = [entry for entry in model.parameters() if not any(entry is other for other in sparse)]

    def loss(step: int, index: int) -> Tensor:
        ids = torch.randint(1000, (6, 3), generator=drawn(step, index))
        if index % 5 == 4:  # a micro-batch that does not reach all tables
            return model.rest(model.sparse(ids[:, 0] % 300).repeat(1, 3)).square().mean()
        return (model(ids) - ids.float().mean(1, keepdim=True) / 500).square().mean()

    return Training(model, [torch.optim.SparseAdam(sparse, 1e-2), torch.optim.Adam(dense, 1e-2)], loss)


def images() -> Training:
    model = Images()

    def loss(step: int, index: int) -> Tensor:
        draw = drawn(step, index)
        pictures = torch.randn(3, 3, 12, 12, generator=draw)
        return nn.functional.cross_entropy(model(pictures), torch.randint(10, (3,), generator=draw))

    return Training(model, [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)], loss)


def recurrent() -> Training:
    """Two modules of torch: a GRU, and its transformer's decoder layer."""
    model = nn.ModuleDict({"gru": nn.GRU(8, 16, 2, batch_first=True, dropout=0.2), "out": nn.Linear(16, 4)})

    def loss(step: int, index: int) -> Tensor:
        inputs = torch.randn(2, 5 + index % 3, 8, generator=drawn(step, index))
        return model["out"](model["gru"](inputs)[0]).square().mean()

    return Training(model, [torch.optim.RMSprop(model.parameters(), 1e-3)], loss)


def half() -> Training:
    """Parameters of sixteen bits beside others, and one that no loss reaches."""
    model = nn.ModuleDict(
        {"a": nn.Linear(8, 12, dtype=torch.bfloat16), "b": nn.Linear(12, 3), "unused": nn.Linear(2, 2)}
    )

    def loss(step: int, index: int) -> Tensor:
        inputs = torch.randn(4, 8, generator=drawn(step, index)).bfloat16()
        return model["b"](model["a"](inputs).float()).square().mean()

    return Training(model, [torch.optim.SGD(model.parameters(), 0.1)], loss)


def bert() -> Training:
    """One of Hugging Face's."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=24,
    )  # fmt: skip
    model = BertForMaskedLM(config)

    def loss(step: int, index: int) -> Tensor:
        ids = torch.randint(80, (2, 12), generator=drawn(step, index))
        return model(input_ids=ids, labels=ids).loss

    return Training(model, [torch.optim.AdamW(model.parameters(), 1e-3)], loss, clip=1.0)


JOBS: dict[str, Callable[..., Training]] = {
    "transformer": transformer, "tables": tables, "images": images, "recurrent": recurrent, "half": half, "bert": bert,
}  # fmt: skip


@dataclass
class Fate:
    """What befalls a process.

    Args:
        rank: its rank among those planned.
        dies_at: the step, and after how many calls of its loss in it.
        dies_after: seconds after its start, or, with ``is_timed``, after the first step has begun.
        stops_at, stop_seconds: likewise, that it stops for.
        waits: seconds before it starts, likewise.
        replaces: whether they count from the death, by ``dies_at``, of an earlier process of its rank.
        slow: seconds more for each micro-batch.
    """

    rank: int
    dies_at: tuple[int, int] | None = None
    dies_after: float | None = None
    stops_at: tuple[int, int] | None = None
    stop_seconds: float = 8.0
    waits: float = 0.0
    slow: float = 0.0
    seed: int = 0
    replaces: bool = False
    is_timed: bool = False
    first_words: Callable[[], None] | None = None
    last_words: Callable[[], None] | None = None


@dataclass
class Made:
    """What a rank returns."""

    digest: str
    stats: dict[str, float]
    calls: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0


def train(job: str, fate: Fate, steps: int, micro_batches: int, group: Members | None = None, **options: Any) -> Made:
    torch.manual_seed(fate.seed)  # others than rank 0 draw other parameters
    if job == "threads":
        options["threads"] = 1 + fate.rank
    training = JOBS.get(job, images)()
    if job == "faulty" and fate.rank == 2:
        next(training.model.parameters()).register_hook(with_a_wrong_bit)
    rates = [[group["lr"] for group in one.param_groups] for one in training.optimizers]
    calls: list[tuple[int, int]] = []
    began = time.monotonic()
    all_steps = reproducible.Steps(
        training.model, micro_batches, steps, seed=5, optimizer=training.optimizers, process_group=group, **options
    )
    for step in all_steps:
        current = step.number
        if fate.first_words is not None:
            fate.first_words()
        for one, usual in zip(training.optimizers, rates, strict=True):
            for group, rate in zip(one.param_groups, usual, strict=True):
                group["lr"] = rate / (1 + current % 5)
        for index in step:
            made = sum(number == current for number, _ in calls)
            if fate.dies_at == (current, made):
                if fate.last_words is not None:
                    fate.last_words()
                os.kill(os.getpid(), signal.SIGKILL)
            if fate.stops_at == (current, made):
                fate.stops_at = None
                stop(fate.stop_seconds)
            calls.append((current, index))
            training.loss(current, index).backward()
            time.sleep(fate.slow * random.random() * 2)
        training.step()
    return Made(reproducible.digest(training.model), all_steps.stats(), calls, time.monotonic() - began)


def with_a_wrong_bit(gradient: Tensor) -> Tensor:
    words = gradient.clone().view(torch.int32)
    words.view(-1)[7] ^= 1 << 20
    return words.view(torch.float32)


def in_group(
    context: RankContext, job: str, fates: list[Fate], steps: int, micro_batches: int, options: dict[str, Any]
) -> Made:
    return train(job, fates[context.rank], steps, micro_batches, **options)


def as_members(
    context: RankContext,
    port: int,
    job: str,
    fates: list[Fate],
    steps: int,
    micro_batches: int,
    options: dict[str, Any],
) -> Made:
    fate = fates[context.rank]
    store = dist.TCPStore("127.0.0.1", port)
    if fate.replaces:
        store.wait([f"death of {fate.rank}"])
    fate.last_words = lambda: store.set(f"death of {fate.rank}", "")
    if fate.is_timed:
        fate.first_words = lambda: store.set("begun", "")
    if fate.is_timed and fate.waits:
        store.wait(["begun"])
    time.sleep(fate.waits)
    if fate.dies_after is not None:
        pid, seconds = os.getpid(), fate.dies_after
        if os.fork() == 0:
            if fate.is_timed:
                dist.TCPStore("127.0.0.1", port).wait(["begun"])
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
    planned = 1 + max(one.rank for one in fates)
    members = Members(store, fate.rank, planned, timedelta(seconds=PORT_SECONDS))
    return train(job, fate, steps, micro_batches, members, **options)


def on_ranks(
    job: str, fates: list[Fate], steps: int = 4, micro_batches: int = 8, seconds: float = 120.0, **options: Any
) -> list[Made]:
    """Train on the ranks of a process group."""
    outcomes = run_ranks(
        in_group, job, fates, steps, micro_batches, options, world_size=len(fates), timeout_seconds=seconds
    )
    return [outcome.value for outcome in outcomes]


def with_fates(
    job: str, fates: list[Fate], steps: int = 4, micro_batches: int = 8, seconds: float = 120.0, **options: Any
) -> list[Any]:
    """Train with members; return what each process returned, or its outcome if it has ended otherwise."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_ranks(
        as_members, store.port, job, fates, steps, micro_batches, options,
        world_size=len(fates), check=False, timeout_seconds=seconds, init_process_group=False,
    )  # fmt: skip
    return [outcome.value if outcome.exit_code == 0 and outcome.error is None else outcome for outcome in outcomes]


def alone(job: str, steps: int = 4, micro_batches: int = 8, **options: Any) -> Made:
    """Train in this process."""
    threads = torch.get_num_threads()
    try:
        return train(job, Fate(0), steps, micro_batches, **options)
    finally:
        torch.set_num_threads(threads)
