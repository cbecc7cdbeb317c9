"""Nothing of a gradient is lost, whoever used its parameter: what was applied and what is kept is what was given."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from compressors import FEEDBACK
from thinwire.compress.base import Parameter
from thinwire.compress.reductions.choose import scattered
from thinwire.compress.state import outstanding
from thinwire.gradients.module import module_of
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

ROUNDING = {"of_bf16": 2.0**-8, "of_fp16": 2.0**-11}
"""Of sums that are made in 16 bits, on the way."""
FEW = ("top_k", "ef_sign_sgd", "power_sgd", "qsgd")
SHAPE = (23, 32)  # an odd number of rows, of which FSDP pads one
Uses = list[int]
"""For each parameter two bits, of the ranks that use it in a micro-batch, and two of those in the last one."""


class Apart(nn.Module):
    """One matrix for each compressor, which a rank uses or not, and a vector that it always does."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(4))
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(SHAPE)))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        used = [(self.get_parameter(name) * gradient).sum() for name, gradient in gradients.items()]
        return torch.stack([self.base.sum(), *used]).sum()


def ddp(module: nn.Module, **options: bool) -> nn.Module:
    return DistributedDataParallel(module, find_unused_parameters=True, **options)


def fsdp(module: nn.Module) -> nn.Module:
    """On replicas of one rank: there each has memories of its own gradients, like DDP."""
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(module, mesh=mesh)


WAYS = {
    "plain": nn.Module.train,
    "ddp": ddp,
    "ddp with views": partial(ddp, gradient_as_bucket_view=True),
    "fsdp": fsdp,
    "fsdp of shards": fully_shard,
}


def taken(way: str, names: Sequence[str]) -> list[str]:
    """Return the compressors that a way takes: shards go to their owners only by codes that decode alone."""

    def is_taken(name: str) -> bool:
        try:
            scattered(FEEDBACK[name].by("auto"), Parameter(name, SHAPE), 2)
        except ValueError:
            return way != "fsdp of shards"
        return True

    return [name for name in names if is_taken(name)]


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _conserves(context: RankContext, way: str, compressors: Sequence[str], examples: int) -> None:
    rules = {f"of_{name.replace(' ', '_')}": FEEDBACK[name] for name in compressors}
    uses = st.lists(st.integers(0, 15), min_size=len(rules), max_size=len(rules))

    # The same examples on all ranks, which are told alike whether the law holds, so they shrink them alike.
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=HealthCheck,
        phases=[Phase.generate],
    )
    @given(steps=st.lists(st.tuples(uses, st.booleans(), st.booleans()), min_size=2, max_size=4))
    def law(steps: list[tuple[Uses, bool, bool]]) -> None:
        model = WAYS[way](Apart([*rules]))
        sync = thinwire.attach(model, dense={**rules, "*": "native"})
        given_, applied = ({name: torch.zeros(SHAPE) for name in rules} for _ in range(2))
        draw = torch.Generator().manual_seed(context.rank)
        for uses, to_none, is_local in steps:
            model.zero_grad(set_to_none=to_none)
            for micro in range(2):
                mask = [use >> 2 * micro for use in uses]
                if way.startswith("fsdp"):  # which itself wants a parameter used on all ranks or on none
                    mask = [use & 1 and 3 for use in mask]
                gradients = {
                    name: torch.randn(SHAPE, generator=draw)
                    for name, use in zip(rules, mask, strict=True)
                    if use >> context.rank & 1
                }
                for name, gradient in gradients.items():
                    given_[name] += gradient
                with sync.no_sync() if is_local and micro == 0 else contextlib.nullcontext():
                    model(gradients).backward()
            for name, parameter in module_of(model).named_parameters():
                if name in applied and isinstance(parameter.grad, Tensor):
                    applied[name] += whole(parameter.grad)
        states = sync.state_dict()["compress"]["states"]
        sync.detach()
        lost = {}
        for name in rules:
            kept = outstanding(states[name], context.rank, context.world_size)
            assert kept is not None
            both = torch.stack([given_[name], kept.view(-1, SHAPE[1])[: SHAPE[0]]])
            dist.all_reduce(both)
            rest = float((both[0] / 2 - both[1] / 2 - applied[name]).norm())
            lost |= {name: rest} if rest > ROUNDING.get(name, 1e-5) * (1 + float(both[0].norm())) else {}
        assert not lost, lost

    law()


@pytest.mark.parametrize("way", WAYS)
def test_what_was_applied_and_what_is_kept_is_what_was_given(way: str) -> None:
    run_ranks(_conserves, way, FEW, 4, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_compressor_loses_anything(way: str) -> None:
    run_ranks(_conserves, way, taken(way, list(FEEDBACK)), 10, world_size=2)


class WithTable(Apart):
    """Also a table, whose gradient is multiplied by a factor."""

    factor = 1.0

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.table = nn.Embedding(5000, 4, sparse=True)

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        rows = self.table(torch.arange(8))
        rows.register_hook(lambda gradient: gradient * self.factor)
        return super().forward(gradients) + rows.sum()


def _conserves_with_a_scaler(context: RankContext) -> None:
    """Of two optimizers one is skipped, for a table that overflows; both sent what was finite."""
    module = WithTable(["apart", "beside"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    compressor = thinwire.compress.top_k(0.1)
    model = ddp(module)
    sync = thinwire.attach(model, dense={"apart": compressor, "beside": compressor}, grad_scaler=scaler)
    of_both = {"apart": [module.apart], "beside": [module.beside, module.table.weight]}
    optimizers = {name: torch.optim.SGD(parameters, lr=0.0) for name, parameters in of_both.items()}
    gradients: dict[str, Tensor] = {}
    used: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in optimizers}

    def before_step(name: str) -> None:
        used[name].append((gradients[name], module.get_parameter(name).grad.clone()))

    for name, optimizer in optimizers.items():
        optimizer.register_step_pre_hook(lambda *_, name=name: before_step(name))
    draw = torch.Generator().manual_seed(context.rank)
    for module.factor in (1.0, float("inf"), 1.0):
        gradients.update({name: torch.randn(SHAPE, generator=draw) for name in optimizers})
        module.zero_grad()
        scaler.scale(model(gradients)).backward()
        for optimizer in optimizers.values():
            scaler.step(optimizer)
        scaler.update()
    assert [len(each) for each in used.values()] == [3, 2]
    states = sync.state_dict()["compress"]["states"]
    sync.detach()
    for name, pairs in used.items():
        given_, applied = (torch.stack(each).sum(0) for each in zip(*pairs, strict=True))
        both = torch.stack([given_, states[name]["error"]])
        dist.all_reduce(both)
        torch.testing.assert_close(applied + both[1] / 2, both[0] / 2, msg=name)


def test_of_two_optimizers_of_which_a_scaler_skips_one_each_keeps_what_it_did_not_apply() -> None:
    run_ranks(_conserves_with_a_scaler, world_size=2)
