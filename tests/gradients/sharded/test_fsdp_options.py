"""Settings and policies of FSDP2 by which torch has changed when and in what it reduces, attached beside stock."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import thinwire
from thinwire.compress.base import Identity, Parameter
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks
ROWS, WIDTH, STEPS = 4100, 24, 3
HALF = torch.bfloat16


class Block(nn.Module):
    """A norm that may compute in another dtype, and a layer that ranks may leave out. It has no other biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.extra = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 51, bias=False), nn.Linear(51, WIDTH, bias=False)

    def forward(self, found: Tensor, uses_all: bool) -> Tensor:
        dtype = found.dtype
        found = self.norm(found.to(self.norm.weight.dtype)).to(dtype)
        found = self.down(self.up(found).relu())
        return self.extra(found) if uses_all else found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, ids: Tensor, uses_all: bool = True) -> Tensor:
        found = self.table(ids)
        for block in self.blocks:
            found = block(found, uses_all)
        return self.head(found)


def sharded(mesh: DeviceMesh, setting: str = "", ignores: bool = False) -> Any:
    model = Net()
    if setting == PROMOTED:
        for block in model.blocks:
            block.norm.weight.grad_dtype = HALF  # type: ignore[union-attr]
    ignored = thinwire.embedding_tables(model) if ignores else set[nn.Parameter]()
    policy = MixedPrecisionPolicy(**POLICIES.get(setting, {}))
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    if setting in SETTINGS:
        getattr(model, setting)(SETTINGS[setting])
    return model


def batch(step: int, micro: int = 0) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randint(0, 60, (16,), generator=data)


def passes(model: Any, step: int, setting: str, is_late: bool = False) -> None:
    """One step's backward passes, of which every other step has two, and their end where the caller has to say it."""
    count = 1 + step % 2
    for micro in range(count):
        model.set_requires_gradient_sync(micro == count - 1 and not is_late)
        uses_all = setting != "set_reduce_scatter_unused_params" or (dist.get_rank() + step) % 2 == 0
        model(batch(step, micro), uses_all).float().square().mean().backward()
    if setting == MANUAL:
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=is_late)
        if handle is not None:
            handle.wait()


def passes_before(model: Any, step: int, setting: str) -> None:
    passes(model, step, setting, is_late=True)


def pipelined(model: Any, step: int, setting: str) -> None:
    """The passes of a pipeline of one stage, which has FSDP reduce after the last of them, outside of any."""
    if not hasattr(model, "own_group"):
        model.own_group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=model.own_group)
    ScheduleGPipe(stage, 2, lambda output, target: (output - target).square().mean()).step(
        batch(step), target=torch.zeros(16, 3)
    )


Step = Callable[[Any, int, str], None]


def train(model: Any, one_step: Step, setting: str, averages: bool) -> list[Tensor]:
    """The parameters after some steps; if it averages then by hand what FSDP ignores, which nobody else does."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        one_step(model, step, setting)
        table = model.table.weight
        if averages and not hasattr(table, "full_tensor"):
            dist.all_reduce(table.grad)
            table.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    whole = (getattr(parameter, "full_tensor", lambda one=parameter: one)() for parameter in model.parameters())
    return [parameter.detach().clone() for parameter in whole]


def identity(parameter: Parameter) -> Identity | str:
    """Every matrix travels as if it were compressed, and loses nothing."""
    return Identity() if len(parameter.shape) == 2 else "native"


HOWS: tuple[dict[str, Any], ...] = ({}, {"rows": "dense"}, {"dense": "lossless"}, {"dense": identity})
PROMOTED, MANUAL = "promoted", "set_manual_backward_finalization"
POLICIES: dict[str, dict[str, Any]] = {
    "computes in half": {"param_dtype": HALF, "param_dtype_override_fn": lambda one: None},
    "norms in full": {"param_dtype": HALF, "param_dtype_override_fn": lambda one: (one.dtype, None)[one.ndim > 1]},
    PROMOTED: {"param_dtype": HALF, "param_dtype_override_fn": lambda one: None},
}
SETTINGS: dict[str, Any] = {
    "set_separate_reduce_scatter_group": True,
    "set_reduce_scatter_unused_params": True,
    "set_reduce_scatter_max_input_buffers": 3,
    "set_keep_unsharded_storage": True,
    MANUAL: True,
}


def _beside_stock(
    context: RankContext, one_step: Step, setting: str = "", ignores: bool = False, hows: Sequence[Any] = HOWS
) -> None:
    os.environ["THINWIRE_HOST"] = str(context.rank)
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh in (both, one):
        rounded = 0.0 if mesh.ndim == 2 else 1e-6  # sums of two have one order, and sums of four have several
        expected = train(sharded(mesh, setting, ignores), one_step, setting, averages=True)
        for how in hows:
            model = sharded(mesh, setting, ignores)
            sync = thinwire.attach(model, **how)
            for got, wanted in zip(train(model, one_step, setting, averages=False), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0.0, atol=rounded, msg=f"{mesh} {how}")
            assert sync.stats()["comm/steps"] == STEPS
            rows = {str(row["name"]): row for row in sync.table()}
            for name, row in rows.items():
                differs = str(row["kind"]).startswith("dense") or row["scheme"] == "lossless"  # by what ranks have
                off = 0.5 if differs else 0.0
                assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=off, abs=2), (name, row)
            assert sum(row["bytes"] for row in rows.values()) > 0  # type: ignore[misc]
            sync.detach()
    dist.barrier()


def _run(*arguments: Any) -> None:
    run_ranks(_beside_stock, *arguments, world_size=4, timeout_seconds=100)


def _skip_unless_known(setting: str) -> None:
    owner, name = (FSDPModule, setting) if setting in SETTINGS else (MixedPrecisionPolicy(), "param_dtype_override_fn")
    if not hasattr(owner, name):
        pytest.skip(f"this torch has no {name}")


@pytest.mark.parametrize("setting", [*SETTINGS, *POLICIES])
def test_settings_and_policies_change_no_bit_and_no_prediction(setting: str) -> None:
    _skip_unless_known(setting)
    _run(passes, setting)


def _left_alone(context: RankContext) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    torch.manual_seed(context.rank)
    model[0].reset_parameters()  # type: ignore[operator]
    alone, data = copy.deepcopy(model), torch.rand(5, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(model[0].parameters()))
    with pytest.raises(ValueError, match=r"'1\.bias', which the model averages itself.* ignored_params="):
        thinwire.attach(model, exclude=["0.*", "1.bias"])
    sync = thinwire.attach(model, exclude="0.*")
    for each in (model, alone):
        each(data).square().sum().backward()
    for mine, expected in zip(model[0].parameters(), alone[0].parameters(), strict=True):
        assert torch.equal(mine, expected), "not the values of rank 0"
        torch.testing.assert_close(mine.grad, expected.grad)
    assert [*sync.methods] == ["1.weight", "1.bias"]
    sync.detach()


def test_what_fsdp_ignores_may_stay_on_its_rank() -> None:
    """As experts that each rank has for itself."""
    run_ranks(_left_alone, world_size=2, timeout_seconds=60)


@pytest.mark.parametrize("ignores", [False, True], ids=["table in shards", "table ignored"])
def test_what_fsdp_reduces_after_all_passes_is_averaged_with_it(ignores: bool) -> None:
    """Tables over replicas, and what FSDP ignores, once drifted apart."""
    _skip_unless_known(MANUAL)
    _run(passes_before, MANUAL, ignores)


@pytest.mark.parametrize("ignores", [False, True], ids=["table in shards", "table ignored"])
def test_a_stage_of_a_pipeline_is_averaged_after_its_last_micro_batch(ignores: bool) -> None:
    """Which FSDP reduces outside of backward: its tables over replicas, and what it ignores, once drifted apart."""
    _run(pipelined, "", ignores, [{}])


def _chooses_allocators(context: RankContext) -> None:
    model = sharded(init_device_mesh("cpu", (context.world_size,)))
    sync = thinwire.attach(model, dense=thinwire.compress.bf16())
    with pytest.raises(ValueError, match=r"before thinwire\.attach"):
        model.set_allocate_memory_from_process_group_for_comm(False)
    model(batch(0)).sum().backward()
    sync.detach()
    model.set_allocate_memory_from_process_group_for_comm(False)
    model(batch(1)).sum().backward()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"), reason="torch has no such setting"
)
def test_who_allocates_for_collectives_is_chosen_before_attach_or_after_detach() -> None:
    run_ranks(_chooses_allocators, world_size=2, timeout_seconds=60)
