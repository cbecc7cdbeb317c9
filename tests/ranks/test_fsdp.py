"""`attach` to models of FSDP2 on real ranks, beside the same training without thinwire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire
from thinwire.compress.base import Compressor, Identity, Parameter
from thinwire.lab.testbed.launch import RankContext, run_ranks

ROWS, WIDTH = 1200, 24


class Net(nn.Module):
    """A table, matrices of odd sizes, one bias that shards unevenly, and a layer that a batch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh())
        self.extra = nn.Linear(70, 70)
        self.second = nn.Sequential(nn.Linear(70, 51), nn.Tanh())
        self.last = nn.Linear(51, 3)

    def forward(self, ids: Tensor, extra: bool = True) -> Tensor:
        found = self.first(self.table(ids))
        found = self.extra(found) if extra else found
        return self.last(self.second(found))


@dataclass
class How:
    """What a training uses of FSDP."""

    shape: tuple[int, ...] = (2, 2)
    policy: dict[str, torch.dtype] = field(default_factory=dict)
    reshard: bool | int | None = None
    ignores: bool = False
    replicates: bool = False


def mesh_of(how: How) -> DeviceMesh:
    names = ("replicate", "shard")[-len(how.shape) :]
    return init_device_mesh("cpu", how.shape, mesh_dim_names=names)


def sharded(how: How, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = Net()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**how.policy)}
    if how.ignores:
        options["ignored_params"] = thinwire.embedding_tables(model)
    if not how.replicates:
        options["reshard_after_forward"] = how.reshard
    wrap = replicate if how.replicates else fully_shard
    for part in (model.first, model.second):
        wrap(part, **options)
    wrap(model, **options)
    return model


def batch(context: RankContext, step: int, size: int = 0) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(100 * step + context.rank)
    size = size or 5 + 3 * (step % 4)
    ids = torch.randint(0, ROWS, (size,), generator=data) % 60
    return ids, ids % 3


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, put together from their shards."""
    found = {}
    for name, parameter in model.named_parameters():
        full = getattr(parameter, "full_tensor", None)
        found[name] = (parameter if full is None else full()).detach().clone()
    return found


Steps = Callable[[RankContext, nn.Module, torch.optim.Optimizer, int], float]


def plain_step(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    ids, targets = batch(context, step)
    loss = nn.functional.cross_entropy(model(ids, extra=step % 3 != 2).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    context: RankContext, model: nn.Module, num_steps: int, one_step: Steps = plain_step, lr: float = 0.3
) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    losses = [one_step(context, model, optimizer, step) for step in range(num_steps)]
    return losses, whole(model)


def everywhere(tensor: Tensor) -> list[Tensor]:
    """What each rank has."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def assert_same_on_all_ranks(tensors: Sequence[Tensor]) -> None:
    for mine in tensors:
        assert all(torch.equal(other, mine) for other in everywhere(mine))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=rtol / 10, msg=lambda text, n=name: f"{n}: {text}"
        )


# --- exact


def compare(
    context: RankContext, how: How, one_step: Steps = plain_step, rtol: float = 1e-5, **options: Any
) -> thinwire.Synchronizer:
    """Train with and without, and compare; return the synchronizer, detached."""
    mesh = mesh_of(how)
    expected, parameters = train(context, stock(sharded(how, mesh), how), 5, one_step)
    model = sharded(how, mesh)
    if how.ignores and context.rank:  # what FSDP ignores has the values of rank 0
        nn.init.normal_(model.table.weight)
    sync = thinwire.attach(model, **options)
    losses, found = train(context, model, 5, one_step)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=rtol / 10)
    assert_close(found, parameters, rtol)
    assert_same_on_all_ranks(list(found.values()))
    assert sync.stats()["comm/steps"] == 5, sync.stats()
    sync.detach()
    return sync


def stock(model: nn.Module, how: How) -> nn.Module:
    """The model; what FSDP ignores is averaged by hand, which nobody does without `attach`."""
    if how.ignores:
        table = model.table.weight

        def average(parameter: Tensor) -> None:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

        table.register_post_accumulate_grad_hook(average)
    return model


def _exact(context: RankContext, hows: Sequence[How]) -> None:
    for how in hows:
        stats = compare(context, how).stats()
        assert 0 < stats["comm/bytes_sent"] < 0.6 * stats["comm/bytes_dense"], (how, stats)  # rows of the table


@pytest.mark.parametrize(
    "hows",
    [
        [How(), How(reshard=False), How(ignores=True), How(reshard=2)],
        [How((4,), ignores=True), How((4,), replicates=True), How((4,), replicates=True, ignores=True)],
    ],
    ids=["replicas of shards", "shards or replicas"],
)
def test_an_attached_model_trains_like_one_that_is_not(hows: list[How]) -> None:
    run_ranks(_exact, hows, world_size=4, timeout_seconds=60)


# --- compressed


def identity(parameter: Parameter) -> Identity | None:
    """Every matrix travels as if it were compressed, and loses nothing."""
    return Identity() if len(parameter.shape) == 2 else None


def _lossless_code(context: RankContext, hows: Sequence[How]) -> None:
    for how in hows:
        sync = compare(context, how, compress=identity)
        assert sync.stats()["compress/parameters"] >= 3


@pytest.mark.parametrize("hows", [[How(), How((4,)), How((4,), ignores=True), How((4,), replicates=True)]])
def test_a_code_that_loses_nothing_trains_like_stock(hows: list[How]) -> None:
    run_ranks(_lossless_code, hows, world_size=4, timeout_seconds=60)


def _compressed(context: RankContext, how: How, compressor: Compressor, ratio: float) -> None:
    mesh = mesh_of(how)
    expected, _ = train(context, sharded(how, mesh), 20)
    model = sharded(how, mesh)
    sync = thinwire.attach(model, compress=compressor)
    losses, found = train(context, model, 20)
    mean = torch.tensor([losses, expected])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    first, last = mean[:, :4].mean(1), mean[:, -4:].mean(1)
    assert last[1] < 0.9 * first[1]
    assert last[0] < first[0] - 0.6 * (first[1] - last[1]), (first, last)
    assert_same_on_all_ranks(list(found.values()))
    rows = [row for row in sync.table() if row["kind"] == "compressed"]
    assert len(rows) >= 2
    for row in rows:
        assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=0.01, abs=64), row
        assert row["bytes"] < ratio * row["dense_bytes"], row
    sync.detach()


def _all_compressed(context: RankContext) -> None:
    compress = thinwire.compress
    for how in (How(), How((4,), replicates=True), How((4,))):
        _compressed(context, how, compress.power_sgd(2), 0.6)
        _compressed(context, how, compress.bf16(), 0.6)
        _compressed(context, how, compress.top_k(0.05), 0.4)


def test_compressed_shards_train_with_the_bytes_that_were_predicted() -> None:
    run_ranks(_all_compressed, world_size=4, timeout_seconds=100)
