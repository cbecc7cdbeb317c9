"""Loss against bytes at short horizons: n data-parallel ranks in one process, by the package's own compressors.

    python benchmarks/loss_frontier.py --task rec --methods "adamw;muon0:ef21(power_sgd(0.1, values=mxfp4()))"
    python benchmarks/loss_frontier.py --task digits --rates 1,2,4 --seeds 0,1,2 --json rows.jsonl
    python benchmarks/loss_frontier.py --draw rows.jsonl --out frontier.svg              # and prints the table

Each rank has a batch of its own. Gradients of matrices are averaged by the compressor, with error feedback if it needs
it; everything else is averaged in float32. A method is OPTIMIZER[:COMPRESSOR]. adamw; muon, which is AdamW for tables
and vectors; muon0, which is Muon without momentum, for `ef21`; sgd, with momentum. Tables and the embeddings of
positions take error feedback in place of ef21. Rates are factors of the task's own learning rate, with a warm-up of 20
steps and a cosine. A loss is of held-out data, the mean over the last tenth of the steps. Bytes are those of a rank,
of everything, beside a ring all-reduce of float32.

Tasks made here: digits, scikit-learn's, with a convolution net; rec, which identifier comes next in a file of Python's
standard library, by embeddings and an MLP. Tasks of others, from clones in the folder --repos: shakespeare, nanoGPT as
its README trains it on a CPU, on the text of char-rnn (karpathy/nanoGPT 3adf61e, karpathy/char-rnn 6f9487a); mnist, the
net of PyTorch's example with its dropout, for scikit-learn's digits in 28 x 28 pixels (pytorch/examples 77f55b9);
names, the GRU of makemore and its names (karpathy/makemore 988aa59).
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import math
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from thinwire import compress
from thinwire.compress.assign import Dense, assign
from thinwire.compress.base import Compressor, Packed, Parameter, Payload
from thinwire.compress.memory import EF21, with_memory
from thinwire.compress.state import salted
from thinwire.compress.wrappers import code_of, unwrapped
from thinwire.lab.analyze.simulated import SimulatedRanks

TABLES = re.compile(r"(^|\.)(wte|wpe|items|next)\.")
REPOS = Path("repos")


def of_others(path: str, *absent: str) -> ModuleType:
    """Import a module of a clone by its path; modules that it imports and that nothing here needs may be absent."""
    sys.modules.update({name: MagicMock() for name in absent if name not in sys.modules})
    name = path.replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, (REPOS / path).with_suffix(".py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def source() -> str:
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))
    return "".join(Path(file).read_text(errors="ignore") for file in files)


class Task:
    """A model, batches for all ranks, and a loss; made from a seed."""

    rate: float
    model: nn.Module
    held_out: tuple[Tensor, Tensor]

    def __init__(self, seed: int, ranks: int) -> None:
        self.ranks, self.draw = ranks, torch.Generator().manual_seed(100 + seed)
        torch.manual_seed(seed)
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def batch(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def windows(self, text: Tensor, length: int, count: int, draw: torch.Generator) -> Tensor:
        first = torch.randint(0, len(text) - length, (count, 1), generator=draw)
        return text[first + torch.arange(length)]

    def loss(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = functional_call(self.model, parameters, (inputs,))
        return functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), label_smoothing=self.smoothing, ignore_index=-1
        )

    smoothing = 0.0


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's images, 8 x 8 and from -1 to 1, and their labels, in an order of their own."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(3))
    images = torch.tensor(data.data, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return images[order], torch.tensor(data.target)[order]


class Digits(Task):
    rate, size, smoothing, shifts = 2e-3, 8, 0.1, (-1, 0, 1)

    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def seen(self, images: Tensor) -> Tensor:
        return images

    def make(self) -> None:
        images, labels = digits()
        self.images, self.labels = images[:1300], labels[:1300]
        shifts = [(right, down) for right in self.shifts for down in self.shifts]
        held_out = torch.cat([torch.roll(images[1300:], shift, (2, 3)) for shift in shifts])
        self.held_out = self.seen(held_out), labels[1300:].repeat(len(shifts))
        self.model = self.net()

    def batch(self) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(0, len(self.images), (self.ranks * self.size,), generator=self.draw)
        shift = torch.randint(-1, 2, (2,), generator=self.draw).tolist()
        images = torch.roll(self.images[chosen], shift, (2, 3))
        images = self.seen(images + 0.3 * torch.randn(images.shape, generator=self.draw))
        return images.unflatten(0, (self.ranks, self.size)), self.labels[chosen].view(self.ranks, self.size)


class Mnist(Digits):
    rate, size, shifts = 1e-3, 4, (0,)

    def net(self) -> nn.Module:
        return of_others("examples/mnist/main", "torchvision").Net()

    def seen(self, images: Tensor) -> Tensor:
        return functional.interpolate(images, size=28, mode="bilinear")


class Logits(nn.Module):
    """A model that returns its logits for all tokens only where it is given targets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, text: Tensor) -> Tensor:
        text = text.contiguous()
        with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
            return self.inner(text, text)[0]


class Shakespeare(Task):
    rate, length, size = 1e-3, 64, 2

    def make(self) -> None:
        code = of_others("nanoGPT/model")
        text = (REPOS / "char-rnn/data/tinyshakespeare/input.txt").read_text()
        known = {character: number for number, character in enumerate(sorted(set(text)))}
        self.text, others = torch.tensor([known[one] for one in text]).split(
            [len(text) * 9 // 10, len(text) - len(text) * 9 // 10]
        )
        shape = {"block_size": self.length, "vocab_size": len(known), "n_layer": 4, "n_head": 4, "n_embd": 128}
        self.model = Logits(code.GPT(code.GPTConfig(**shape, dropout=0.0, bias=False)))
        held_out = self.windows(others, self.length + 1, 128, torch.Generator().manual_seed(7))
        self.held_out = held_out[:, :-1], held_out[:, 1:]

    def batch(self) -> tuple[Tensor, Tensor]:
        text = self.windows(self.text, self.length + 1, self.ranks * self.size, self.draw)
        text = text.view(self.ranks, self.size, -1)
        return text[..., :-1], text[..., 1:]


class Names(Task):
    rate, size = 2e-3, 16

    def make(self) -> None:
        code = of_others("makemore/makemore", "torch.utils.tensorboard")
        words = (REPOS / "makemore/names.txt").read_text().split()
        order = torch.randperm(len(words), generator=torch.Generator().manual_seed(3)).tolist()
        data = code.CharDataset(
            [words[one] for one in order], sorted(set("".join(words))), max(len(word) for word in words)
        )
        pairs = [data[number] for number in range(len(words))]
        self.inputs, self.targets = (torch.stack(side) for side in zip(*pairs, strict=True))
        config = code.ModelConfig(
            block_size=data.get_output_length(), vocab_size=data.get_vocab_size(), n_embd=64, n_embd2=64
        )
        self.model, self.held_out = Logits(code.RNN(config, "gru")), (self.inputs[-1000:], self.targets[-1000:])

    def batch(self) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(0, len(self.inputs) - 1000, (self.ranks, self.size), generator=self.draw)
        return self.inputs[chosen], self.targets[chosen]


class NextItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.next = nn.Embedding(2048, 32), nn.Embedding(2048, 32)
        self.hidden, self.out = nn.Linear(8 * 32, 128), nn.Linear(128, 32)
        nn.init.normal_(self.items.weight, std=0.3)
        nn.init.normal_(self.next.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.hidden(self.items(ids).flatten(1)).relu()) @ self.next.weight.t()


class Rec(Task):
    rate, size = 3e-3, 64

    def make(self) -> None:
        words = re.findall(r"[A-Za-z_]\w+", source())
        known = {word: number + 1 for number, (word, _) in enumerate(Counter(words).most_common(2047))}
        ids = torch.tensor([known[word] for word in words if word in known])
        self.ids, others = ids.split([len(ids) * 9 // 10, len(ids) - len(ids) * 9 // 10])
        self.model = NextItem()
        self.held_out = self.pair(self.windows(others, 9, 4096, torch.Generator().manual_seed(7)))

    def pair(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids[..., :8], ids[..., 8]

    def batch(self) -> tuple[Tensor, Tensor]:
        return self.pair(self.windows(self.ids, 9, self.ranks * self.size, self.draw).view(self.ranks, self.size, 9))


TASKS: dict[str, type[Task]] = {
    "shakespeare": Shakespeare, "mnist": Mnist, "rec": Rec, "digits": Digits, "names": Names,
}  # fmt: skip


def ways(compressor: Compressor | None) -> Dense:
    """Return how gradients travel: large matrices by the compressor, and before Adam by what `ef21` is around."""
    if compressor is None:
        return "native"
    if not isinstance(compressor, EF21):
        return compressor.by("two_shot") if isinstance(code_of(compressor), Packed) else compressor
    inner = compressor.inner
    return lambda parameter: compress.leave_small(inner if TABLES.search(parameter.name) else compressor)(parameter)


def sent_bytes(parameters: dict[str, Tensor], compressor: Compressor | None, ranks: int) -> int:
    """Return the bytes of a rank's step by the package's own messages, headers and what is exact included."""
    simulated = SimulatedRanks(ways(compressor), parameters, frozenset(), ranks)
    simulated.mean([{name: torch.randn(one.shape) for name, one in parameters.items()} for _ in range(ranks)])
    return simulated.sent_bytes


class Mean:
    """The mean of the ranks' gradients of one parameter, by a compressor, without the threads of `SimulatedRanks`.

    What travels in two shots is coded by the owner again; owners' memories are as in `thinwire.compress`: none for
    factors of `power_sgd`, one of their own for compressors that need it.
    """

    def __init__(self, dense: Dense, name: str, tensor: Tensor, ranks: int) -> None:
        parameter = self.parameter = Parameter(name, tuple(tensor.shape))
        method = assign(dense, [parameter])[name]
        self.compressor = None if isinstance(method, str) else method.compressor
        self.owner: Any = None
        if self.compressor is not None:
            self.states = [salted(self.compressor.init(parameter), rank) for rank in range(ranks)]
            if isinstance(code_of(self.compressor), Packed):
                owner = with_memory(code_of(self.compressor))
                self.owner = owner, salted(owner.init(parameter), ranks)

    def __call__(self, gradients: Tensor) -> Tensor:
        if self.compressor is None:
            return gradients.mean(0)
        parameter, code = self.parameter, code_of(self.compressor)
        payloads = [
            self.compressor.compress(gradient.contiguous(), parameter, state)
            for gradient, state in zip(gradients, self.states, strict=True)
        ]
        if self.owner is not None:
            assert isinstance(code, Packed)
            total = torch.stack([code.decompress(payload, parameter) for payload in payloads]).mean(0)
            owner, state = self.owner
            mean = code.decompress(owner.compress(total, parameter, state), parameter)
            for each in self.states:
                self.compressor.finish(mean.clone(), parameter, each)
            owner.finish(mean.clone(), parameter, state)
            return mean
        inside = [unwrapped(self.compressor, state)[1] for state in self.states]
        current: list[Payload | None] = list(payloads)
        last = payloads[0]
        while current[0] is not None:
            values = current[0].code
            parts = []
            for number, part in enumerate(current[0].parts):
                plan = Parameter("part", tuple(part.shape))
                coded = [_coded(payload.parts[number], values, plan) for payload in current if payload is not None]
                parts.append(_coded(torch.stack(coded).mean(0), values, plan))
            last = Payload(tuple(parts), code=values)
            current = [code.next_round(last, parameter, state) for state in inside]  # type: ignore[attr-defined]
        results = [code.reconstruct(last, parameter, state) for state in inside]  # type: ignore[attr-defined]
        for result, state in zip(results, self.states, strict=True):
            self.compressor.finish(result, parameter, state)
        return results[0]


def _coded(part: Tensor, values: Any, plan: Parameter) -> Tensor:
    return part if values is None else values.decompress(values.compress(part, plan, {}), plan)


def optimizers(kind: str, parameters: dict[str, Tensor], rate: float) -> list[torch.optim.Optimizer]:
    if kind == "sgd":
        return [torch.optim.SGD(parameters.values(), lr=30 * rate, momentum=0.9)]
    by_muon = {
        name: one
        for name, one in parameters.items()
        if kind.startswith("muon") and one.dim() > 1 and not TABLES.search(name)
    }
    others = [one for name, one in parameters.items() if name not in by_muon]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.99), weight_decay=0.01)]
    if by_muon:
        momentum = 0.0 if kind == "muon0" else 0.95
        flat = [
            one.flatten(1) for one in by_muon.values()
        ]  # Muon takes matrices, of which convolutions have more sides
        for one, matrix in zip(by_muon.values(), flat, strict=True):
            matrix.grad = torch.zeros_like(matrix)
            one.matrix = matrix  # type: ignore[attr-defined]
        found.append(
            torch.optim.Muon(
                flat, lr=rate, weight_decay=0.01, momentum=momentum, nesterov=momentum > 0,
                adjust_lr_fn="match_rms_adamw",
            )
        )  # fmt: skip
    return found


def train(task: Task, method: str, steps: int, rate: float) -> tuple[float, float]:
    """Return the held-out loss, and how many times fewer bytes than float32's were sent."""
    kind, _, text = method.partition(":")
    compressor = eval(text, vars(compress).copy()) if text else None
    parameters = {name: one.detach().clone() for name, one in task.model.named_parameters()}
    means = {name: Mean(ways(compressor), name, one, task.ranks) for name, one in parameters.items()}
    stepped = optimizers(kind, parameters, rate * task.rate)
    gradient, losses = vmap(grad(task.loss), (None, 0, 0), randomness="different"), []
    for step in range(steps):
        inputs, targets = task.batch()
        averaged = {name: means[name](one) for name, one in gradient(parameters, inputs, targets).items()}
        norm = torch.sqrt(sum((one.square().sum() for one in averaged.values()), torch.zeros(())))
        for name, one in parameters.items():
            clipped = averaged[name] * min(1.0, float(1.0 / (norm + 1e-6)))
            target = getattr(one, "matrix", one)
            target.grad = clipped.view(target.shape)
        shape = min(1.0, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for optimizer in stepped:
            for group in optimizer.param_groups:
                group["lr"] = rate * task.rate * shape * (30 if kind == "sgd" else 1)
            optimizer.step()
        if (step >= 0.9 * steps and (step + 1) % 10 == 0) or step == steps - 1:
            task.model.eval()
            with torch.no_grad():
                losses.append(task.loss(parameters, *task.held_out).item())
            task.model.train()
    fewer = sent_bytes(parameters, None, task.ranks) / sent_bytes(parameters, compressor, task.ranks)
    return sum(losses) / len(losses), fewer


def best(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows of each task and method at the rate of the lowest mean loss, in the order of their seeds."""
    found: dict[tuple[str, str], dict[float, list[dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault((row["task"], row["method"]), {}).setdefault(row["rate"], []).append(row)
    chosen = {}
    for key, rates in found.items():
        most = max(map(len, rates.values()))
        complete = [same for same in rates.values() if len(same) == most]
        same = min(complete, key=lambda same: statistics.fmean(row["loss"] for row in same))
        chosen[key] = sorted(same, key=lambda row: row["seed"])
    return chosen


def behind(chosen: dict[tuple[str, str], list[dict[str, Any]]], task: str, method: str, beside: str) -> list[float]:
    """Return how far each seed's loss is above the loss of the same seed by another method."""
    others = {row["seed"]: row["loss"] for row in chosen.get((task, beside), ())}
    return [row["loss"] / others[row["seed"]] - 1 for row in chosen[task, method] if row["seed"] in others]


def tables(rows: list[dict[str, Any]]) -> None:
    chosen = best(rows)
    for task in TASKS:
        methods = [method for of, method in chosen if of == task]
        if not methods:
            continue
        print(f"\n| `{task}` | loss of each seed | rate | beside AdamW | beside Muon | fewer bytes |")
        print("|---|---|---|---|---|---|")
        for method in sorted(methods, key=lambda method: chosen[task, method][0]["times_fewer_bytes"]):
            same = chosen[task, method]
            beside = [
                f"{statistics.fmean(parts):+.2%}" if (parts := behind(chosen, task, method, one)) else ""
                for one in ("adamw", "muon")
            ]
            print(
                f"| `{method}` | {', '.join(format(row['loss'], '.4f') for row in same)} | {same[0]['rate']:g} |"
                f" {beside[0]} | {beside[1]} | {same[0]['times_fewer_bytes']:.1f}x |"
            )


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw loss beside AdamW's against bytes, a panel for each task, with the frontier of what was tried."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "frontier", "font.size": 8}
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    chosen = best(rows)
    methods = sorted({method for _, method in chosen}, key=lambda method: (method.count(":"), method))
    figure, panels = pyplot.subplots(2, 3, figsize=(10, 6.2), layout="constrained")
    tasks = [task for task in TASKS if any(of == task for of, _ in chosen)]
    for panel, task in zip(panels.flat, tasks, strict=False):
        points = []
        for number, method in enumerate(methods):
            if (task, method) in chosen:
                parts = behind(chosen, task, method, "adamw")
                fewer, mean = chosen[task, method][0]["times_fewer_bytes"], statistics.fmean(parts)
                points.append((fewer, mean))
                spread = [[mean - min(parts)], [max(parts) - mean]]
                panel.errorbar(fewer, mean, spread, fmt="oDsv^P*X<>ph"[number], color=f"C{number % 10}", capsize=2)
        frontier = [one for one in sorted(points) if all(other[1] >= one[1] for other in points if other[0] >= one[0])]
        panel.plot(*zip(*frontier, strict=True), color="0.6", linewidth=0.8, zorder=0)
        panel.axhspan(-1, 0.01, color="0.95", zorder=-1)
        panel.set(title=task, xscale="log", xlabel="times fewer bytes", ylabel="loss beside AdamW's")
        panel.set_ylim(min(one[1] for one in points) - 0.02, min(0.25, max(one[1] for one in points) + 0.02))
        panel.yaxis.set_major_formatter(PercentFormatter(1, 0))
        panel.xaxis.set_major_formatter("{x:g}")
    for number, method in enumerate(methods):
        panels.flat[-1].plot([], [], "oDsv^P*X<>ph"[number], color=f"C{number % 10}", label=method)
    panels.flat[-1].legend(loc="center", frameon=False)
    for panel in panels.flat[len(tasks) :]:
        panel.axis("off")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="rec")
    parser.add_argument(
        "--methods", default="adamw;muon;muon0:ef21(power_sgd(0.1, values=mxfp4()), 0.9)", help="; between"
    )
    parser.add_argument("--rates", default="1,2,4")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file to which a line is added for each training")
    parser.add_argument("--repos", type=Path, default=REPOS, help="folder of clones, for tasks of others")
    parser.add_argument("--draw", type=Path, help="file of rows: train nothing, print tables")
    parser.add_argument("--out", type=Path, help="with --draw: picture, as SVG")
    options = parser.parse_args()
    globals()["REPOS"] = options.repos
    if options.draw is not None:
        text = options.draw.read_text()
        rows = json.loads(text)["rows"] if text.startswith("{\n") else list(map(json.loads, text.splitlines()))
        tables(rows)
        if options.out is not None:
            draw(rows, options.out)
        return
    torch.set_num_threads(1)
    for method in options.methods.split(";"):
        for seed in map(int, options.seeds.split(",")):
            for rate in map(float, options.rates.split(",")):
                started = time.perf_counter()
                loss, fewer = train(TASKS[options.task](seed, options.ranks), method.strip(), options.steps, rate)
                row = {"task": options.task, "method": method.strip(), "seed": seed, "rate": rate, "loss": loss}
                row |= {"steps": options.steps, "ranks": options.ranks, "times_fewer_bytes": fewer}
                seconds = time.perf_counter() - started
                print(
                    f"{options.task} {method} seed {seed} rate {rate:g}:"
                    f" loss {loss:.4f}, {fewer:.1f}x, {seconds:.0f} s",
                    flush=True,
                )
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
