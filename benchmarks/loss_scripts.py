"""Five trainings as their users write them, for ``thinwire doctor --loss``: see `doctor_losses.py`.

    torchrun --nproc-per-node 4 benchmarks/loss_scripts.py characters --steps 300

With LOSS_LOG in the environment rank 0 writes its held-out loss there at the end.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LENGTH, WIDTH = 32, 64
TEXT = torch.tensor(
    [ord(letter) % 128 for module in (F, nn.Module, argparse, inspect) for letter in inspect.getsource(module)]
)
TRAINED, HELD_OUT = TEXT[: len(TEXT) * 9 // 10], TEXT[len(TEXT) * 9 // 10 :]


class Characters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(128, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 128)

    def forward(self, letters: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.output(self.layers(self.letters(letters) + self.positions, mask=mask, is_causal=True))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        def block(before: int, after: int) -> list[nn.Module]:
            return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

        super().__init__(
            *block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 10),
        )  # fmt: skip


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(600, 32), nn.Embedding(400, 32)
        self.top = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.top(torch.cat([self.users(users), self.items(items)], 1)).squeeze(1)


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - LENGTH - 1, (count,), generator=generator)
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def text_loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())


def held_out_text(model: nn.Module) -> Tensor:
    return text_loss(model, windows(HELD_OUT, 128, torch.Generator().manual_seed(7)))


def characters(steps: int, lr: float) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = DDP(Characters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    shape = [
        min(1, (step + 1) / (steps / 15)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for step in range(steps + 1)
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape[step])
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        text_loss(model, windows(TRAINED, 4, data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.module, held_out_text


def muon(steps: int, lr: float) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = DDP(Characters())
    inner = {name: entry for name, entry in model.module.layers.named_parameters() if entry.ndim == 2}
    ids = set(map(id, inner.values()))
    rest = [entry for entry in model.parameters() if id(entry) not in ids]
    optimizers = [
        torch.optim.Muon(list(inner.values()), lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr / 2),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(one, [group["lr"] for group in one.param_groups], steps)
        for one in optimizers
    ]
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        text_loss(model, windows(TRAINED, 4, data)).backward()
        for one in (*optimizers, *schedules):
            one.step()
    return model.module, held_out_text


def convolutions(steps: int, lr: float) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (
        torch.tensor(digits.data, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1,
        torch.tensor(digits.target),
    )
    data = TensorDataset(images[:1400], labels[:1400])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Convolutions())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    epochs = math.ceil(steps * dist.get_world_size() * 16 / 1400)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), target, label_smoothing=0.1).backward()
            optimizer.step()
        schedule.step()

    def held_out(module: nn.Module) -> Tensor:
        return F.cross_entropy(module(images[1400:]), labels[1400:], label_smoothing=0.1)

    return model.module, held_out


def recommender(steps: int, lr: float) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    truth = torch.Generator().manual_seed(5)
    tastes, kinds = torch.randn(600, 3, generator=truth), torch.randn(400, 3, generator=truth)

    def clicks(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        users = (600 * torch.rand(count, generator=generator) ** 3).long()
        items = (400 * torch.rand(count, generator=generator) ** 3).long()
        chance = torch.sigmoid(2.0 * (tastes[users] * kinds[items]).sum(1))
        return users, items, torch.bernoulli(chance, generator=generator)

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(module(batch[0], batch[1]), batch[2])

    model = DDP(Recommender())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, clicks(256, data)).backward()
        optimizer.step()
    return model.module, lambda module: loss(module, clicks(8192, torch.Generator().manual_seed(7)))


def trainer(steps: int, lr: float) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    rows = windows(TRAINED, 8000, torch.Generator().manual_seed(3))[0]
    shape = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(shape)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=steps, learning_rate=lr, warmup_steps=steps // 15,
            report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, ddp_backend="gloo",
        )  # fmt: skip
        Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()

    def held_out(module: nn.Module) -> Tensor:
        letters = windows(HELD_OUT, 128, torch.Generator().manual_seed(7))[0]
        return module(input_ids=letters, labels=letters).loss

    return model, held_out


SCRIPTS = {one.__name__: one for one in (characters, convolutions, recommender, trainer, muon)}
LEARNING_RATES = {"characters": 3e-3, "convolutions": 0.05, "recommender": 5e-3, "trainer": 3e-3, "muon": 6e-3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SCRIPTS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.name != "trainer":
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model, held_out = SCRIPTS[options.name](options.steps, options.lr or LEARNING_RATES[options.name])
    model.eval()
    with torch.no_grad():
        loss = held_out(model).item()
    if int(os.environ.get("RANK", 0)) == 0 and "LOSS_LOG" in os.environ:
        with open(os.environ["LOSS_LOG"], "a") as file:
            file.write(f"{loss}\n")
    print(f"held-out loss {loss:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
