"""Fine-tuning by outer loops and by DDP, on emulated hosts with slow links: loss, bytes and seconds at equal samples.

    python benchmarks/fine_tuning.py --ranks 8 --link 20mbit --json fine-tuning.json

A GPT-2 of transformers, of 0.8 million parameters, first learns the characters of Python's standard library, alone; its
weights are kept in a file. Then ranks fine-tune it on torch's own Python files, or on C++, the headers that come with
torch (--onto headers). Every method starts from the same weights, and each rank sees the same batches under all of
them. Losses are of text that was never trained on. Bytes are those that the busiest host's interface counted, from the
second step to the last; what is sent once, such as parameters at the start, stands beside them. "before" is the model
that nobody has fine-tuned, and "alone" is one rank without the others.

With --visible one rank trains for 64 steps at each rate, and prints what share of its parameters a round of 1, 8 and 32
steps changes in bfloat16. A sparsifier that leaves out what the next 16-bit forward does not see sends that share.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import platform
import statistics
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import compress, outer
from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

WIDTH, LAYERS, CONTEXT, BATCH, CHARACTERS = 128, 4, 64, 4, 127
BITS = {bits: compress.qsgd(bits) for bits in (2, 4, 8)}
SPARSE = compress.error_feedback(compress.top_k(0.0156, values=BITS[2]), decay=0.95)
LOW_RANK = compress.ef21(compress.power_sgd(0.1, values=compress.mxfp4()), 0.8)


@dataclass(frozen=True)
class Method:
    """An outer loop, or how gradients travel under DDP; by AdamW, or by Muon for matrices, with that momentum."""

    recipe: outer.OuterRecipe | None = None
    dense: Any = "native"
    muon: float | None = None


METHODS = {
    "ddp": Method(),
    "ddp, Muon": Method(muon=0.95),
    "ddp, Muon, power_sgd": Method(dense=LOW_RANK, muon=0.0),
    "diloco(16)": Method(outer.diloco(every=16)),
    "local_sgd(8)": Method(outer.local_sgd(every=8)),
    "local_sgd(8), 4 bits": Method(outer.local_sgd(every=8), compress.error_feedback(BITS[4])),
    "local_sgd(8), 2 bits": Method(outer.local_sgd(every=8), compress.error_feedback(BITS[2])),
    "local_sgd(8), 2 bits, Muon": Method(outer.local_sgd(every=8), compress.error_feedback(BITS[2]), muon=0.95),
    "sparse_loco(16)": Method(outer.diloco(every=16, lr=1.0, momentum=0.0, nesterov=False), SPARSE),
}


class GPT(nn.Module):
    """A GPT-2 that returns the mean loss of the next characters."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=128, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        self.inner = GPT2LMHeadModel(config)

    def forward(self, text: Tensor) -> Tensor:
        logits = self.inner(text[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Text:
    """Characters of files, of which the last 5 % are held out."""

    def __init__(self, pattern: str) -> None:
        files = sorted(glob.glob(pattern, recursive=True))
        text = "".join(Path(file).read_text(errors="ignore") for file in files)[:4_000_000]
        characters = torch.tensor([min(ord(character), CHARACTERS) for character in text], dtype=torch.uint8)
        self.trained, self.held_out = characters.split([len(text) * 19 // 20, len(text) - len(text) * 19 // 20])

    def draw(self, count: int, generator: torch.Generator, held_out: bool = False) -> Tensor:
        source = self.held_out if held_out else self.trained
        first = torch.randint(0, len(source) - CONTEXT, (count, 1), generator=generator)
        return source[first + torch.arange(CONTEXT + 1)].long()


PYTHON = f"{sysconfig.get_paths()['stdlib']}/*.py"
ONTO = {
    "torch": f"{Path(torch.__file__).parent}/**/*.py",
    "headers": f"{Path(torch.__file__).parent}/include/ATen/**/*.h",
}


def steps_of(model: nn.Module, rate: float, steps: int, muon: float | None = None) -> list[Any]:
    """Return what steps after a backward: optimizers, and their schedules."""
    matrices = [
        one for name, one in model.named_parameters() if muon is not None and one.ndim == 2 and "wt" not in name
    ]
    rest = [one for one in model.parameters() if not any(one is matrix for matrix in matrices)]
    optimizers: list[Any] = [torch.optim.AdamW(rest, lr=rate, weight_decay=0.01)]
    if muon is not None:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=rate, weight_decay=0.01, momentum=muon, nesterov=muon > 0, adjust_lr_fn="match_rms_adamw"
            )
        )

    def shape(step: int) -> float:
        return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    return [*optimizers, *(torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in optimizers)]


def held_out_loss(model: nn.Module, text: Text) -> float:
    with torch.no_grad():
        return float(model(text.draw(256, torch.Generator().manual_seed(7), held_out=True)))


def sent_by_host() -> int:
    """Return the bytes that the interfaces of this host have sent, or 0 without emulated hosts."""
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")


def pretrain(file: Path, steps: int) -> None:
    """Train on the standard library, with all processors, unless the file is there."""
    if file.exists():
        return
    torch.manual_seed(0)
    text, model, draw = Text(PYTHON), GPT(), torch.Generator().manual_seed(1)
    steppers = steps_of(model, 3e-3, steps)
    for step in range(steps):
        loss = model(text.draw(32, draw))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        if step % 100 == 0:
            print(f"first training, step {step} of {steps}: loss {loss:.3f}", flush=True)
    torch.save(model.state_dict(), file)


def fine_tune(
    context: RankContext, method: str, options: argparse.Namespace, rate: float
) -> tuple[list[float], float, list[int]]:
    """Return the seconds of steps, the loss of held-out text at the end, and bytes sent after a step and at the end."""
    text, model, steps = Text(ONTO[options.onto]), GPT(), options.steps
    model.load_state_dict(torch.load(options.weights))
    if method == "before":
        return [0.0], held_out_loss(model, text), [0, 0]
    made = METHODS.get(method, Method())
    steppers = steps_of(model, rate, steps, made.muon)
    wrapped: nn.Module = model
    loop: Any = None
    if made.recipe is not None:
        loop = thinwire.outer.attach(model, steppers[0], made.recipe, dense=made.dense)
    elif method != "alone":
        wrapped = DistributedDataParallel(model)
        if made.dense != "native":
            thinwire.attach(wrapped, dense=made.dense)
    draw, seconds, sent = torch.Generator().manual_seed(1000 * options.seed + context.rank), [], []
    for step in range(steps):
        if context.world_size > 1:
            dist.barrier()
        started = time.perf_counter()
        model.zero_grad()
        wrapped(text.draw(BATCH, draw)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in reversed(steppers[: len(steppers) // 2]):  # AdamW last: the outer loop counts its steps
            stepper.step()
        for stepper in steppers[len(steppers) // 2 :]:
            stepper.step()
        seconds.append(time.perf_counter() - started)
        if step == 0:
            sent.append(sent_by_host())
    if loop is not None:
        started = time.perf_counter()
        loop.synchronize()
        seconds[-1] += time.perf_counter() - started
    sent.append(sent_by_host())
    return seconds, held_out_loss(model, text), sent


def visible(weights: Path, text: Text, rate: float) -> str:
    """Train alone, and return the shares of parameters whose bfloat16 value rounds of some lengths change."""
    model, draw, shares = GPT(), torch.Generator().manual_seed(5), []
    model.load_state_dict(torch.load(weights))
    before, anchors, steppers = held_out_loss(model, text), [], steps_of(model, rate, 64)
    for step in range(64):
        if step == 24:
            anchors = [one.detach().bfloat16() for one in model.parameters()]
        loss = model(text.draw(BATCH, draw))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        if step - 23 in (1, 8, 32):
            pairs = zip(model.parameters(), anchors, strict=True)
            changed = sum(int((one.detach().bfloat16() != anchor).sum()) for one, anchor in pairs)
            shares.append(f"{changed / sum(anchor.numel() for anchor in anchors):.1%} of {step - 23}")
    return f"rate {rate:g}: loss {before:.3f} to {held_out_loss(model, text):.3f}; {', '.join(shares)} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--link", default="20mbit", help="none, or a rate such as 20mbit")
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--first-steps", type=int, default=1500, help="of the training before")
    parser.add_argument("--rates", default="1e-3", help="learning rates, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--methods",
        default=";".join(["ddp", "before", "alone", *(name for name in METHODS if name != "ddp")]),
        help="with ; between",
    )
    parser.add_argument("--onto", choices=ONTO, default="torch", help="the text of fine-tuning")
    parser.add_argument("--weights", type=Path, default=Path("fine-tuning.pt"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--visible", action="store_true", help="print what 16 bits see of a round, and end")
    options = parser.parse_args()
    options.weights = options.weights.absolute()
    pretrain(options.weights, options.first_steps)
    if options.visible:
        for rate in map(float, options.rates.split(",")):
            print(visible(options.weights, Text(ONTO[options.onto]), rate), flush=True)
        return
    for module in ("torch._dynamo", "transformers"):
        preload(module)
    link, rows, stock = Link.parse(options.link), [], None
    for method in options.methods.split(";"):
        for rate in map(float, options.rates.split(",")):
            ranks = 1 if method in ("alone", "before") else options.ranks
            with EmulatedNetwork(ranks, link) if link.mbit and ranks > 1 else nullcontext() as network:
                outcomes = run_ranks(
                    fine_tune, method, options, rate, world_size=ranks, network=network, timeout_seconds=9000
                )
            seconds = list(map(max, zip(*(outcome.value[0] for outcome in outcomes), strict=True)))
            loss = statistics.fmean(outcome.value[1] for outcome in outcomes)
            once, sent = max((outcome.value[2] for outcome in outcomes), key=lambda counts: counts[1] - counts[0])
            sent -= once
            row = {"method": method, "rate": rate, "loss": loss, "seconds": sum(seconds[2:])}
            if network is not None:
                row |= {"bytes": sent, "bytes_before_the_second_step": once}
            stock = row if method == "ddp" and (stock is None or loss < stock["loss"]) else stock
            rows.append(row)
            line = f"{method:28} rate {rate:g}  loss {loss:.4f}  {row['seconds']:7.1f} s"
            line += f"  {sent / 1e6:9.2f} MB and once {once / 1e6:.2f} MB" if network is not None else ""
            if stock is not None:
                line += f"  {loss / stock['loss'] - 1:+.2%}  {stock['seconds'] / max(row['seconds'], 1e-9):.1f}x sooner"
                line += f"  {stock['bytes'] / sent:.0f}x fewer bytes" if network is not None and sent else ""
            print(line, flush=True)
            if options.json:
                about = {"torch": torch.__version__, "processors": os.cpu_count(), "system": platform.platform()}
                about |= {"ranks": options.ranks, "link": options.link, "steps": options.steps, "seed": options.seed}
                options.json.write_text(json.dumps({"environment": about, "rows": rows}))


if __name__ == "__main__":
    main()
