"""Flip single bits in the products of a micro-batch: gradients that change are found, and those that do not are not.

    python benchmarks/reproducible_faults.py --faults 1000 --comparisons 100000 --json faults.json

A fault flips one bit of the product of a random layer. The micro-batch is made again without it, as another rank
would, and fingerprints are compared as by ``check_every``. The comparisons are of micro-batches without a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.reproducible.gradients import Gradients


class Faulty(nn.Sequential):
    """A small network, of which one product may have a wrong bit."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 8))
        self.fault: tuple[int, float, int] | None = None  # layer, which value (0 to 1), bit

    def forward(self, values: Tensor) -> Tensor:
        for number, layer in enumerate(self):
            values = layer(values)
            if self.fault is not None and self.fault[0] == number:
                with torch.no_grad():
                    words = values.detach().view(-1).view(torch.int32)
                    words[int(self.fault[1] * words.numel())] ^= _mask(self.fault[2])
        return values


def _mask(bit: int) -> int:
    return (1 << bit) - (1 << 32) * (bit == 31)


def made(model: Faulty, gradients: Gradients, number: int) -> tuple[str, list[Tensor]]:
    """Make a micro-batch; return the fingerprint and the gradients."""
    gradients.begin()
    torch.manual_seed(number)
    model(torch.randn(6, 16)).square().mean().backward()
    return gradients.fingerprint(), [entry.grad for entry in model.parameters() if entry.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--comparisons", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model, draw, began = Faulty(), random.Random(options.seed), time.monotonic()
    gradients = Gradients(model, 1)
    changed = found = false_alarms = 0
    for number in range(options.faults):
        right, usual = made(model, gradients, number)
        model.fault = draw.choice([0, 2, 5]), draw.random(), draw.randrange(32)
        wrong, other = made(model, gradients, number)
        model.fault = None
        pairs = zip(usual, other, strict=True)
        is_changed = any(not torch.equal(one.view(torch.int32), two.view(torch.int32)) for one, two in pairs)
        changed, found = changed + is_changed, found + (is_changed and wrong != right)
        false_alarms += not is_changed and wrong != right
    for number in range(options.comparisons):
        false_alarms += made(model, gradients, number)[0] != made(model, gradients, number)[0]
    result = {
        "faults": options.faults, "changed": changed, "found": found, "comparisons": options.comparisons,
        "false_alarms": false_alarms, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    raise SystemExit(found != changed or false_alarms > 0)


if __name__ == "__main__":
    main()
