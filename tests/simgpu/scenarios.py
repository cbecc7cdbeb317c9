"""Whole steps of `thinwire.attach` on simulated devices, on real ranks over Gloo."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from simgpu.device import World
from simgpu.torch_semantics import peek, simulated
from thinwire.lab.testbed.launch import RankContext

WIDTH = 16
WARM_STEPS = 2
"""Steps before those whose waits are counted: buckets are formed anew, schemes tried, the order agreed on."""


class Model(nn.Module):
    """Tables and layers; a batch of ids of any length uses them all."""

    def __init__(self, tables: tuple[int, ...], layers: tuple[int, ...], sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH, sparse=sparse) for rows in tables)
        sizes = (WIDTH, *layers)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, ids: Tensor) -> Tensor:
        found = 0.01 * ids[:, None].expand(len(ids), WIDTH)
        for table in self.tables:
            found = found + table(ids % table.num_embeddings)
        for layer in self.layers:
            found = torch.tanh(layer(found.to(layer.weight.dtype)))
        return found


@dataclass(frozen=True)
class Scenario:
    """A training on simulated devices; all of it can be pickled, because ranks are processes.

    Args:
        tables: rows of each table.
        layers: outputs of each linear layer.
        options: further arguments of `thinwire.attach`.
        ddp: arguments of DDP; None for a plain module.
        devices: the device of each rank.
        is_exact: whether means are those of the gradients, and not of compressed ones.
        batch: ids in a batch, in the first step, and how many more in each further one and on each further rank.
        arena: capacities of the lane's pinned memory: first, limit, bounce and chunk bytes.
    """

    name: str
    tables: tuple[int, ...] = (600,)
    layers: tuple[int, ...] = (40, 7)
    sparse: bool = False
    scheme: str = "zen"
    options: tuple[tuple[str, Any], ...] = ()
    ddp: dict[str, Any] | None = None
    devices: tuple[int, ...] = (0, 1)
    dtype: torch.dtype = torch.float32
    steps: int = 4
    batch: tuple[int, int, int] = (3, 7, 1)
    is_exact: bool = True
    arena: tuple[int, int, int, int] | None = None

    def size(self, rank: int, step: int) -> int:
        first, later, others = self.batch
        return max(1, first + later * step + others * rank)


@dataclass
class Report:
    """What one rank saw.

    Args:
        wrong: parameters whose mean was wrong, with the step.
        waits: how often the training's thread waited for the device, by what and where, in the last step.
        lane_waits: the same of all other threads.
        launches: operations on each stream in the last step.
    """

    races: list[str]
    errors: list[str]
    wrong: list[str] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    lane_waits: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    reused: int = 0

    @property
    def contexts(self) -> list[str]:
        """Uses of devices of other ranks."""
        return [error for error in self.errors if error.startswith("a context on")]

    @property
    def found(self) -> list[str]:
        """All that must not be."""
        return [*self.races, *(error for error in self.errors if error not in self.contexts), *self.wrong]


def run(context: RankContext, names: list[str]) -> list[Report]:
    """Run scenarios one after the other; an exception of one is in its report."""
    return [run_one(context, SCENARIOS[name]) for name in names]


def run_one(context: RankContext, scenario: Scenario) -> Report:
    """Train a few steps on this rank's device."""
    device = scenario.devices[context.rank]
    with simulated(own=(device,)) as world:
        report = Report(world.races, world.errors)
        torch.cuda.set_device(device)
        try:
            _train(context, scenario, world, torch.device("cuda", device), report)
        except Exception as error:
            report.errors.append(f"{type(error).__name__}: {error}")
    return report


def _train(context: RankContext, scenario: Scenario, world: World, device: torch.device, report: Report) -> None:
    model, twin = (_make(scenario) for _ in range(2))
    model = model.to(device)
    wrapped = model if scenario.ddp is None else DistributedDataParallel(model, **scenario.ddp)
    sync = thinwire.attach(wrapped, scenario.scheme, **dict(scenario.options))
    if scenario.arena is not None:
        _shrink(sync, scenario.arena)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(scenario.steps):
            with world.blind():
                batches = [_batch(scenario, rank, step) for rank in range(context.world_size)]
                expected = _expected(twin, model, batches)
            waits, launches = world.waits.copy(), world.launches.copy()
            optimizer.zero_grad()
            ids = batches[context.rank].pin_memory().to(device, non_blocking=True)
            wrapped(ids).square().mean().backward()
            means = [None if entry.grad is None else entry.grad.clone() for entry in model.parameters()]
            optimizer.step()
            _note(report, world.waits - waits, world.launches - launches)
            if scenario.is_exact:
                names = [name for name, _ in model.named_parameters()]
                report.wrong += _wrong(step, names, means, expected, scenario.dtype)
            del means
    finally:
        sync.detach()
    torch.cuda.synchronize()
    report.reused = world.reused


def _batch(scenario: Scenario, rank: int, step: int) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 10_000, (scenario.size(rank, step),), generator=data)


def _make(scenario: Scenario) -> nn.Module:
    torch.manual_seed(0)
    return Model(scenario.tables, scenario.layers, scenario.sparse).to(scenario.dtype)


def _shrink(sync: Any, arena: tuple[int, int, int, int]) -> None:
    from thinwire.cuda.arena import Arena

    staging, (first, limit, bounce, chunk) = sync._staging, arena
    staging._arena = Arena(staging._device.pinned, first, limit)
    staging._bounce_bytes, staging._chunk_bytes = bounce, chunk


def _expected(twin: nn.Module, model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """The mean gradients of all ranks, in float64, from a twin of the model on the host."""
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.data.copy_(peek(theirs))
    sums = [torch.zeros(entry.shape, dtype=torch.float64) for entry in twin.parameters()]
    for batch in batches:
        twin.zero_grad()
        twin(batch).square().mean().backward()
        for total, entry in zip(sums, twin.parameters(), strict=True):
            if entry.grad is not None:
                total += entry.grad.to_dense() if entry.grad.is_sparse else entry.grad
    return [total / len(batches) for total in sums]


def _wrong(
    step: int, names: list[str], means: list[Tensor | None], expected: list[Tensor], dtype: torch.dtype
) -> Iterator[str]:
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 2e-2)
    for name, mean, right in zip(names, means, expected, strict=True):
        got = torch.zeros_like(right) if mean is None else peek(mean)
        if not torch.allclose(got.double(), right, rtol=tolerance, atol=tolerance):
            yield f"WRONG MEAN of {name} in step {step}: off by {float((got.double() - right).abs().max()):.1e}"


def _note(report: Report, waits: Counter[Any], launches: Counter[Any]) -> None:
    report.waits, report.lane_waits, report.launches = {}, {}, {}
    for (thread, what, where), count in waits.items():
        into = report.waits if thread == "main" else report.lane_waits
        into[f"{what} at {where}"] = into.get(f"{what} at {where}", 0) + count
    for (stream, _), count in launches.items():
        report.launches[stream] = report.launches.get(stream, 0) + count


TINY = (1024, 4096, 512, 512)
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("plain, layers", tables=()),
        Scenario("plain, tables and layers"),
        Scenario("plain, tables alone", layers=()),
        Scenario("plain, sparse", sparse=True),
        Scenario("ddp, layers", tables=(), ddp={}),
        Scenario("ddp, tables and layers", ddp={}),
    )
}
