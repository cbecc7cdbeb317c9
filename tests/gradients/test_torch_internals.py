"""Every private name of torch that gradients need is there in this torch, and is what thinwire takes it for."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.autograd.graph
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from hidden import Without
from thinwire.comm import c10d
from thinwire.gradients import torch_internals as internals
from thinwire.gradients.sharded import layout, tables
from thinwire.lab.testbed.launch import RankContext, run_ranks


def test_a_backward_pass_has_a_number_and_calls_back_at_its_end() -> None:
    seen: list[Any] = []

    def hook(gradient: Tensor) -> None:
        seen.append(internals.graph_task())
        internals.at_end_of_backward(lambda: seen.append("end"))

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hook)
    weight.sum().backward()
    assert seen[0] >= 0
    assert seen[1:] == ["end"]
    assert internals.graph_task() == -1
    with pytest.raises(RuntimeError):
        internals.at_end_of_backward(lambda: None)


def test_the_engine_is_called_by_a_function_of_this_name() -> None:
    frames = []

    class Peek:
        def __del__(self) -> None:
            frame = sys._getframe().f_back
            while frame is not None:
                frames.append(frame.f_code.co_name)
                frame = frame.f_back

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: Peek() and None)
    weight.sum().backward()
    assert internals.ENGINE_FRAME in frames
    assert hasattr(torch.autograd.graph, internals.ENGINE_FRAME)


def test_a_lookup_has_its_ids_unless_a_checkpoint_would_run_again() -> None:
    table, ids = nn.Embedding(5, 2), torch.tensor([3, 1])
    node = table(ids).grad_fn
    saved = internals.saved_indices(node)
    assert saved is not None
    assert torch.equal(saved, ids)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        packed = table(ids).grad_fn
    assert internals.saved_indices(packed) is None


def test_tensors_count_writes_and_have_their_hooks() -> None:
    weight = nn.Parameter(torch.ones(2))
    before = internals.version(weight)
    with torch.no_grad():
        weight.add_(1)
    assert internals.version(weight) == before + 1
    assert not internals.hooks_before(weight)
    assert not internals.hooks_after(weight)
    weight.register_hook(lambda gradient: None)
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert len(internals.hooks_before(weight) or ()) == 1
    assert list(internals.hooks_after(weight) or ()) == [handle.id]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, on which its module is built
        from torch.distributed.optim import _apply_optimizer_in_backward
    assert not internals.has_optimizer(weight)
    _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})
    assert internals.has_optimizer(weight)


@pytest.mark.usefixtures("one_rank")
def test_ddp_has_its_hooks_its_join_and_another_group() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert list(internals.comm_hooks(ddp)) == []
    assert internals.active_ddp() is None
    seen = []
    ddp.module.register_forward_hook(lambda *unused: seen.append(internals.active_ddp()))
    assert not getattr(ddp, internals.JOIN_CONFIG).enable
    with ddp.join(divide_by_initial_world_size=False):
        assert getattr(ddp, internals.JOIN_CONFIG).enable
        assert not internals.divides_by_initial_world_size(ddp)
        ddp(torch.ones(1, 2)).sum().backward()
    assert seen[0] is ddp
    internals.update_process_group(ddp, dist.new_group([0]))
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.register_comm_hook(None, allreduce_hook)
    assert len(internals.comm_hooks(ddp)) == 1
    assert not internals.delays_all_reduces(ddp)
    weights = [ddp.module.weight, ddp.module.bias]
    assert internals.bucket_indices(ddp, weights) == [[0, 1]]
    before = ddp.reducer
    internals.renew_reducer(ddp)
    assert ddp.reducer is not before
    assert len(internals.comm_hooks(ddp)) == 0
    ddp(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("one_rank")
def test_fsdp_has_groups_records_and_a_reduce_scatter() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh: DeviceMesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    assert internals.flattened(mesh["shard"]) is not None
    assert internals.flattened(mesh).ndim == 1
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
    (group,) = internals.parameter_groups(model)
    model(torch.ones(1, 4)).sum().backward()
    sources = group.fsdp_params
    seen: list[list[Any]] = []
    undo = internals.watch_reductions(group, lambda ready: seen.append(list(ready)))
    model(torch.ones(1, 4)).sum().backward()
    assert seen == [sources]
    undo()
    model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1
    assert internals.all_reduce_hook(group) is None
    internals.to_sharded(group)
    for stock in internals.collectives_of(group):
        assert callable(stock)
        assert callable(stock.allocate)
    others = SimpleNamespace(), SimpleNamespace()
    internals.set_collectives(group, *others)
    assert internals.collectives_of(group) == others


@pytest.mark.usefixtures("one_rank")
def test_ddp_and_fsdp_leave_out_replicas() -> None:
    from torch.distributed.fsdp import fully_shard

    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    undo = internals.without_synchronization(ddp)
    assert not ddp.require_backward_grad_sync
    assert not ddp.require_forward_param_sync
    undo()
    assert ddp.require_backward_grad_sync
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    (group,) = internals.parameter_groups(fully_shard(nn.Linear(4, 4), mesh=mesh))
    assert internals.ranks_of(group.mesh_info, "replicate") is None, "it is one rank"
    assert internals.ranks_of(SimpleNamespace(shard_process_group=dist.group.WORLD), "shard") is None
    many = SimpleNamespace(size=lambda: 2)
    assert internals.ranks_of(SimpleNamespace(shard_process_group=many), "shard") is many  # type: ignore[comparison-overlap]
    stock = group.mesh_info, group.post_forward_mesh_info
    assert group._is_hsdp
    undo = internals.without_replicas(group)
    assert not group._is_hsdp
    assert type(group.mesh_info).__name__ == "FSDPMeshInfo"
    assert group.mesh_info.shard_process_group is stock[0].shard_process_group
    undo()
    assert (group.mesh_info, group.post_forward_mesh_info) == stock


@pytest.mark.usefixtures("one_rank")
def test_fsdp_gives_a_parameter_up_and_takes_it_again() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4))
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    state = internals.fsdp_state(model[0])
    groups, (kept,) = internals.parameter_groups_of(state), internals.parameter_groups(model)
    assert internals.parameter_groups_of(SimpleNamespace()) == []
    if not hasattr(state, "_fsdp_param_groups"):
        assert not groups, "tables stay with FSDP before torch 2.12"
        return
    (group,) = groups
    groups.remove(group)
    internals.to_sharded(group)
    assert internals.local_shard(model[0].weight).shape == (4, 4)
    groups.append(group)
    internals.begin_again(group, kept)
    assert group.comm_ctx is kept.comm_ctx
    model(torch.ones(1, 4)).sum().backward()
    assert all(hasattr(tensor, "full_tensor") for tensor in model.state_dict().values())


@pytest.mark.usefixtures("one_rank")
def test_fsdp_reduces_a_parameter_no_more_that_it_forgot() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    model.unused = nn.Parameter(torch.ones(4))
    (group,) = internals.parameter_groups(fully_shard(model))
    model(torch.ones(1, 4)).sum().backward()
    internals.forget(group, group.fsdp_params[-1])
    seen: list[Any] = []
    internals.watch_reductions(group, seen.extend)
    model(torch.ones(1, 4)).sum().backward()
    assert seen == group.fsdp_params
    assert [source.sharded_param.numel() for source in seen] == [16, 4]


@pytest.mark.usefixtures("one_rank")
def test_fsdp_gathers_again_what_was_resharded() -> None:
    from torch.distributed.fsdp import fully_shard

    for reshards, expected in ((None, (True, False)), (True, (True, True)), (False, (False, False))):
        model = nn.Sequential(fully_shard(nn.Linear(4, 4), reshard_after_forward=reshards), nn.Linear(4, 4))
        fully_shard(model, reshard_after_forward=reshards)
        model(torch.ones(1, 4))
        states = [internals.fsdp_state(module) for module in (model[0], model)]
        groups = [group for module in (model[0], model) for group in internals.parameter_groups(module)]
        found = tuple(internals.gathers_again(*pair) for pair in zip(states, groups, strict=True))
        assert found == expected


HALF = torch.bfloat16
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "computes in half": {"param_dtype": HALF},
    "reduces in half": {"reduce_dtype": HALF},
    "computes in half, reduces in full": {"param_dtype": HALF, "reduce_dtype": torch.float32},
    "both in half": {"param_dtype": HALF, "reduce_dtype": HALF},
    "norms in full": {"param_dtype": HALF, "param_dtype_override_fn": lambda one: (one.dtype, None)[one.ndim > 1]},
    "a gradient in half": {"param_dtype": HALF, "param_dtype_override_fn": lambda one: None},
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", POLICIES)
def test_fsdp_says_in_what_dtype_and_order_it_reduces(name: str) -> None:
    """Before the first forward too. The meaning of a policy, and the order, changed in torch 2.15."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = POLICIES[name]
    if "param_dtype_override_fn" in policy and not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
        pytest.skip("this torch has one policy for all parameters of a group")
    flat: list[Tensor] = []

    def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        flat.append(torch.empty(size, dtype=dtype, device=device))
        return flat[-1]

    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.LayerNorm(3), nn.Linear(3, 4, bias=False))
    if name == "a gradient in half":
        model[1].weight.grad_dtype = HALF  # type: ignore[attr-defined]  # in the middle: torch 2.15 sorts by dtype
    model = fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    (group,) = internals.parameter_groups(model)
    said = internals.reduced_dtype(group)
    all_gather, _ = internals.collectives_of(group)
    internals.set_collectives(group, all_gather, SimpleNamespace(allocate=allocate))
    seen: list[Any] = []
    internals.watch_reductions(group, seen.extend)
    model(torch.ones(1, 2)).sum().backward()
    assert flat[0].dtype == said == internals.reduced_dtype(group)
    sums = [source.sharded_param.grad.to_local().float().sum() for source in seen]
    pieces = flat[0].float().split([source.sharded_param.numel() for source in seen])
    assert torch.equal(torch.stack([piece.sum() for piece in pieces]), torch.stack(sums))
    kept = {source.sharded_param.grad.dtype for source in seen}
    assert kept == {internals.kept_dtype(source) for source in seen}


class Tower(nn.Module):
    """A table that stays with FSDP, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids))


def of_kind(kind: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Tower()
    if kind == "fsdp":
        fully_shard(model.last)
        return fully_shard(model)
    return DistributedDataParallel(model) if kind == "ddp" else model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_attach_refuses_a_torch_without_a_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_kind(kind)
    everything = list(internals.needed(model))
    for number, (owner, names) in enumerate(everything):
        for name in names.split():
            hidden = [*everything[:number], (Without(owner, name), names), *everything[number + 1 :]]
            monkeypatch.setattr(internals, "needed", lambda model, hidden=hidden: iter(hidden))
            with pytest.raises(ValueError, match="attach does not know torch") as refused:
                thinwire.attach(model)
            told = str(refused.value)
            assert torch.__version__ in told
            assert repr(name.split(".")[-1]) in told
            assert f"install torch {c10d.TESTED}" in told
    monkeypatch.undo()
    sync = thinwire.attach(model)
    model(torch.ones(2, dtype=torch.int64)).sum().backward()
    sync.detach()


OWNERS = {"plain": (torch._C, "_current_graph_task_id"), "ddp": (DistributedDataParallel, "_ddp_init_helper")}


def _refuse_before_anything_is_sent(context: RankContext, kind: str) -> str:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    model = of_kind(kind)
    owner, name = OWNERS.get(kind, (FSDPParamGroup, "lazy_init"))
    stock = getattr(owner, name)
    delattr(owner, name)
    told = ""
    try:
        if context.rank == 0:  # alone: it would wait for the others if it sent anything
            thinwire.attach(model)
    except ValueError as error:
        told = str(error)
    setattr(owner, name, stock)
    sync = thinwire.attach(model)
    model(torch.ones(2, dtype=torch.int64)).sum().backward()
    sync.detach()
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_it_refuses_before_anything_is_sent(kind: str) -> None:
    told, nothing = run_ranks(_refuse_before_anything_is_sent, kind, world_size=2)
    assert OWNERS.get(kind, (None, "lazy_init"))[1] in told.value
    assert not nothing.value


def test_a_lookup_whose_ids_have_another_name_is_not_followed() -> None:
    assert internals.saved_indices(SimpleNamespace()) is None
    assert internals.saved_indices(SimpleNamespace(_raw_saved_indices=SimpleNamespace(unpack_hook=None))) is None


LATER = {
    "_C": "itself in every torch",
    "_fsdp_param_group": "read where there are no `_fsdp_param_groups`",
    "_init_reduce_scatter_param_order": "called where `_reduce_scatter_param_indices` is",
    "unsharded_accumulated_grad": "read where there is no `_take_unsharded_grads_to_reduce`",
    "static_graph": "an argument of DDP's",
    "size": "of process groups",
}


@pytest.mark.usefixtures("one_rank")
def test_every_name_that_is_read_is_looked_at_before() -> None:
    """Else the first step of another torch would end in an AttributeError."""
    known = {
        part
        for kind in ("ddp", "fsdp")
        for _, names in internals.needed(of_kind(kind))
        for part in names.replace(".", " ").split()
    }
    read = set(_read_of_torch(Path(internals.__file__), ("group", "source", "state", "ddp", "one", "other")))
    for module in (layout, tables):
        read |= {name for name in _read_of_torch(Path(module.__file__ or ""), ()) if not name.startswith("_")}
    assert read - known - LATER.keys() == set()


def _read_of_torch(path: Path, variables: tuple[str, ...]) -> Iterator[str]:
    """Names that begin with an underscore; and any of these variables, and of ``x.group`` and ``x.source``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not node.attr.startswith("__"):
            of = node.value
            is_record = isinstance(of, ast.Attribute) and of.attr in ("group", "source")
            if node.attr.startswith("_") or is_record or (isinstance(of, ast.Name) and of.id in variables):
                yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GETTERS:
            yield from (part.value for part in node.args if isinstance(part, ast.Constant) and part.value[:1] == "_")


GETTERS = ("attrgetter", "methodcaller")
