"""Share of its bytes that each kind of tensor of a training state keeps as codes: JOB [STEPS], on one core.

Example: python benchmarks/checkpoint_bits.py gpt 40
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.checkpoint.state.coding import LEAST_VALUES, PIECE_VALUES
from thinwire.lab.bench.jobs.named import get_job
from thinwire.rows import floats


def share(tensors: Sequence[Tensor]) -> float:
    """Return the bytes of all codes over those of the tensors, coded as a Checkpointer does."""
    pieces = [piece for tensor in tensors for piece in tensor.detach().reshape(-1).split(PIECE_VALUES)]
    coded = sum(floats.encode(each).numel() if each.numel() >= LEAST_VALUES else each.nbytes for each in pieces)
    return coded / sum(piece.nbytes for piece in pieces)


def main(name: str, steps: int = 40) -> None:
    torch.set_num_threads(1)
    job = get_job(name)
    batches = job.batches(job.load(), 0, 1, seed=0)
    model = job.model(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        job.loss(model, next(batches)).backward()
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    kinds = {"weights": [*model.parameters()]}
    kinds |= {key: [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")}
    for dtype in (torch.float32, torch.bfloat16):
        shares = {kind: share([tensor.to(dtype) for tensor in tensors]) for kind, tensors in kinds.items()}
        print(name, str(dtype).removeprefix("torch."), {kind: round(each, 3) for kind, each in shares.items()})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
