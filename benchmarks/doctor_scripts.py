"""Ten trainings as people write them, for `doctor_truth.py`: torchrun ... doctor_scripts.py NAME [--steps N].

Stock DDP, a few megabytes of gradients, random data. With ``STEPS_LOG`` in the environment rank 0 writes there the time
at which each optimizer step has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SCRIPTS: dict[str, Callable[[int], None]] = {}


def script(function: Callable[[int], None]) -> Callable[[int], None]:
    SCRIPTS[function.__name__.replace("_", "-")] = function
    return function


def log() -> None:
    """Note that an optimizer step has ended."""
    if "STEPS_LOG" in os.environ and dist.get_rank() == 0:
        with open(os.environ["STEPS_LOG"], "a") as file:
            print(time.time(), file=file)


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers)


def accumulate(steps: int, micro_batches: int) -> None:
    model = DistributedDataParallel(mlp(256, 1500, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        for micro in range(micro_batches):
            with contextlib.nullcontext() if micro == micro_batches - 1 else model.no_sync():
                model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        log()


@script
def accumulate_1(steps: int) -> None:
    accumulate(steps, 1)


@script
def accumulate_4(steps: int) -> None:
    accumulate(steps, 4)


@script
def accumulate_16(steps: int) -> None:
    accumulate(steps, 16)


@script
def two_forwards(steps: int) -> None:
    """SimCLR, two towers: one backward through two forwards."""
    model = DistributedDataParallel(mlp(256, 1500, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(32, 256)
        loss = F.cross_entropy(model(x) @ model(x + 0.1).T, torch.arange(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log()


@script
def two_backwards(steps: int) -> None:
    """Two losses, each with a synchronized backward of its own."""
    model = DistributedDataParallel(mlp(256, 1000, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(steps):
        for sign in (1, -1):
            (sign * model(torch.randn(32, 256)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        log()


@script
def gradcache(steps: int) -> None:
    """Large contrastive batches in parts: representations without a graph, then a synchronized backward each."""
    model = DistributedDataParallel(mlp(256, 600, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(steps):
        parts = torch.randn(4, 16, 256)
        with torch.no_grad():
            cached = [model(part) for part in parts]
        found = torch.cat(cached).requires_grad_()
        F.cross_entropy(found @ found.T, torch.arange(64)).backward()
        assert found.grad is not None
        for part, gradient in zip(parts, found.grad.split(16), strict=True):
            (model(part) * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        log()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, words: int = 2000, width: int = 128) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(words, width), nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, words, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(self.words(ids)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@script
def nanogpt(steps: int) -> None:
    """The loop of karpathy/nanoGPT: accumulation by an attribute of DDP, a GradScaler, clipping, evaluation."""
    model: Any = DistributedDataParallel(Gpt())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-4, betas=(0.9, 0.95))
    for step in range(steps):
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                model.module(torch.randint(2000, (2, 32)), torch.randint(2000, (2, 32)))
            model.train()
        for micro in range(4):
            model.require_backward_grad_sync = micro == 3
            _, loss = model(torch.randint(2000, (2, 32)), torch.randint(2000, (2, 32)))
            scaler.scale(loss / 4).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log()


@script
def imagenet(steps: int) -> None:
    """The imagenet example of pytorch/examples: a convolutional network, SGD with momentum, a scheduler, metrics."""
    features = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
    )
    model = DistributedDataParallel(
        nn.Sequential(features, nn.Flatten(), nn.Linear(32 * 8 * 8, 300), nn.Linear(300, 100))
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    model.train()
    for _ in range(steps):
        images, target = torch.randn(16, 3, 32, 32), torch.randint(100, (16,))
        output = model(images)
        loss = criterion(output, target)
        output.topk(5, 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log()


@script
def word_language_model(steps: int) -> None:
    """The word language model of pytorch/examples: an LSTM, clipping, an update by hand without an optimizer."""

    class Rnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.rnn, self.decoder = nn.Embedding(3000, 100), nn.LSTM(100, 100, 2), nn.Linear(100, 3000)

        def forward(self, ids: Tensor, hidden: Any) -> tuple[Tensor, Any]:
            output, hidden = self.rnn(self.encoder(ids), hidden)
            return F.log_softmax(self.decoder(output).flatten(0, 1), dim=1), hidden

    model, hidden = DistributedDataParallel(Rnn()), None
    for _ in range(steps):
        model.train()
        model.zero_grad()
        hidden = None if hidden is None else tuple(state.detach() for state in hidden)
        output, hidden = model(torch.randint(3000, (20, 8)), hidden)
        F.nll_loss(output, torch.randint(3000, (160,))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
        log()


@script
def hf_trainer(steps: int) -> None:
    """transformers.Trainer with gradient_accumulation_steps=4."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(256, 1500, 256)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.layers(x) - labels).square().mean()}

    class Log(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            log()

    data = [{"x": torch.randn(256), "labels": torch.randn(256)} for _ in range(1024)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
            ddp_backend="gloo",
        )
        Trainer(Net(), arguments, train_dataset=data, callbacks=[Log()]).train()  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(SCRIPTS))
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.name != "hf-trainer":
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    SCRIPTS[options.name](options.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
