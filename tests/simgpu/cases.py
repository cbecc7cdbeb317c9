"""Trainings by someone who wrote neither the code nor the other scenarios: what models do with tables, and with ids.

Like `simgpu.scenarios`, with models of other kinds: tied and half tables, bags, two widths, checkpointed lookups; and
batches without ids on a rank or on all, with one id thousands of times, with all rows, or with infinite gradients.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire
from simgpu.device import World
from simgpu.scenarios import Report, _finish, is_ours
from simgpu.torch_semantics import peek, simulated
from thinwire.lab.testbed.launch import RankContext

ROWS, WIDTH = 3000, 16


class Net(nn.Module):
    """A model of some kinds: words of its case's ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, sparse = kind.split(), "sparse" in kind
        table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse) if "bag" in kind else nn.Embedding(ROWS, WIDTH, sparse=sparse)  # fmt: skip # noqa: E501
        self.table = table.to(torch.float16) if "half" in kind else table
        self.other = nn.Embedding(700, 8, sparse=sparse).to(torch.bfloat16) if "widths" in kind else None
        self.layer = nn.Linear(WIDTH, 40)
        self.out, self.back = (None, nn.Linear(40, WIDTH)) if "tied" in kind else (nn.Linear(40, 7), None)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self._looked_up(ids).float()))
        if self.back is not None:
            return functional.linear(self.back(hidden), self.table.weight[:50])
        if "infinite" in self.kind:
            hidden = hidden * torch.where(torch.arange(40, device=hidden.device) == 3, float("inf"), 1.0)
        assert self.out is not None
        return self.out(hidden)

    def _looked_up(self, ids: Tensor) -> Tensor:
        if "bag" in self.kind:
            offsets = torch.arange(0, max(1, len(ids)), 2, device=ids.device)[: max(1, len(ids) // 2)]
            found = self.table(ids % ROWS, offsets)
        elif "checkpoint" in self.kind:
            found = checkpoint(lambda ids: self.table(ids % ROWS) * 1.5, ids, use_reentrant=False)
        else:
            found = self.table(ids % ROWS)
        if "thrice" in self.kind:
            found = found * (1 + self.table((ids * 5 + 1) % ROWS)) + self.table((ids * 11) % ROWS)
        if self.other is not None:
            found = found + functional.pad(self.other(ids % 700).float(), (0, 8))
        return found


@dataclass(frozen=True)
class Case:
    """A training; see `simgpu.scenarios.Scenario`.

    Args:
        ids: what batches are like: see `ids_of`.
        micro: backward passes of a step, of which the last one synchronizes.
    """

    name: str
    kind: str = ""
    nccl: bool = True
    ddp: dict[str, Any] | None = field(default_factory=dict)
    scheme: str = "zen"
    world_size: int = 2
    steps: int = 4
    ids: str = "usual"
    micro: int = 1


def ids_of(case: Case, rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    size = 5 + 7 * step + rank
    if (case.ids == "none on a rank" and rank == 1) or (case.ids == "none in a step" and step == 1):
        size = 0
    if case.ids == "shrinking":
        size = (900, 10, 900, 3, 2500, 2)[step % 6]
    if case.ids == "all":
        return torch.randperm(ROWS, generator=generator)
    ids = torch.randint(0, 10_000, (size,), generator=generator)
    return torch.cat([torch.full((5000,), 7), ids]) if case.ids == "hot" else ids


VIEWS = {"gradient_as_bucket_view": True}
CASES = {
    case.name: case
    for case in (
        Case("lookups, nccl plain", "thrice", ddp=None),
        Case("tied output", "tied"),
        Case("two widths and dtypes", "widths"),
        Case("bag, sparse", "bag sparse"),
        Case("bag, dense, gloo", "bag", nccl=False),
        Case("no ids on a rank", ids="none on a rank"),
        Case("no ids on a rank, sparse", "sparse", ids="none on a rank"),
        Case("no ids in a step", ids="none in a step"),
        Case("no ids in a step, sparse, gloo", "sparse", nccl=False, ids="none in a step"),
        Case("accumulation", micro=3),
        Case("accumulation, sparse", "sparse", micro=3),
        Case("hot id, sparse", "sparse", ids="hot"),
        Case("static graph and views", ddp={**VIEWS, "static_graph": True}),
        Case("checkpointed lookup", "checkpoint"),
        Case("half table", "half"),
        Case("grows and shrinks, auto", ids="shrinking", scheme="auto", steps=10),
        Case("all rows, auto", ids="all", scheme="auto", steps=10),
        Case("infinite gradients", "infinite"),
        Case("views and sparse, agsparse", "sparse", scheme="agsparse", ddp=VIEWS),
        Case("three ranks, sparse", "sparse", world_size=3),
    )
}


def run_cases(context: RankContext, names: Sequence[str]) -> list[Report]:
    return [_run(context, CASES[name]) for name in names]


def _run(context: RankContext, case: Case) -> Report:
    with simulated(own=(context.rank,), nccl=case.nccl) as world:
        report = Report(world.races, world.errors)
        torch.cuda.set_device(context.rank)
        try:
            for step, (names, means, right) in enumerate(_train(context, case, report, world)):
                report.wrong += _wrong(step, names, means, right)
        except Exception as error:
            report.errors.append(f"{type(error).__name__}: {error}")
            report.trace = traceback.format_exc()
        _finish(report, world)
    return report


def _train(
    context: RankContext, case: Case, report: Report, world: World
) -> Iterator[tuple[list[str], list[Tensor | None], list[Tensor]]]:
    model, twin = (_make(case.kind) for _ in range(2))
    device = torch.device("cuda", context.rank)
    model = model.to(device)
    wrapped = model if case.ddp is None else DistributedDataParallel(model, **case.ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = thinwire.attach(wrapped, case.scheme)
    names = [name for name, _ in model.named_parameters()]
    try:
        for step in range(case.steps):
            with world.blind():
                right = _expected(case, step, twin, model)
            before = world.waits.copy()
            optimizer.zero_grad()
            for micro in range(case.micro):
                ids = ids_of(case, context.rank, step, micro).pin_memory().to(device, non_blocking=True)
                with sync.no_sync() if micro + 1 < case.micro else nullcontext():
                    (wrapped(ids).square().sum() / 10).backward()
            means = [None if entry.grad is None else entry.grad.clone() for entry in model.parameters()]
            optimizer.step()
            waits = (world.waits - before).items()
            ours = [count for (thread, what, at), count in waits if thread == "main" and is_ours(f"{what} at {at}")]
            report.num_waits.append(sum(ours))
            yield names, means, right
            del means
    finally:
        sync.detach()


def _make(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(kind)


def _expected(case: Case, step: int, twin: Net, model: Net) -> list[Tensor]:
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.data.copy_(peek(theirs))
    sums = [torch.zeros(entry.shape, dtype=torch.float64) for entry in twin.parameters()]
    for rank in range(case.world_size):
        twin.zero_grad()
        for micro in range(case.micro):
            (twin(ids_of(case, rank, step, micro)).square().sum() / 10).backward()
        for total, entry in zip(sums, twin.parameters(), strict=True):
            if entry.grad is not None:
                total += entry.grad.to_dense() if entry.grad.is_sparse else entry.grad
    return [total / case.world_size for total in sums]


def _wrong(step: int, names: list[str], means: list[Tensor | None], right: list[Tensor]) -> Iterator[str]:
    for name, mean, exact in zip(names, means, right, strict=True):
        tolerance = 3e-2 if mean is not None and mean.element_size() == 2 else 1e-5
        mine = torch.zeros_like(exact) if mean is None else peek(mean).double()
        if not torch.allclose(mine, exact, rtol=tolerance, atol=tolerance, equal_nan=True):
            yield f"WRONG MEAN of {name} in step {step}: off by {float((mine - exact).abs().max()):.1e}"
