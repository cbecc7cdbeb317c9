"""Outer loops between hosts whose ranks train as one, by DDP or FSDP2; and of models with embedding tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.gradients.module import is_dtensor
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import OuterRecipe

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 6


class Net(nn.Module):
    """A table, layers of odd sizes, and a norm; the buffers of a batch norm differ from host to host."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(900, 16)
        self.first = nn.Linear(16, 130)
        self.norm = nn.BatchNorm1d(130) if has_buffers else nn.LayerNorm(130)
        self.last = nn.Linear(130, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(self.table(ids)))))


def batch(step: int, rank: int) -> Tensor:
    """More ids in every step, and on every rank of a host."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 900, (8 + 2 * step,), generator=drawn)


def mesh_of(hosts: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (hosts, dist.get_world_size() // hosts), mesh_dim_names=("hosts", "host"))


def inside(kind: str, mesh: DeviceMesh) -> nn.Module:
    """A model of which the ranks of a host train one."""
    torch.manual_seed(0)
    if kind == "ddp":
        return DistributedDataParallel(Net(True), process_group=mesh.get_group("host"))
    model = Net(False)  # each rank of FSDP has buffers of its own
    fully_shard(model.first, mesh=mesh["host"])
    return fully_shard(model, mesh=mesh["host"])


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, put together from shards."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    named: Any = module.named_parameters()
    return {name: (entry.full_tensor() if is_dtensor(entry) else entry).detach().clone() for name, entry in named}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(ids).square().mean() * scale).backward()
    optimizer.step()


def by_hand(has_buffers: bool, hosts: int, ranks: int, every: int) -> dict[str, Tensor]:
    """Local SGD of hosts in one process; a host takes the mean of the gradients of its ranks."""
    torch.manual_seed(0)
    models = [Net(has_buffers)]
    models += [copy.deepcopy(models[0]) for _ in range(hosts - 1)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.5) for model in models]
    for step in range(STEPS):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(ranks):
                (model(batch(step, host * ranks + rank)).square().mean() / ranks).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([entry.detach() for entry in parameters]).mean(0)
                for entry in parameters:
                    entry.detach().copy_(mean)
    return {name: entry.detach() for name, entry in models[0].named_parameters()}


def gathered(tensors: dict[str, Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    mine = torch.cat([tensor.flatten() for tensor in tensors.values()])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(all_of_them[0], other) for other in all_of_them[1:])


@dataclass(frozen=True)
class Case:
    """A training of two hosts with two ranks each.

    Args:
        bad: step in which the loss of host 1 overflows.
        inside: whether thinwire averages gradients inside of the hosts too.
        resumes: step after which all is built anew, from states.
    """

    recipe: OuterRecipe
    compress: Any = None
    bad: int | None = None
    inside: bool = False
    resumes: int | None = None


LOCAL = thinwire.outer.local_sgd(every=2)
STREAMING = thinwire.outer.diloco(every=4, fragments=2, delay=1, mix=0.5)
TOP_K = thinwire.compress.top_k(0.1)
CASES = {
    "local": Case(LOCAL),
    "streaming": Case(STREAMING, TOP_K),
    "resumed": Case(STREAMING, TOP_K, resumes=3),
    "overflow": Case(LOCAL, bad=4),
    "inside": Case(LOCAL, inside=True),
}


def train_case(context: RankContext, kind: str, mesh: DeviceMesh, case: Case) -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = inside(kind, mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        options: Any = {} if case.compress is None else {"dense": case.compress}
        group = mesh["hosts"]
        sync = thinwire.outer.attach(model, optimizer, case.recipe, "zen", process_group=group, **options)
        return model, optimizer, sync

    model, optimizer, sync = build()
    inner = thinwire.attach(model, "zen") if case.inside else None
    for step in range(STEPS):
        overflows = case.bad == step and context.rank >= 2
        step_of(model, optimizer, batch(step, context.rank), float("nan") if overflows else 1.0)
        if overflows:
            optimizer.state.clear()
        if case.resumes == step:
            states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), sync.state_dict()])
            sync.detach()
            model, optimizer, sync = build()
            for one, state in zip((model, optimizer, sync), states, strict=True):
                one.load_state_dict(state)
    before, stats = whole(model), sync.stats()
    model.eval()
    with torch.no_grad():
        model(batch(8, 0))  # FSDP keeps the outermost parameters whole after it
        with sync.global_parameters():
            anchored, output = whole(model), model(batch(9, 0))
        local = model(batch(9, 0))
        sync.synchronize()
        last = model(batch(9, 0))
    same = gathered({"output": output, "last": last, **anchored})
    found = {"before": before, "parameters": whole(model), "same": same, "stats": stats}
    found["outputs"] = [output, local, last]
    sync.detach()
    if inner is not None:
        inner.detach()
    return found


def train_hosts(context: RankContext, kind: str) -> dict[str, dict[str, Any]]:
    mesh = mesh_of()
    return {name: train_case(context, kind, mesh, case) for name, case in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_hosts_whose_ranks_train_as_one(kind: str) -> None:
    ranks = [outcome.value for outcome in run_ranks(train_hosts, kind, world_size=4)]
    for name in CASES:
        assert all(rank[name]["same"] for rank in ranks), f"all ranks have the anchors, in the case {name!r}"
        for of_host in ((0, 1), (2, 3)):
            one, other = (ranks[rank][name]["before"] for rank in of_host)
            assert all(torch.equal(one[parameter], other[parameter]) for parameter in one), "a host trains as one"
    for name, mean in by_hand(kind == "ddp", 2, 2, 2).items():
        for case in ("local", "inside"):
            torch.testing.assert_close(ranks[0][case]["parameters"][name], mean, rtol=1e-4, atol=1e-5, msg=name)
    for rank in ranks:
        for name, parameter in rank["streaming"]["before"].items():
            assert torch.equal(parameter, rank["resumed"]["before"][name]), "a resumed training has the same bits"
        assert all(torch.isfinite(one).all() for one in rank["overflow"]["parameters"].values())
        outputs = rank["streaming"]["outputs"]
        assert not any(torch.equal(one, other) for one, other in pairwise(outputs)), "none is of older parameters"
    assert {rank["overflow"]["stats"]["outer/ranks"] for rank in ranks} == {1.0}
    sent = [rank["local"]["stats"]["comm/bytes_sent"] for rank in ranks]
    numel = sum(one.numel() for one in ranks[0]["local"]["parameters"].values())
    assert sent[0] + sent[1] < 3 * 4 * numel, "a host sends its parameters once a round, and of the table some rows"
    if kind == "ddp":
        assert sent[1] == sent[3] == 0, "the first rank of a host sends for all"
    else:
        assert sent[1] == pytest.approx(sent[0], rel=0.1), "each sends its shards"


def fail(context: RankContext, kind: str) -> list[str]:
    mesh = mesh_of()
    model = inside(kind, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recipe = thinwire.outer.diloco(every=2, fragments=2, delay=1)
    sync = thinwire.outer.attach(model, optimizer, recipe, "zen", process_group=mesh["hosts"])
    found = []
    for step in range(5):
        if step == 2 and context.rank == 2:
            sync._lane.break_off("rank 2 gives up")
        try:
            step_of(model, optimizer, batch(step, context.rank))
        except thinwire.errors.ThinwireError as error:
            found.append(f"{type(error).__name__}: {error}")
    with suppress(thinwire.errors.ThinwireError):
        sync.detach()
    return found


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_round_that_fails_fails_on_all_ranks_of_a_host(kind: str) -> None:
    """Rank 2 gives up, so rank 0 loses it; ranks 1 and 3 hear of it from those that they train with."""
    ranks = [outcome.value for outcome in run_ranks(fail, kind, world_size=4)]
    firsts = [errors[0] for errors in ranks]
    assert firsts[0].startswith("LostPeerError: ")
    assert firsts[2].startswith(("LostPeerError: ", "ThinwireError: rank 2"))
    for mine, theirs in ((1, 0), (3, 2)):
        assert len(ranks[mine]) == len(ranks[theirs]), "each step fails on both, or on none"
        assert firsts[mine] == (
            f"PeerError: rank {mine}: the round of rank {theirs} failed, which trains together with this one; its own"
            " error says why"
        )


def refuse(context: RankContext) -> None:
    def refuses(match: str, build: Callable[[], nn.Module], recipe: OuterRecipe = LOCAL, group: Any = None) -> None:
        model = build()
        with pytest.raises(ValueError, match=match):
            attached(model, recipe, group)

    def attached(model: nn.Module, recipe: OuterRecipe, group: Any, **options: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return thinwire.outer.attach(model, optimizer, recipe, process_group=group, **options)

    mesh = mesh_of(1)
    hosts = mesh["hosts"]
    refuses("static_graph", lambda: DistributedDataParallel(Net(True), static_graph=True))
    averaged = inside("ddp", mesh)
    sync = thinwire.attach(averaged)
    refuses("attached to this model already, and averages gradients", lambda: averaged)
    sync.detach()
    refuses(
        r"ranks \[0, 1\] average gradients.*fully_shard\(model, mesh=mesh\['host'\]\)", lambda: inside("fsdp", mesh)
    )
    refuses("is one over the replicas", lambda: fully_shard(Net(False), mesh=mesh_of(2)), group=hosts)
    for kind in ("ddp", "fsdp"):
        alone = thinwire.outer.local_sgd(min_ranks=1)
        refuses("min_ranks= is for ranks that train alone", lambda kind=kind: inside(kind, mesh), alone, hosts)
        shadow = thinwire.outer.shadow_sync()
        refuses("shadow_sync is for ranks that train alone", lambda kind=kind: inside(kind, mesh), shadow, hosts)

    with pytest.raises(ValueError, match="take ef_sign_sgd"):  # also on the rank that sends nothing
        attached(inside("ddp", mesh), LOCAL, hosts, dense=thinwire.compress.sign_sgd())

    def ignoring() -> nn.Module:
        model = Net(False)
        return fully_shard(model, mesh=mesh["host"], ignored_params={model.table.weight})

    refuses(r"FSDP ignores parameter 'table\.weight'.* or pass exclude=", ignoring, group=hosts)
    model = ignoring()
    nn.init.constant_(model.table.weight, context.rank)
    attached(model, LOCAL, hosts, exclude="table.weight").detach()
    assert float(model.table.weight.min()) == float(model.table.weight.max()) == context.rank, "left alone"
    sync = attached(inside("fsdp", mesh), LOCAL, hosts)
    state = sync.state_dict()
    with pytest.raises(ValueError, match=f"a state of shard 7, and here is shard {context.rank}"):
        sync.load_state_dict({**state, "shard": 7})
    sync.detach()


def wrapped(kind: str, mesh: DeviceMesh) -> nn.Module:
    """A model as a trainer wraps it, for all ranks."""
    torch.manual_seed(0)
    if kind == "ddp":
        return DistributedDataParallel(Net(True))
    model = Net(False)
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_wrapped(context: RankContext, kind: str, folder: str) -> dict[str, Any]:
    """The same training of a wrapped model, of one that is laid out for an outer loop, and resumed in a round."""
    mesh = mesh_of()

    def built(is_wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = wrapped(kind, mesh) if is_wrapped else Net(True) if kind == "ddp" else inside(kind, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        group = None if is_wrapped or kind == "ddp" else mesh["hosts"]
        return model, optimizer, thinwire.outer.attach(model, optimizer, STREAMING, "zen", process_group=group)

    found: dict[str, Any] = {}
    for name in ("laid out", "wrapped", "resumed"):
        if name == "laid out":
            torch.manual_seed(0)
        model, optimizer, loop = built(name != "laid out")
        if name == "resumed":
            assert loop.gathered().load_files(folder)
        for step in range(3 if name == "resumed" else 0, STEPS):
            step_of(model, optimizer, batch(step, context.rank))
            if name == "wrapped" and step == 2:
                with loop.global_parameters():
                    loop.gathered().save_files(folder)
        found[name] = whole(model)
        loop.synchronize()
        found[f"{name}, at the end"] = whole(model)
        loop.detach()
    step_of(model, torch.optim.SGD(model.parameters(), 0.1), batch(9, context.rank))
    found["averages again"] = gathered(whole(model))
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_model_that_a_trainer_wrapped(kind: str, tmp_path: Path) -> None:
    """In DDP of all ranks, or FSDP2 with replicas; resumed with files of all ranks, and nothing else."""
    ranks = [outcome.value for outcome in run_ranks(train_wrapped, kind, str(tmp_path), world_size=4)]
    for found in ranks:
        for end in ("", ", at the end"):
            for name, parameter in found[f"laid out{end}"].items():
                assert torch.equal(parameter, found[f"wrapped{end}"][name]), name
                assert torch.equal(parameter, found[f"resumed{end}"][name]), name
        assert found["averages again"]
    assert not torch.equal(ranks[0]["wrapped"]["last.weight"], ranks[2]["wrapped"]["last.weight"])


def test_what_no_ranks_of_a_host_can_do() -> None:
    run_ranks(refuse, world_size=2)


class Words(nn.Module):
    """Tables, one of which nobody looks up, and a layer; or an output layer that shares the weight of a table."""

    def __init__(self, sparse: bool, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(3000, 16, sparse=sparse)
        self.idle = nn.Embedding(2000, 16, sparse=sparse)
        self.last = nn.Linear(16, 3000 if kind == "tied" else 4, bias=False) if kind != "tables" else nn.Identity()
        if kind == "tied":
            self.last.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.words(ids)).tanh().add(0.5)


TABLES: dict[str, tuple[bool, str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (True, "layer", lambda parameters: torch.optim.SGD(parameters, 0.5)),
    "sparse_adam": (True, "tables", lambda parameters: torch.optim.SparseAdam(list(parameters), 0.01)),
    "adagrad": (True, "layer", lambda parameters: torch.optim.Adagrad(parameters, 0.05)),
    "dense": (False, "layer", lambda parameters: torch.optim.SGD(parameters, 0.5)),
    "adamw": (False, "layer", lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)),
    "tied": (False, "tied", lambda parameters: torch.optim.SGD(parameters, 0.5)),
}


def train_tables(context: RankContext, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Three rounds of three steps, beside the same by hand; the last batch is large."""
    sparse, kind, make = TABLES[name]
    torch.manual_seed(context.rank)
    model = Words(sparse, kind).to(dtype)
    optimizer = make(model.parameters())
    sync = thinwire.outer.attach(model, optimizer, thinwire.outer.local_sgd(every=3), "column_split")
    twin = copy.deepcopy(model)
    other = make(twin.parameters())
    found: dict[str, Any] = {"off": 0.0, "bytes": [], "union": [], "dtypes": set()}
    union: set[int] = set()
    for step in range(9):
        drawn = torch.Generator().manual_seed(10 * step + context.rank)
        ids = torch.randint(0, 3000, (20 + 7 * step if step < 8 else 400,), generator=drawn)
        union |= set(ids.tolist())
        for one, of_one in ((model, optimizer), (twin, other)):
            of_one.zero_grad()
            one(ids).square().mean().backward()
            of_one.step()
        if (step + 1) % 3 == 0:
            for parameter in twin.parameters():
                mean = parameter.detach().double() / dist.get_world_size()
                dist.all_reduce(mean)
                parameter.detach().copy_(mean)
            rows = {row["name"]: row for row in sync.table()}
            found["bytes"].append([rows.get(table, {}).get("bytes", 0) for table in ("words.weight", "idle.weight")])
            found["union"].append(len(union))
            union = set()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        found["off"] = max(found["off"], *(float((a - b).detach().abs().max()) for a, b in pairs))
    found["same"] = gathered({key: entry.detach().float() for key, entry in model.named_parameters()})
    sync.detach()
    return found


def train_all_tables(context: RankContext) -> dict[str, dict[str, Any]]:
    found = {name: train_tables(context, name, torch.float64) for name in TABLES}
    return {**found, "single": train_tables(context, "dense", torch.float32)}


def test_tables_travel_as_the_rows_that_any_step_touched() -> None:
    ranks = [outcome.value for outcome in run_ranks(train_all_tables, world_size=3)]
    whole = 4 * 3000 * 16 * 8 // 3  # a ring of three
    for name in ranks[0]:
        for rank in ranks:
            found = rank[name]
            assert found["same"], name
            assert found["off"] < (2e-6 if name == "single" else 1e-12), name
            row_bytes = 16 * (4 if name == "single" else 8)
            for (words, idle), union in zip(found["bytes"], found["union"], strict=True):
                assert idle < 1000, "an idle table costs its headers"
                if name == "tied":
                    assert words == 0, "it is summed with the rest"
                elif name == "adamw":
                    assert words < 1.01 * whole + 1000
                else:
                    assert union * row_bytes < words < 3 * union * row_bytes, f"{name}: {words} bytes of {union} rows"
