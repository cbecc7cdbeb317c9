"""Whole steps of `thinwire.attach` on simulated devices, on real ranks over Gloo."""

from __future__ import annotations

import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from simgpu import device as simulated_device
from simgpu.device import World, current
from simgpu.engine import keep
from simgpu.torch_semantics import peek, simulated
from thinwire.checkpoint.copier import Copier, SlotStaging, Target
from thinwire.checkpoint.cycle import Cycle, Worker
from thinwire.checkpoint.state.encode import StateEncoder
from thinwire.checkpoint.state.layout import TensorSlice, view_of
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.comm.cuda.device import CudaDevice
from thinwire.comm.cuda.staging import DeviceStaging
from thinwire.comm.process_group import Handover
from thinwire.compress.base import Parameter
from thinwire.lab.testbed.launch import RankContext
from thinwire.outer.recipe import OuterRecipe, diloco, local_sgd
from thinwire.plan.plan import Group, Plan, fingerprint

WIDTH = 16


class Model(nn.Module):
    """Tables and layers; a batch of ids of any length uses them all."""

    def __init__(
        self, tables: tuple[int, ...], layers: tuple[int, ...], sparse: bool, bias: bool, lookups: int = 1,
        has_towers: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.lookups, self.has_towers = lookups, has_towers
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH, sparse=sparse) for rows in tables)
        sizes = (WIDTH, *layers)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=bias) for pair in itertools.pairwise(sizes))

    def forward(self, ids: Tensor, skips: bool = False) -> Tensor:
        found = 0.01 * ids[:, None].expand(len(ids), WIDTH)
        for table in list(self.tables)[: len(self.tables) - skips or None]:
            rows = partial(self._rows, table, ids)
            for lookup in range(self.lookups):
                found = found + (rows(lookup) if lookup % 2 or not self.has_towers else self._beside(rows, lookup))
        for layer in list(self.layers)[: len(self.layers) - skips or None]:
            found = torch.tanh(layer(found.to(layer.weight.dtype)))
        return found

    @staticmethod
    def _rows(table: nn.Embedding, ids: Tensor, lookup: int) -> Tensor:
        return table((7 * lookup + ids) % table.num_embeddings)

    def _beside(self, rows: Callable[[int], Tensor], lookup: int) -> Tensor:
        """Look up on another stream, as the second of two towers."""
        if not next(self.parameters()).is_cuda:
            return rows(lookup)
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            found = rows(lookup)
        main.wait_stream(side)
        found.record_stream(main)
        return found


@dataclass(frozen=True)
class Scenario:
    """A training on simulated devices; all of it can be pickled, because ranks are processes.

    Args:
        tables: rows of each table.
        layers: outputs of each linear layer.
        compress: a compressor of `thinwire.compress` and its argument.
        plan: how many groups a plan has; None for none.
        nccl: whether the model's group has NCCL.
        optional: whether the last layer and table are left out by rank 0 in odd steps.
        ddp: arguments of DDP; None for a plain module.
        devices: the device of each rank.
        hosts: the host of each rank; None: all are on one.
        dense: how dense gradients are summed; None: as other fields say.
        is_exact: whether means are those of the gradients; else they are compared with those of thinwire on the host.
        batch: ids in a batch, in the first step, and how many more in each further one and on each further rank.
        batches: ids in a batch of each step, in place of that.
        lookups: how often a forward looks up each table.
        has_towers: whether every other lookup is on another stream.
        is_on_side: whether all of each step is on another stream than the model was wrapped on.
        outer: a recipe of `thinwire.outer`; then parameters after each step are compared in place of means.
        arena: capacities of the lane's pinned memory: first, limit and chunk bytes.
        mesh: replicas and shards of FSDP2, which may be one number, of shards; () without it.
        is_ignored: whether FSDP2 leaves tables out.
    """

    name: str
    tables: tuple[int, ...] = (600,)
    layers: tuple[int, ...] = (40, 7)
    sparse: bool = False
    bias: bool = True
    scheme: str = "zen"
    compress: tuple[str, float] | None = None
    dense: str | None = None
    plan: int | None = None
    nccl: bool = False
    optional: bool = False
    ddp: dict[str, Any] | None = None
    devices: tuple[int, ...] = (0, 1)
    hosts: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    steps: int = 4
    batch: tuple[int, int, int] = (3, 7, 1)
    batches: tuple[int, ...] = ()
    lookups: int = 1
    has_towers: bool = False
    is_on_side: bool = False
    is_exact: bool = True
    outer: OuterRecipe | None = None
    arena: tuple[int, int, int] | None = None
    mesh: tuple[int, ...] = ()
    is_ignored: bool = False

    def size(self, rank: int, step: int) -> int:
        first, later, others = self.batch
        if self.batches:
            return self.batches[step % len(self.batches)] + others * rank
        return max(1, first + later * step + others * rank)

    def skips(self, rank: int, step: int) -> bool:
        return self.optional and rank == 0 and step % 2 == 1


@dataclass
class Report:
    """What one rank saw.

    Args:
        wrong: parameters whose mean was wrong, with the step.
        waits: how often the training's thread waited for the device, by what and where, in the last step.
        num_waits: how often it did so in each step, in lines of thinwire other than of reference kernels.
        midway: waits inside of backward, and not at its end, after the first two steps.
        lane_waits: the same of all other threads.
        launches: operations on each stream in the last step.
        pinned: how often the lane allocated pinned memory in each step.
        reused: how often memory was handed out again.
        intruders: work of other threads on the stream of training, and copies for which a thread waits.
        trace: where an exception came from.
    """

    races: list[str]
    errors: list[str]
    wrong: list[str] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    num_waits: list[int] = field(default_factory=list)
    midway: list[str] = field(default_factory=list)
    lane_waits: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    pinned: list[int] = field(default_factory=list)
    reused: int = 0
    intruders: list[str] = field(default_factory=list)
    trace: str = ""

    @property
    def found(self) -> list[str]:
        """All that must not be."""
        return [*self.races, *self.errors, *self.wrong, *self.intruders, *self.midway]


def run(context: RankContext, names: list[str]) -> list[Report]:
    """Run scenarios one after the other; an exception of one is in its report."""
    return [run_one(context, SCENARIOS[name]) for name in names]


def run_one(context: RankContext, scenario: Scenario) -> Report:
    """Train a few steps on this rank's device."""
    index = scenario.devices[context.rank]
    os.environ["THINWIRE_HOST"] = "here" if scenario.hosts is None else str(scenario.hosts[context.rank])
    on_host = iter(()) if scenario.is_exact else _train(context, scenario, torch.device("cpu"))
    expected = [[whole(mean) for mean in means if mean is not None] for _, means, _ in on_host]
    with simulated(own=(index,), nccl=scenario.nccl) as world:
        report = Report(world.races, world.errors)
        torch.cuda.set_device(index)
        try:
            training = _train(context, scenario, torch.device("cuda", index), report, world)
            for step, (names, means, right) in enumerate(training):
                right = right if scenario.is_exact else expected[step]
                report.wrong += _wrong(step, names, means, right, scenario.dtype)
        except Exception as error:
            report.errors.append(f"{type(error).__name__}: {error}")
            report.trace = traceback.format_exc()
        _finish(report, world)
    return report


def _finish(report: Report, world: World) -> None:
    torch.cuda.synchronize()
    report.reused = world.reused
    for (thread, stream, what), count in world.launches.items():
        if thread != "main" and stream.endswith(" default") and "nccl" not in stream:
            report.intruders.append(f"{count} times {what} of {thread} on the stream of training")
    for (thread, what, where), count in world.waits.items():
        if what in ("blocking copy", "pageable copy") and where.startswith(("comm/cuda/", "checkpoint/")):
            report.intruders.append(f"{count} times a {what} of {thread} at {where}")


Step = tuple[list[str], list[Tensor | None], list[Tensor]]
"""Names of parameters, their means, and what these must be."""


def _train(
    context: RankContext,
    scenario: Scenario,
    device: torch.device,
    report: Report | None = None,
    world: World | None = None,
) -> Iterator[Step]:
    model, twin = (_make(scenario) for _ in range(2))
    model = model.to(device)
    wrapped = model if scenario.ddp is None else DistributedDataParallel(model, **scenario.ddp)
    if scenario.mesh:
        _shard(model, scenario, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False if scenario.is_ignored else None)
    options = scenario.scheme, _dense(scenario, model)
    sync: Any
    if scenario.outer is None:
        sync = thinwire.attach(wrapped, *options)
    else:
        sync = thinwire.outer.attach(wrapped, optimizer, scenario.outer, *options)
    if scenario.arena is not None and device.type == "cuda":
        _shrink(sync, scenario.arena)
    names = [name for name, _ in model.named_parameters()]
    kept = [] if world is None or scenario.ddp is None else keep(model.parameters(), world.stream())
    side = torch.cuda.Stream() if scenario.is_on_side and world is not None else None
    try:
        for step in range(scenario.steps):
            with nullcontext() if world is None else world.blind():
                batches = [_batch(scenario, rank, step) for rank in range(context.world_size)]
                expected = _expected(scenario, step, twin, model, batches) if scenario.is_exact else []
            before = None if world is None else (world.waits.copy(), world.launches.copy(), world.pinned.copy())
            midway = Counter[str]() if world is None else world.waits_midway.copy()
            with nullcontext() if side is None else torch.cuda.stream(side):
                if side is not None and step == 0:
                    side.wait_stream(torch.cuda.default_stream())
                optimizer.zero_grad()
                ids = batches[context.rank]
                if device.type == "cuda":
                    ids = ids.pin_memory().to(device, non_blocking=True)
                wrapped(ids, scenario.skips(context.rank, step)).square().mean().backward()
                means = [None if entry.grad is None else entry.grad.clone() for entry in model.parameters()]
                if world is not None and scenario.mesh and step > 1:
                    report.midway += [
                        f"WAIT in backward: {wait}" for wait in world.waits_midway - midway if is_ours(wait)
                    ]
                optimizer.step()
                means = means if scenario.outer is None else [entry.detach().clone() for entry in model.parameters()]
            if report is not None and world is not None and before is not None:
                _note(report, world.waits - before[0], world.launches - before[1])
                made = world.pinned - before[2]
                report.pinned.append(sum(made[where] for where in made if where.startswith("comm/cuda/")))
            yield names, means, expected
            del means
        if report is not None:
            _count(report, scenario, sync.stats())
    finally:
        del kept
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        sync.detach()


def _count(report: Report, scenario: Scenario, stats: Mapping[str, float]) -> None:
    """Check the counts of a training that is over: pinned memory is made once, and has room for what is copied."""
    overflow = stats.get("cuda/overflow_rounds", 0.0)
    if scenario.arena != TINY and overflow:
        report.wrong.append(f"WRONG COUNT: {overflow:.0f} copies did not fit into pinned memory")
    if len(report.pinned) > 2 and all(report.pinned[2:]):
        report.wrong.append(f"WRONG COUNT: pinned memory is allocated in each step: {report.pinned}")


def _batch(scenario: Scenario, rank: int, step: int) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 10_000, (scenario.size(rank, step),), generator=data)


def _dense(scenario: Scenario, model: nn.Module) -> Any:
    if scenario.dense is not None:
        return scenario.dense
    if scenario.compress is not None:
        name, argument = scenario.compress
        return getattr(thinwire.compress, name)(argument)
    if scenario.plan is not None:
        tables = {name for name, _ in model.named_parameters() if name.startswith("tables")}
        named = {name: entry for name, entry in model.named_parameters() if name not in tables}
        order, size = list(named)[::-1], -(-len(named) // scenario.plan)
        groups = [tuple(order[start : start + size]) for start in range(0, len(order), size)]
        made = tuple(
            Group(group, sum(named[name].nbytes for name in group), "top_k:density=0.3" if place else None, "auto")
            for place, group in enumerate(groups)
        )
        parameters = [Parameter(name, tuple(entry.shape)) for name, entry in named.items()]
        return Plan(
            world_size=2, fingerprint=fingerprint(parameters), predicted_seconds=1.0, dense_seconds=2.0, groups=made
        )
    return "native" if scenario.outer is not None else "auto"


def _make(scenario: Scenario) -> nn.Module:
    torch.manual_seed(0)
    model = Model(
        scenario.tables, scenario.layers, scenario.sparse, scenario.bias, scenario.lookups, scenario.has_towers
    )
    return model.to(scenario.dtype)


def _shard(model: nn.Module, scenario: Scenario, device: torch.device) -> None:
    """Call `fully_shard` on each layer and on the model."""
    names = ("replicate", "shard")[-len(scenario.mesh) :]
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, scenario.mesh, mesh_dim_names=names)}
    if scenario.is_ignored:
        options["ignored_params"] = thinwire.embedding_tables(model)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)  # type: ignore[arg-type]
    fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    """A copy on the host, unseen by the simulation; of a DTensor all parts of all ranks."""
    if simulated_device._current is None:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not isinstance(tensor, DTensor):
        return peek(tensor)
    parts: list[Any] = [None] * tensor.device_mesh.shape[-1]
    mine = peek(tensor._local_tensor)
    with current().blind():
        dist.all_gather_object(parts, mine, tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1))
        return torch.cat(parts)


def _shrink(sync: Any, arena: tuple[int, int, int]) -> None:
    from thinwire.comm.cuda.arena import Arena

    staging, (first, limit, chunk) = sync._staging, arena
    staging._arena = Arena(staging._device.pinned, first, limit)
    staging._chunk_bytes = chunk


def _expected(
    scenario: Scenario, step: int, twin: nn.Module, model: nn.Module, batches: Sequence[Tensor]
) -> list[Tensor]:
    """The mean gradients of all ranks, in float64, from a twin of the model on the host."""
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.data.copy_(whole(theirs))
    sums = [torch.zeros(entry.shape, dtype=torch.float64) for entry in twin.parameters()]
    for rank, batch in enumerate(batches):
        twin.zero_grad()
        twin(batch, scenario.skips(rank, step)).square().mean().backward()
        for total, entry in zip(sums, twin.parameters(), strict=True):
            if entry.grad is not None:
                total += entry.grad.to_dense() if entry.grad.is_sparse else entry.grad
    return [total / len(batches) for total in sums]


def _wrong(
    step: int, names: list[str], means: list[Tensor | None], expected: list[Tensor], dtype: torch.dtype
) -> Iterator[str]:
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 2e-2)
    for name, mean, exact in zip(names, means, expected, strict=True):
        right = (exact.to_dense() if exact.is_sparse else exact).double()
        got = torch.zeros_like(right) if mean is None else whole(mean)
        largest = float(right.abs().max()) if right.numel() else 0.0  # a row of a large batch has a small gradient
        if not torch.allclose(got.double(), right, rtol=tolerance, atol=tolerance * largest):
            yield f"WRONG MEAN of {name} in step {step}: off by {float((got.double() - right).abs().max()):.1e}"


def is_ours(wait: str) -> bool:
    """Whether a wait is thinwire's, and not one of DDP, or of a reference kernel that has none in Triton."""
    return " at kernels/" not in wait and "scenarios.py" not in wait


def _note(report: Report, waits: Counter[Any], launches: Counter[Any]) -> None:
    report.waits, report.lane_waits, report.launches = {}, {}, {}
    for (thread, what, where), count in waits.items():
        into = report.waits if thread == "main" else report.lane_waits
        into[f"{what} at {where}"] = into.get(f"{what} at {where}", 0) + count
    ours = [count for wait, count in report.waits.items() if is_ours(wait)]
    report.num_waits.append(sum(ours))
    for (_, stream, _), count in launches.items():
        report.launches[stream] = report.launches.get(stream, 0) + count


LOCAL_SGD, STREAMING = local_sgd(every=2), diloco(every=4, fragments=2, delay=1, mix=0.5)
TINY, TIGHT = (1024, 4096, 512), (1 << 13, 1 << 13, 512)
"""Pinned memory that has no room for a job, and that has room for one, if it is taken back after each."""
OF_THE_HOST = "column_split"
"""A scheme that the collectives of a group do not run."""
TWO_HOSTS: dict[str, Any] = {"devices": (0, 1, 2, 3), "hosts": (0, 0, 1, 1)}
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("plain, layers", tables=()),
        Scenario("plain, tables and layers", tables=(600, 300, 5)),
        Scenario("plain, tables alone", layers=()),
        Scenario("plain, sparse", tables=(600, 50), sparse=True),
        Scenario("plain, compressed alone", (), (64,), bias=False, compress=("top_k", 0.3), is_exact=False),
        Scenario("plain, compressed and exact", layers=(64, 7), compress=("top_k", 0.3), is_exact=False),
        Scenario("plain, planned", layers=(64, 64, 7), plan=3, is_exact=False),
        Scenario("plain, unused on a rank", tables=(600, 400), optional=True),
        Scenario("plain, half", dtype=torch.bfloat16),
        Scenario("plain, one device", devices=(0, 0)),
        Scenario("plain, overflow", tables=(3000,), batch=(30, 40, 1), arena=TINY),
        Scenario("plain, tight", layers=(), arena=TIGHT),
        Scenario("plain, dense", scheme="dense"),
        Scenario("ddp, layers", tables=(), ddp={}),
        Scenario("ddp, tables and layers", tables=(600, 300), ddp={}),
        Scenario("ddp, tables alone", tables=(600, 300), layers=(), ddp={}),
        Scenario("ddp, sparse", tables=(600, 50, 40), sparse=True, ddp={}),
        Scenario("ddp, auto", scheme="auto", steps=6, ddp={}),
        Scenario("ddp, dense", scheme="dense", ddp={}),
        Scenario("ddp, agsparse", scheme="agsparse", ddp={"gradient_as_bucket_view": True}),
        Scenario("ddp, compressed", layers=(64, 7), compress=("top_k", 0.3), ddp={}, is_exact=False),
        Scenario("ddp, small buckets", layers=(40, 40, 40), ddp={"bucket_cap_mb": 0.002}, arena=TINY),
        Scenario("ddp, lossless", layers=(640, 7), dense="lossless", ddp={}),
        Scenario("nccl, lossless", layers=(640, 7), dense="lossless", ddp={}, nccl=True),
        Scenario("ddp, priced", (), (640, 7), dense="auto", ddp={}, nccl=True, hosts=(0, 1), steps=8),
        Scenario("plain, lossless", layers=(640, 7), dense="lossless"),
        Scenario("ddp, static graph", ddp={"static_graph": True}),
        Scenario("ddp, unused", tables=(600, 400), optional=True, ddp={"find_unused_parameters": True}),
        Scenario("nccl, layers", tables=(), ddp={}, nccl=True),
        Scenario("nccl, tables and layers", ddp={}, nccl=True),
        Scenario("nccl, small buckets", layers=(40, 40, 40), ddp={"bucket_cap_mb": 0.002}, nccl=True),
        Scenario("nccl, sparse", tables=(600, 50), sparse=True, ddp={}, nccl=True),
        Scenario("nccl, plain", nccl=True),
        Scenario("nccl, over the lane", scheme=OF_THE_HOST, ddp={}, nccl=True),
        Scenario("nccl, two levels", (600, 300), scheme="two_level:zen", ddp={}, nccl=True, **TWO_HOSTS),
        Scenario(
            "nccl, two levels, sparse", (600, 50), sparse=True, scheme="two_level:agsparse", nccl=True, **TWO_HOSTS
        ),
        Scenario("nccl, tables alone", tables=(600, 300), layers=(), nccl=True),
        Scenario("nccl, growing", tables=(600, 300), batch=(2, 60, 1), steps=6, ddp={}, nccl=True),
        Scenario("nccl, grows and shrinks", (3000,), batches=(900, 10, 900, 3, 2500, 2), steps=6, ddp={}, nccl=True),
        Scenario("nccl, lookups", lookups=3, ddp={}, nccl=True),
        Scenario("plain, lookups", (600, 300), lookups=3),
        Scenario("plain, towers", (600, 300), lookups=2, has_towers=True),
        Scenario("nccl, towers", (600, 300), lookups=3, has_towers=True, ddp={}, nccl=True),
        Scenario("plain, on a side stream", (600, 300), is_on_side=True),
        Scenario("ddp, on a side stream", (600, 300), ddp={}, is_on_side=True),
        Scenario("nccl, on a side stream", (600, 300), ddp={}, nccl=True, is_on_side=True),
        Scenario("nccl, unused", tables=(600, 400), optional=True, steps=6, nccl=True),
        Scenario("nccl, half", dtype=torch.bfloat16, ddp={}, nccl=True),
        Scenario("nccl, agsparse", scheme="agsparse", ddp={"gradient_as_bucket_view": True}, nccl=True),
        Scenario("nccl, dense", tables=(600, 50), sparse=True, scheme="dense", ddp={}, nccl=True),
        Scenario("nccl, auto", scheme="auto", steps=12, ddp={}, nccl=True),
        Scenario("outer, local", (600, 50), (64, 7), outer=LOCAL_SGD, steps=5, is_exact=False),
        Scenario(
            "outer, streaming",
            layers=(64, 7),
            sparse=True,
            compress=("top_k", 0.3),
            outer=STREAMING,
            steps=9,
            arena=TINY,
            is_exact=False,
        ),
        Scenario("outer, half", outer=STREAMING, dtype=torch.bfloat16, nccl=True, steps=6, is_exact=False),
        Scenario("nccl, compressed", layers=(64, 7), compress=("top_k", 0.3), ddp={}, nccl=True, is_exact=False),
        Scenario("fsdp, shards", (3000, 600), mesh=(2,), nccl=True, lookups=2),
        Scenario("fsdp, compressed", (), (64, 64, 64), mesh=(2,), nccl=True, compress=("top_k", 0.3), is_exact=False),
        Scenario(
            "fsdp, compressed whole", (), (64, 7), mesh=(2, 1), nccl=True, compress=("top_k", 0.3), is_exact=False
        ),
        Scenario("fsdp, lossless", (), (640, 7), mesh=(2,), nccl=True, dense="lossless"),
        Scenario("fsdp, ignored", (600, 300), mesh=(2,), nccl=True, is_ignored=True),
        Scenario("fsdp, whole", (600, 300), mesh=(2, 1), nccl=True),
        Scenario("fsdp, replicas", (6000, 2500), mesh=(2, 2), nccl=True, **{**TWO_HOSTS, "hosts": None}),
    )
}


def two_models(context: RankContext, nccl: bool, ddp: bool) -> Report:
    """Two models in turn, with accumulation; one of them is detached, and attached with another scheme."""
    with simulated(own=(context.rank,), nccl=nccl) as world:
        report = Report(world.races, world.errors)
        torch.cuda.set_device(context.rank)
        target = torch.device("cuda", context.rank)
        models = [_make(SCENARIOS["plain, tables and layers"]).to(target) for _ in range(2)]
        wrapped = [DistributedDataParallel(model) if ddp else model for model in models]
        syncs = [thinwire.attach(model, "zen") for model in wrapped]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

        def backward(model: nn.Module, step: int) -> None:
            ids = _batch(SCENARIOS["plain, tables and layers"], context.rank, step)
            model(ids.pin_memory().to(target, non_blocking=True)).square().mean().backward()

        for step in range(5):
            if step == 3:
                syncs[0].detach()
                syncs[0] = thinwire.attach(wrapped[0], "agsparse")
            for model, sync, optimizer in zip(wrapped, syncs, optimizers, strict=True):
                optimizer.zero_grad()
                with sync.no_sync():
                    backward(model, step)
                backward(model, step + 1)
                optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            if not torch.allclose(peek(one), peek(other), atol=1e-5):
                report.wrong.append("WRONG PARAMETERS: those of the two models differ")
        for sync in syncs:
            sync.detach()
        _finish(report, world)
    return report


# --- scenarios of one process


def staging_alone() -> Report:
    """Jobs of a lane that read a gradient, which nobody else keeps, and jobs that only write."""
    with simulated(own=(1,)) as world:
        report = Report(world.races, world.errors)
        torch.cuda.set_device(1)
        target = torch.device("cuda", 1)
        staging = DeviceStaging(CudaDevice(target), 1 << 12, 1 << 12, 512)
        lane = Worker("lane")

        def job(handover: Handover) -> list[Tensor]:
            with staging.taking(handover):
                gradients = [one._values() if one.is_sparse else one for one in handover.tensors]
                hosts = staging.to_host(*gradients)
                made = staging.to_device(*(host * 2 for host in hosts))
                for gradient, mean in zip(gradients, made, strict=True):
                    gradient.copy_(mean)
            return made

        def uploads(handover: Handover, value: float) -> list[Tensor]:
            with staging.taking(handover):
                return staging.to_device(torch.full((200,), value))

        for step in range(5):
            gradient = torch.full((100 + 20 * step,), float(step), device=target)
            if step % 2:
                ids = torch.arange(len(gradient), device=target)[None]
                gradient = torch.sparse_coo_tensor(ids, gradient, gradient.shape, check_invariants=False)
                del ids
            done = lane.submit(partial(job, staging.hand_over([gradient])))
            del gradient
            again = torch.full((100 + 20 * step,), -1.0, device=target)
            (mean,) = done.result()
            del done
            made = [lane.submit(partial(uploads, staging.hand_over([]), float(value))) for value in range(3)]
            found = [one.result()[0] for one in made]
            torch.cuda.synchronize()
            for got, right in zip([mean, again, *found], [2.0 * step, -1.0, 0.0, 1.0, 2.0], strict=True):
                if not bool((peek(got) == right).all()):
                    report.wrong.append(f"WRONG BITS: {peek(got)[:3].tolist()} and not {right} in step {step}")
        lane.close(5)
        _finish(report, world)
    return report


def copy_of_a_state() -> Report:
    """Checkpoints of a training on a device: copied beside the next backward, and before the next optimizer step."""
    with simulated(own=(1,)) as world:
        report = Report(world.races, world.errors)
        torch.cuda.set_device(1)
        target = torch.device("cuda", 1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(160, 120), nn.BatchNorm1d(120), nn.Linear(120, 3)).to(target)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training, encoder = TrainingState(model, optimizer), StateEncoder()
        copier = Copier(training.is_stepped, lambda device: SlotStaging(CudaDevice(device), 1 << 14, 2))
        cycle: Any = SimpleNamespace(step=0, _copying=None, _coding=None, records=MagicMock(), _notices=MagicMock())
        optimizer.register_step_pre_hook(lambda *_: Cycle.settle(cycle))
        worker, slots = Worker("checkpoint"), [bytearray(1 << 19) for _ in range(2)]
        checks: list[Callable[[], None]] = []

        def check(step: int, layout: list[TensorSlice], expected: list[Tensor], payload: memoryview) -> None:
            for place, right in zip(layout, expected, strict=True):
                if right.is_floating_point() and not torch.equal(view_of(payload, place), right):
                    report.wrong.append(f"WRONG BITS of {place.path} in the checkpoint of step {step}")

        for step in range(5):
            data = torch.randn(8, 160).pin_memory().to(target, non_blocking=True)
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            with world.blind():
                for each in checks:
                    each()
            encoded, payload = encoder.encode(training.capture(step)), memoryview(slots[step % 2])
            with world.blind():
                expected = [peek(tensor) for tensor in encoded.tensors]
            copy = copier.begin(encoded, Target(payload))
            cycle._copying = worker.submit(
                lambda copy=copy, step=step: (step, 0.0, "" if copy.finish() else "it was written to")
            )
            checks = [partial(check, step, list(encoded.slices), expected, payload)]
            model(data)  # changes the statistics of the batch norm
        Cycle.settle(cycle)
        worker.close(5)
        _finish(report, world)
    return report
