"""Tables in FSDP's shards of which only rows travel: the steps of stock FSDP, in few bytes."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire.comm.connections import PrivateGroup
from thinwire.comm.groups import private_group
from thinwire.errors import LostPeerError, MismatchError
from thinwire.gradients import torch_internals as internals
from thinwire.gradients.sharded import tables
from thinwire.gradients.sharded.tables import RowShards
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.observe.step import ParameterRecords
from versions import takes_tables

pytestmark = pytest.mark.ranks
WIDTH = 36


class Network(nn.Module):
    """Tables of each kind, of which one is small; row numbers that no number of ranks divides."""

    def __init__(self, mode: str = "mean", is_checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(1009, WIDTH, padding_idx=3)
        self.bags = nn.EmbeddingBag(1013, WIDTH, mode=mode, padding_idx=0, include_last_offset=mode == "max")
        self.small = nn.Embedding(7, WIDTH)
        self.frozen = nn.Embedding(1021, WIDTH)
        self.frozen.weight.requires_grad_(False)
        self.hidden = nn.Linear(WIDTH, 40)
        self.out = nn.Linear(40, 5)
        self.mode, self.is_checkpointed = mode, is_checkpointed

    def looked_up(self, ids: Tensor, sizes: list[int]) -> Tensor:
        """One row for each of the bags, which some ids are in several times."""
        starts = torch.tensor([0, *sizes]).cumsum(0)
        bags = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        weights = torch.linspace(0.5, 1.0, ids.numel()) if self.mode == "sum" else None
        of_bags = self.bags(ids, starts if self.mode == "max" else starts[:-1], per_sample_weights=weights)
        single = self.words(ids) + self.small(ids % 7) + self.frozen(ids)
        return of_bags + torch.zeros_like(of_bags).index_add_(0, bags, single)

    def forward(self, ids: Tensor, sizes: list[int]) -> Tensor:
        if self.is_checkpointed:
            rows = checkpoint(self.looked_up, ids, sizes, use_reentrant=False)
        else:
            rows = self.looked_up(ids, sizes)
        return self.out(self.hidden(rows).tanh())


def batch(rank: int, step: int) -> tuple[Tensor, list[int]]:
    """Bags of other sizes in each step, of which some are empty, as all of rank 1 in step 2 are."""
    draw = random.Random(100 * step + rank)
    sizes = [0 if (rank, step) == (1, 2) else draw.choice((0, 1, 3, 30)) for _ in range(4)]
    sizes[0] += (rank, step) != (1, 2)
    return torch.tensor([int(1009 * draw.random() ** 3) for _ in range(sum(sizes))], dtype=torch.int64), sizes


def sharded(model: Network, own: bool, dtype: torch.dtype | None = None, mesh: Any = None) -> Network:
    policy: Any = {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)} if dtype is not None else {}
    policy |= {"mesh": mesh}
    for module in (model.words, model.bags, model.hidden) if own else (model.hidden,):
        fully_shard(module, **policy)
    return fully_shard(model, **policy)  # type: ignore[return-value]


def steps_of(
    model: Network, rank: int, steps: range, sync: thinwire.Synchronizer | None = None, parts: int = 1
) -> list[Any]:
    """Losses, norms, and at last all parameters, of steps of several micro-batches."""
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2, fused=True)
    found: list[Any] = []
    for step in steps:
        for part in range(parts):
            model.set_requires_gradient_sync(part == parts - 1)  # type: ignore[operator]
            loss = model(*batch(rank, parts * step + part)).float().square().sum()
            loss.backward()
            found.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert isinstance(norm, DTensor)
        found.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        if sync is not None:
            assert sync.stats()["comm/bytes_sent"] == sum(int(row["total_bytes"]) for row in sync.table())
    with torch.no_grad():
        found.append(model(*batch(rank, 999)).tolist())
    return [*found, *(tensor.full_tensor() for tensor in model.state_dict().values())]


def _trains(
    context: RankContext, mode: str, own: bool, dtype: torch.dtype | None, is_checkpointed: bool, replicas: int = 1
) -> None:
    torch.manual_seed(0)
    model, mesh = Network(mode, is_checkpointed), None
    if replicas > 1:
        mesh = dist.init_device_mesh("cpu", (replicas, context.world_size // replicas), mesh_dim_names=("r", "s"))
    stock, ours = sharded(copy.deepcopy(model), own, dtype, mesh), sharded(model, own, dtype, mesh)
    expected = steps_of(stock, context.rank, range(4))
    sync = thinwire.attach(ours)
    weights = {name: id(parameter) for name, parameter in ours.named_parameters()}
    got = steps_of(ours, context.rank, range(4), sync)
    check(got, expected)
    twice = [steps_of(model, context.rank, range(4, 6), parts=2) for model in (ours, stock)]
    check(*twice)
    rows = [row for row in sync.table() if row["kind"] == "sparse gradient, rows in shards"]
    assert sorted(str(row["name"]) for row in rows) == ["bags.weight", "frozen.weight", "words.weight"]
    assert all(
        0 < int(row["bytes"]) < max(1, int(row["dense_bytes"])) for row in rows if row["name"] != "frozen.weight"
    )
    sync.detach()
    assert weights == {name: id(parameter) for name, parameter in ours.named_parameters()}
    assert "forward" not in vars(ours.words)
    stock.load_state_dict(ours.state_dict())
    check(*(steps_of(model, context.rank, range(6, 8)) for model in (ours, stock)))


def check(got: list[Any], expected: list[Any]) -> None:
    """The same to rounding: FSDP adds up the micro-batches of a rank first, and bags their ids in another order."""
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@takes_tables
@pytest.mark.parametrize(
    ("world_size", "mode", "own", "dtype", "is_checkpointed"),
    [
        (2, "mean", False, None, False),
        pytest.param(2, "sum", True, torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(2, "max", True, None, True, marks=pytest.mark.slow),
        pytest.param(3, "sum", False, None, True, marks=pytest.mark.slow),
        pytest.param(4, "mean", True, None, False, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_fsdp(
    world_size: int, mode: str, own: bool, dtype: torch.dtype | None, is_checkpointed: bool
) -> None:
    run_ranks(_trains, mode, own, dtype, is_checkpointed, world_size=world_size, timeout_seconds=90)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "dtype"), [("mean", None), pytest.param("sum", torch.bfloat16, marks=pytest.mark.slow)]
)
def test_rows_are_summed_over_replicas(mode: str, dtype: torch.dtype | None) -> None:
    run_ranks(_trains, mode, True, dtype, False, 2, world_size=4, timeout_seconds=90)


def _trains_shared(context: RankContext, replicas: int) -> None:
    shape = replicas, context.world_size // replicas
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))
    torch.manual_seed(0)
    model = Shared()
    stock, ours = sharded(copy.deepcopy(model), False, mesh=mesh), sharded(model, False, mesh=mesh)
    sync = thinwire.attach(ours)
    check(*(steps_of(model, context.rank, range(4)) for model in (ours, stock)))
    (row,) = (row for row in sync.table() if row["name"] == "words.weight")
    share, sums = (shape[1] - 1) / shape[1], 2 * (shape[1] - 1) / shape[1]  # FSDP keeps the root, and Gloo sums whole
    assert 0 < int(row["bytes"]) < int(row["dense_bytes"]) == round((share + sums) * model.words.weight.nbytes)
    sync.detach()
    assert "forward" not in vars(ours.others)
    check(*(steps_of(model, context.rank, range(4, 6)) for model in (ours, stock)))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_table_of_several_modules(replicas: int) -> None:
    run_ranks(_trains_shared, replicas, world_size=2 * replicas, timeout_seconds=60)


def _waits(context: RankContext) -> None:
    """Rank 1 looks nothing up; the other one does not wait for longer than it was asked to."""
    sync = thinwire.attach(sharded(Network(), False), timeout=timedelta(seconds=3))
    store = dist.distributed_c10d._get_default_store()
    if context.rank == 0:
        with pytest.raises(LostPeerError, match=r"did not take part within the timeout"):
            sync._model.words(torch.tensor([5]))  # type: ignore[operator]
        store.set("raised", "")
    else:
        store.wait(["raised"])


@takes_tables
def test_a_lookup_waits_as_long_as_it_was_told() -> None:
    run_ranks(_waits, world_size=2, timeout_seconds=60)


def _attached_after_a_step(context: RankContext, folder: str) -> None:
    """Attach in the middle, save by DCP, load into a model that is attached and into one that is not."""
    torch.manual_seed(0)
    stock, ours = sharded(Network(), False), None
    steps_of(stock, context.rank, range(2))
    sync = thinwire.attach(stock)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-2)
    stock(*batch(context.rank, 7)).sum().backward()
    assert isinstance(stock.words.weight.grad, DTensor)
    assert stock.words.weight.grad.placements == stock.words.weight.placements == (Shard(0),)
    optimizer.step()
    optimizer.zero_grad()
    model_state, moments = get_state_dict(stock, optimizer)
    dcp.save({"model": model_state, "moments": moments}, checkpoint_id=folder)
    expected = steps_of(stock, context.rank, range(2, 4), sync)
    for is_attached in (True, False):
        torch.manual_seed(1)
        ours = sharded(Network(), True)
        if is_attached:
            thinwire.attach(ours)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
        model_state, moments = get_state_dict(ours, optimizer)
        dcp.load({"model": model_state, "moments": moments}, checkpoint_id=folder)
        set_state_dict(ours, optimizer, model_state_dict=model_state, optim_state_dict=moments)
        check(steps_of(ours, context.rank, range(2, 4)), expected)


@pytest.mark.slow
def test_a_checkpoint_goes_in_and_out(tmp_path: Any) -> None:
    run_ranks(_attached_after_a_step, str(tmp_path), world_size=2, timeout_seconds=90)


def _saved(context: RankContext, folder: str) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    torch.manual_seed(0)
    model = sharded(Network(), True, mesh=mesh)
    thinwire.attach(model)
    steps_of(model, context.rank, range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(*batch(context.rank, 7)).sum().backward()
    optimizer.step()
    model_state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "moments": moments}, checkpoint_id=folder)


def _loaded(context: RankContext, folder: str) -> None:
    """Two ranks without replicas go on from what pairs of two replicas saved; stock FSDP takes the same steps."""
    found = []
    for is_attached in (True, False):
        torch.manual_seed(1)
        model = sharded(Network(), False)
        if is_attached:
            thinwire.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model_state, moments = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "moments": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=moments)
        state = optimizer.state[model.words.weight]["exp_avg"]
        assert isinstance(state, DTensor)
        assert state.full_tensor().count_nonzero()
        loss = model(*batch(context.rank, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), *steps_of(model, context.rank, range(2, 4))])
    check(*found)


@pytest.mark.slow
def test_four_ranks_save_and_two_load(tmp_path: Any) -> None:
    run_ranks(_saved, str(tmp_path), world_size=4, timeout_seconds=60)
    run_ranks(_loaded, str(tmp_path), world_size=2, timeout_seconds=60)


def _has_state(context: RankContext, folder: str) -> None:
    """Two ranks save; they load with tables in shards and without, and then one rank does, where FSDP keeps them."""
    path, has_two = Path(folder) / "states.pt", context.world_size == 2
    for rows in ("auto", "auto", "dense") if has_two else ("auto",):
        mesh = dist.init_device_mesh("cpu", (context.world_size,))
        model = sharded(Network(), True, mesh=mesh)
        sync = thinwire.attach(model, rows=rows)
        if path.exists():
            state = torch.load(path, weights_only=True)
            sync.gathered().load_state_dict(state)
            own = sync.state_dict()
            if has_two and rows == "auto":
                names = [name for name in own["parameters"] if name not in ("words.weight", "bags.weight")]
                sync.load_state_dict({**own, "parameters": names})  # as saved before tables had names in it
        model(*batch(context.rank, 0)).sum().backward()
        state = sync.gathered().state_dict()
        assert sync.stats()["comm/steps"] == 1.0 + path.exists()
        dist.barrier()
        if context.rank == 0 and not path.exists():
            torch.save(state, path)
        dist.barrier()
        sync.detach()


@takes_tables
def test_a_state_is_loaded_wherever_tables_stay_in_shards_or_not(tmp_path: Any) -> None:
    run_ranks(_has_state, str(tmp_path), world_size=2, timeout_seconds=60)
    run_ranks(_has_state, str(tmp_path), world_size=1, timeout_seconds=60)


class Tied(Network):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1009, bias=False)
        self.head.weight = self.words.weight


class Shared(Network):
    """One table of two modules, as of the encoder and the decoder of T5; only one of them has padding."""

    def __init__(self, mode: str = "mean", is_checkpointed: bool = False) -> None:
        super().__init__(mode, is_checkpointed)
        self.others = nn.Embedding(1009, WIDTH)
        self.others.weight = self.words.weight

    def forward(self, ids: Tensor, sizes: list[int]) -> Tensor:
        return super().forward(ids, sizes) + self.others(ids).sum() / 100


class Read(Network):
    """The table is the output layer too, which no module shows."""

    def forward(self, ids: Tensor, sizes: list[int]) -> Tensor:
        return self.looked_up(ids, sizes) @ self.words.weight.T


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _fails_midway(context: RankContext) -> None:
    """The second group cannot be made, when the first table is FSDP's no more."""
    other, made = DeviceMesh.from_group(dist.new_group(), "cpu"), list[PrivateGroup]()

    def build() -> Network:
        torch.manual_seed(0)
        built = Network()
        fully_shard(built.bags, mesh=other)
        return fully_shard(built)  # type: ignore[return-value]

    model = build()

    def make(*arguments: Any) -> PrivateGroup:
        if made:
            raise LostPeerError("a peer is gone")
        made.append(private_group(*arguments))
        return made[0]

    def known() -> list[Any]:
        groups = [group for module in (model, model.bags) for group in internals.parameter_groups(module)]
        return [[id(one) for one in group.fsdp_params] for group in groups]

    before, hooks = known(), len(model._forward_hooks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "private_group", make)
        with pytest.raises(LostPeerError):
            RowShards(model)
    assert len(made) == 1
    assert known() == before
    assert len(model._forward_hooks) == hooks
    assert not any("forward" in vars(module) for module in model.modules())

    def gradients(model: Network) -> list[Tensor]:
        model(*batch(context.rank, 0)).square().sum().backward()
        return [one.grad.full_tensor() for one in model.parameters() if isinstance(one.grad, DTensor)]

    ours, stock = gradients(model), gradients(build())
    assert len(ours) == len(stock) > 0
    assert all(map(torch.equal, ours, stock))


def test_tables_are_fsdps_again_where_a_group_cannot_be_made() -> None:
    run_ranks(_fails_midway, world_size=2, timeout_seconds=60)


def _left(context: RankContext) -> tuple[dict[str, list[str]], set[str]]:
    """Which tables are taken from FSDP, of models in which some cannot be, and why others are not."""
    why: set[str] = set()

    def taken(build: Callable[[], nn.Module]) -> list[str]:
        tables, records = RowShards(build()), ParameterRecords()
        tables.count(records)
        why.update(record.reason.removeprefix("left to FSDP: ") for record in records.values())
        names = sorted(tables.names)
        tables.remove()
        tables.remove()
        return names

    def other(module: nn.Module) -> Callable[[], nn.Module]:
        return lambda: fully_shard(nn.Sequential(module, nn.Linear(WIDTH, 3)))

    def hooked(shape: tuple[int, int], is_unused: bool) -> nn.Module:
        pairs = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Sequential(nn.Linear(WIDTH, 3), nn.Embedding(4000, WIDTH)), mesh=pairs)
        model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[index,union-attr]
        model.set_reduce_scatter_unused_params(is_unused)  # type: ignore[operator]
        return model

    def zeroed() -> nn.Module:
        model = fully_shard(nn.Sequential(nn.Linear(WIDTH, 3), nn.Embedding(4000, WIDTH)))
        model[1].weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[index,union-attr]
        return model

    def dealt_twice() -> nn.Module:
        pairs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Embedding(4000, WIDTH), nn.Linear(WIDTH, 3))
        rows = RowwiseParallel(input_layouts=Replicate())
        return fully_shard(parallelize_module(model, pairs["tp"], {"0": rows}), mesh=pairs["dp"])

    def head_first() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 2000, bias=False), nn.Embedding(2000, WIDTH), nn.Linear(WIDTH, 2))
        model[1].weight = model[0].weight
        return fully_shard(model)

    mesh = dist.init_device_mesh("cpu", (context.world_size, 1), mesh_dim_names=("replicate", "shard"))
    found = {
        "head first": taken(head_first),
        "hooked": taken(lambda: hooked((1, 4), False)),
        "hooked, unused by some": taken(lambda: hooked((1, 4), True)),
        "hooked before": taken(zeroed),
        "tensor parallel": taken(dealt_twice),
        "hooked, with replicas": taken(lambda: hooked((2, 2), False)),
        "shared": taken(lambda: sharded(Shared(), False)),
        "plain": taken(other(nn.Embedding(2000, WIDTH))),
        "tied": taken(lambda: sharded(Tied(), False)),
        "tiny": taken(lambda: fully_shard(nn.Sequential(nn.Linear(WIDTH, 3), nn.Embedding(900, WIDTH)))),
        "scaled": taken(other(Scaled(2000, WIDTH))),
        "by frequency": taken(other(nn.Embedding(2000, WIDTH, scale_grad_by_freq=True))),
        "norm": taken(other(nn.Embedding(2000, WIDTH, max_norm=1.0))),
        "columns": taken(lambda: fully_shard(nn.Sequential(nn.Embedding(2000, WIDTH), nn.Linear(WIDTH, 4)),
                                             shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))),
        "offloaded": taken(lambda: fully_shard(nn.Sequential(nn.Embedding(2000, WIDTH), nn.Linear(WIDTH, 3)),
                                               offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "replicas": taken(lambda: fully_shard(nn.Sequential(nn.Embedding(2000, WIDTH), nn.Linear(WIDTH, 3)),
                                              mesh=mesh)),
        "alone": taken(lambda: fully_shard(nn.Embedding(2000, WIDTH))),
    }  # fmt: skip
    model = sharded(Network(), False)
    sync = thinwire.attach(model, rows="dense")
    found["rows=dense"] = [str(row["name"]) for row in sync.table()]
    sync.detach()
    sync = thinwire.attach(model)
    with pytest.raises(ValueError, match=r"cannot be copied while thinwire is attached"):
        copy.deepcopy(model.words)
    dist.barrier()
    with pytest.raises(IndexError, match=r"words.weight from 5 to 1009: it has 1009 rows"):
        model.words(torch.tensor([1009, 5]))
    dist.barrier()
    with pytest.raises(TypeError, match=r"ids of words.weight are torch.float32"):
        model.words(torch.ones(3))
    different = model.words if context.rank else model.frozen
    with pytest.raises(
        MismatchError, match=r"different tables: .0: 'frozen.weight', 1: 'words.weight', 2: 'words.weig"
    ):
        different(torch.tensor([5]))
    dist.barrier()
    assert {row["name"] for row in sync.table()} == {"small.weight"}
    sync.detach()
    model = sharded(Read(), False)
    sync = thinwire.attach(model)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor") as raised:
        model(*batch(context.rank, 0))
    assert 'attach(model, rows="dense")' in raised.value.__notes__[0]
    sync.detach()
    model(*batch(context.rank, 0))
    return found, why


@pytest.mark.slow
def test_what_cannot_stay_in_shards_is_left_to_fsdp() -> None:
    for outcome in run_ranks(_left, world_size=4, timeout_seconds=60):
        found, why = outcome.value
        expected = {name: list[str]() for name in found}
        taken = {"plain": ["0.weight"], "offloaded": ["0.weight"], "tied": ["bags.weight", "frozen.weight"]}
        taken |= {"hooked": ["1.weight"], "shared": ["bags.weight", "frozen.weight", "words.weight"]}
        assert found == expected | taken
        assert why == {
            "less than 128 KiB cost less than asking for rows",
            "all parameters are tables, and FSDP has to keep one",
            "another module uses the table too",
            "its module does not only look rows up",
            "its rows are not dealt to ranks",
            "ranks may leave it out of a step",
            "a hook reads its gradient before replicas are averaged",
            "a hook would change its gradient, which FSDP does not call",
            "tensor parallelism deals its rows, too",
        }


def _warns(context: RankContext) -> list[list[str]]:
    """What is logged as a warning where FSDP keeps everything, and where it does not."""
    logged: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("thinwire")
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    found = []
    for module, settings in (
        (nn.Linear(WIDTH, WIDTH), {}),
        (nn.Linear(WIDTH, WIDTH), {"dense": "lossless"}),
        (nn.Embedding(2000, WIDTH), {}),
    ):
        sync = thinwire.attach(fully_shard(nn.Sequential(module, nn.Linear(WIDTH, 3))), **settings)  # type: ignore
        sync.detach()
        found.append(list(logged))
        logged.clear()
    return found


@takes_tables
def test_it_is_said_where_nothing_is_gained() -> None:
    (nothing, lossless, table), others = (outcome.value for outcome in run_ranks(_warns, world_size=2))
    assert len(nothing) == 1
    assert "nothing of this model is sent by thinwire" in nothing[0]
    assert [lossless, table, *others] == [[], [], [], [], []]
