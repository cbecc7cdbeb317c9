"""`attach` to models of FSDP2 on real ranks, beside the same training without thinwire."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire.compress.base import Compressor, Identity, Parameter
from thinwire.gradients.module import is_dtensor
from thinwire.gradients.sharded.layout import Replicas
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

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
    twice = one_step is kept or (one_step is accumulated and len(how.shape) == 1)  # backward passes that synchronize
    assert sync.stats()["comm/steps"] == (10 if twice else 5), sync.stats()
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


MORE = (pytest.mark.slow, pytest.mark.timeout(180))


@pytest.mark.parametrize(
    "hows",
    [
        [How()],
        pytest.param([How((4,), ignores=True)], marks=MORE),
        pytest.param([How(reshard=False), How(ignores=True), How(reshard=2)], marks=MORE),
        pytest.param([How((4,), replicates=True), How((4,), replicates=True, ignores=True)], marks=MORE),
    ],
    ids=["shards", "ignored", "replicas of shards", "replicas"],
)
def test_an_attached_model_trains_like_one_that_is_not(hows: list[How]) -> None:
    run_ranks(_exact, hows, world_size=4, timeout_seconds=60)


def _other_seeds(context: RankContext) -> None:
    mesh = mesh_of(How((2, 1)))
    for is_alike in (True, False):
        model = sharded(How((2, 1)), mesh)
        if not is_alike and context.rank == 1:
            with torch.no_grad():
                model.last.bias.add_(1.0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            thinwire.attach(model).detach()
        told = [str(one.message) for one in seen if "stay different" in str(one.message)]
        assert len(told) == (0 if is_alike else 1), told


def test_replicas_that_differ_are_told_on_all_ranks() -> None:
    run_ranks(_other_seeds, world_size=2, timeout_seconds=60)


# --- compressed


def identity(parameter: Parameter) -> Identity | str:
    """Every matrix travels as if it were compressed, and loses nothing."""
    return Identity() if len(parameter.shape) == 2 else "native"


def _lossless_code(context: RankContext, hows: Sequence[How]) -> None:
    for how in hows:
        sync = compare(context, how, dense=identity)
        assert sync.stats()["compress/parameters"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "hows",
    [[How(), How((4,))], pytest.param([How((4,), ignores=True), How((4,), replicates=True)], marks=MORE)],
    ids=["both", "more"],
)
def test_a_code_that_loses_nothing_trains_like_stock(hows: list[How]) -> None:
    run_ranks(_lossless_code, hows, world_size=4, timeout_seconds=60)


def _compressed(context: RankContext, how: How, compressor: Compressor, ratio: float) -> None:
    mesh = mesh_of(how)
    expected, _ = train(context, sharded(how, mesh), 20)
    model = sharded(how, mesh)
    sync = thinwire.attach(model, dense=compressor)
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


def _some_compressed(context: RankContext, hows: Sequence[tuple[How, str]]) -> None:
    compressors = {
        "power_sgd": (thinwire.compress.power_sgd(2), 0.6),
        "bf16": (thinwire.compress.bf16(), 0.6),
        "top_k": (thinwire.compress.top_k(0.05), 0.4),
        "power_sgd, mxfp4": (thinwire.compress.power_sgd(3, values=thinwire.compress.mxfp4()), 0.2),
        "mxfp8": (thinwire.compress.mxfp8(), 0.4),
        "mxfp4": (thinwire.compress.mxfp4(), 0.3),
    }
    for how, name in hows:
        _compressed(context, how, *compressors[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "hows",
    [
        [(How(), "power_sgd"), (How((4,)), "top_k")],
        pytest.param([(How(), "bf16"), (How((4,)), "bf16"), (How((4,), replicates=True), "bf16")], marks=MORE),
        pytest.param([(How(), "top_k"), (How((4,)), "power_sgd")], marks=MORE),
        [(How((4,)), "mxfp8"), (How(), "mxfp4"), (How((4,)), "power_sgd, mxfp4")],
    ],
    ids=["both", "bf16", "more", "microscaling"],
)
def test_compressed_shards_train_with_the_bytes_that_were_predicted(hows: list[tuple[How, str]]) -> None:
    run_ranks(_some_compressed, hows, world_size=4, timeout_seconds=150)


# --- coded without loss


def local_gradients(context: RankContext, how: How, model: nn.Module, step: int) -> dict[str, Tensor]:
    """The gradients of this rank's batch, in the dtype in which FSDP reduces them, by a model that nobody sharded."""
    plain = Net().to(how.policy.get("param_dtype", torch.float32))
    plain.load_state_dict(whole(model))
    ids, targets = batch(context, step)
    nn.functional.cross_entropy(plain(ids, extra=step % 3 != 2).float(), targets).backward()
    dtype = how.policy.get("reduce_dtype") or how.policy.get("param_dtype", torch.float32)
    found = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return {name: gradient.to(dtype) for name, gradient in found.items() if gradient is not None}


def in_rank_order(gradient: Tensor, how: How) -> Tensor:
    """The mean of a gradient over shards, and that over replicas, each added in rank order."""
    parts = everywhere(gradient)
    for size in reversed(how.shape):
        groups = [parts[start : start + size] for start in range(0, len(parts), size)]
        parts = []
        for group in groups:
            total = group[0].to(torch.float32)
            for part in group[1:]:
                total = total + part.to(torch.float32)
            parts.append((total * (1.0 / size)).to(gradient.dtype))
    return parts[0].float()


def _lossless(context: RankContext, hows: Sequence[tuple[How, bool]]) -> None:
    for how, compresses in hows:
        mesh = mesh_of(how)
        model = sharded(how, mesh)
        others = {"first.0.weight": Identity()} if compresses else {}
        sync = thinwire.attach(model, dense={**others, "*": "lossless"})
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        for step in range(4):
            expected = local_gradients(context, how, model, step)
            ids, targets = batch(context, step)
            nn.functional.cross_entropy(model(ids, extra=step % 3 != 2).float(), targets).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    assert name not in expected
                elif name not in others and not (len(how.shape) == 2 and name == "table.weight"):
                    assert torch.equal(parameter.grad.full_tensor(), in_rank_order(expected[name], how)), (how, name)
            optimizer.step()
            optimizer.zero_grad()
        stats = sync.stats()
        (row,) = [row for row in sync.table() if row["scheme"] == "lossless"]
        assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=0.5), (
            row
        )  # zeros of the table are in one place
        assert stats["lossless/values"] > 0
        full = torch.finfo(how.policy.get("reduce_dtype", torch.float32)).bits
        full *= 1 if len(how.shape) == 1 and not how.replicates else 2
        assert 0 < stats["lossless/bits_per_value"] < 1.05 * full
        sync.detach()
        before = sync.stats()["lossless/values"]
        train(context, model, 1)
        assert sync.stats()["lossless/values"] == before


HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
WIDE = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "hows"),
    [
        (3, [(How((3,)), False), (How((3,), HALF), False), (How((3,)), True)]),
        pytest.param(4, [(How((2, 2)), False), (How((2, 2), WIDE), False)], marks=MORE),
        pytest.param(4, [(How((4,), WIDE), True), (How((4,), replicates=True), False)], marks=MORE),
    ],
    ids=["shards", "replicas of shards", "more"],
)
def test_lossless_means_are_those_in_rank_order(world_size: int, hows: list[tuple[How, bool]]) -> None:
    run_ranks(_lossless, hows, world_size=world_size, timeout_seconds=60)


# --- the settings of FSDP


def accumulated(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Three micro-batches: one not reduced at all, one not over replicas, one over all; clipped."""
    total = 0.0
    for part in range(3):
        model.set_requires_gradient_sync(part > 0)
        model.set_requires_all_reduce(part > 1)
        ids, targets = batch(context, 10 * step + part)
        loss = nn.functional.cross_entropy(model(ids).float(), targets)
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_([parameter for parameter in model.parameters() if is_dtensor(parameter)], 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return total


def kept(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Gradients of two backward passes, both reduced, are added up."""
    total = plain_step(context, model, NoStep(), 2 * step)
    return total + plain_step(context, model, optimizer, 2 * step + 1)


class NoStep:
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...


def checkpointed(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    if "recomputed" not in vars(model):
        model.recomputed = True
        forward = model.first.forward
        model.first.forward = lambda found: checkpoint(forward, found, use_reentrant=False)
    return plain_step(context, model, optimizer, step)


def _settings(context: RankContext, hows: Sequence[How]) -> None:
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    wide = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for how in hows:
        for one_step in (accumulated, kept, checkpointed):
            ignores = one_step is not accumulated or len(how.shape) == 1  # by hand, stock averages in each backward
            compare(context, replace(how, ignores=ignores and one_step is checkpointed), one_step)
            compare(context, replace(how, ignores=False), one_step, dense=identity)
        for policy in (half, wide):
            compare(context, replace(how, policy=policy), rtol=2e-2)
            compare(context, replace(how, policy=policy), rtol=2e-2, dense=identity)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", [How(), How((4,))], ids=["replicas of shards", "shards"])
def test_settings_of_fsdp_mean_the_same_when_attached(how: How) -> None:
    run_ranks(_settings, [how], world_size=4, timeout_seconds=170)


def _one_setting(context: RankContext) -> None:
    compare(context, How((2, 1)), accumulated)
    compare(context, How((2, 1), policy={"reduce_dtype": torch.bfloat16}), rtol=2e-2, dense=identity)
    for how in (How((2, 1)), How((2,))):
        found = []
        for sums, attaches in ((False, False), (True, False), (True, True)):
            model = sharded(how, mesh_of(how))
            for module in (model, model.first, model.second) if sums else ():
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            sync = thinwire.attach(model, dense=identity) if attaches else None
            ids, targets = batch(context, 0)
            nn.functional.cross_entropy(model(ids), targets).backward()
            found.append(model.second[0].weight.grad.full_tensor())
            if sync is not None:
                sync.detach()
        torch.testing.assert_close(found[1], 2 * found[0])
        torch.testing.assert_close(found[2], found[1])


@pytest.mark.slow
def test_accumulation_half_precision_and_divisors() -> None:
    run_ranks(_one_setting, world_size=2, timeout_seconds=60)


# --- the life of a synchronizer


def _lives(context: RankContext, directory: str) -> None:
    how = How((2, 1), ignores=True)
    mesh = mesh_of(how)
    stock_infos = [group.mesh_info for group in groups_of(sharded(how, mesh))]
    model = sharded(how, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain_step(context, model, optimizer, 0)  # attached after FSDP's lazy start
    sync = thinwire.attach(model, dense=thinwire.compress.top_k(0.1))
    with sync.no_sync():
        plain_step(context, model, NoStep(), 1)
    plain_step(context, model, optimizer, 2)
    assert sync.stats()["comm/steps"] == 1
    state = {"model": model.state_dict(), str(context.rank): sync.state_dict()}
    dcp.save(state, checkpoint_id=directory)
    losses = [plain_step(context, model, optimizer, step) for step in (3, 4)]
    state = {"model": model.state_dict(), str(context.rank): sync.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    model.load_state_dict(state["model"])
    sync.load_state_dict(state[str(context.rank)])
    assert sync.stats()["comm/steps"] == 1
    assert [plain_step(context, model, optimizer, step) for step in (3, 4)] == losses
    with pytest.raises(ValueError, match=r"of this model already"):
        thinwire.attach(model)
    sync.detach()
    sync.detach()
    for group, info in zip(groups_of(model), stock_infos, strict=True):
        assert type(group.mesh_info) is type(info)
        assert not isinstance(group.mesh_info.replicate_process_group, Replicas)
        assert "post_backward" not in vars(group)
    sent = sync.stats()["comm/bytes_sent"]
    plain_step(context, model, optimizer, 5)
    assert sync.stats()["comm/bytes_sent"] == sent
    for attaches in (False, True):  # nothing of thinwire keeps a model that is gone
        model = sharded(how, mesh)
        sync = thinwire.attach(model) if attaches else None
        plain_step(context, model, NoStep(), 6)
        gone = weakref.ref(model)
        del model, sync
        gc.collect()
        assert gone() is None, attaches


def groups_of(model: nn.Module) -> list[Any]:
    return [module._get_fsdp_state()._fsdp_param_groups[0] for module in (model, model.first, model.second)]


@pytest.mark.slow
def test_state_and_detach(tmp_path: Path) -> None:
    run_ranks(_lives, str(tmp_path), world_size=2, timeout_seconds=60)


def _refused(context: RankContext) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def refuses(model: nn.Module, pattern: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=pattern):
            thinwire.attach(model, **options)

    def whole_net(**options: Any) -> nn.Module:
        return fully_shard(Net(), mesh=mesh, **options)

    refuses(whole_net(), "pass the compressor itself as dense=", dense=thinwire.fuse.layerwise())
    mixed = {"first.*": "lossless", "*": "native"}
    refuses(whole_net(), "FSDP reduces the gradients of several parameters as one", dense=mixed)
    refuses(whole_net(), "leave out process_group=", process_group=mesh["shard"])
    parts = Net()
    fully_shard(parts.first, mesh=mesh)
    fully_shard(parts.second, mesh=mesh)
    refuses(parts, "and not on the whole")
    sparse = Net()
    sparse.table = nn.Embedding(ROWS, WIDTH, sparse=True)
    refuses(fully_shard(sparse, mesh=mesh), r"ignored_params=thinwire\.embedding_tables")
    with torch.device("meta"):
        empty = Net()
    refuses(fully_shard(empty, mesh=mesh), "meta device")
    alone = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    refuses(fully_shard(Net(), mesh=alone), r"leave out .by\(\)", dense=thinwire.compress.bf16().by("all_gather"))
    wrapper = nn.Sequential(whole_net())
    sync = thinwire.attach(wrapper)
    assert "FSDPNet" in repr(sync)
    sync.detach()


def test_what_cannot_be_synchronized_is_refused_with_what_to_do() -> None:
    run_ranks(_refused, world_size=2, timeout_seconds=60)


def _unsharded(context: RankContext) -> None:
    """`attach` to models whose modules have whole parameters."""
    data = torch.Generator().manual_seed(context.rank)
    ids = torch.randint(0, ROWS, (5,), generator=data)
    for how in (How(), How((4,))):
        mesh = mesh_of(how)
        for leave in ("evaluation", "unshard"):
            gradients = []
            for attached in (False, True):
                model = sharded(how, mesh)
                if leave == "unshard":
                    model.unshard()
                else:
                    with torch.no_grad():
                        model(ids)
                sync = thinwire.attach(model) if attached else None
                model(ids).square().sum().backward()
                gradients.append([entry.grad.full_tensor() for entry in model.parameters() if entry.grad is not None])
                if sync is not None:
                    sync.detach()
            for expected, found in zip(*gradients, strict=True):
                torch.testing.assert_close(found, expected, msg=f"{how} {leave}")


@pytest.mark.slow
def test_attach_when_modules_have_whole_parameters() -> None:
    run_ranks(_unsharded, world_size=4, timeout_seconds=100)


def _no_alarm(context: RankContext) -> None:
    """The recipes of torch's tutorials for a checkpoint and for an optimizer in backward warn of nothing."""
    ids = torch.randint(0, ROWS, (5,), generator=torch.Generator().manual_seed(context.rank))
    model = sharded(How((2,)), mesh_of(How((2,))))
    sync = thinwire.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer = torch.optim.AdamW(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        model(ids).sum().backward()
        optimizer.step()
        optimizers = {entry: torch.optim.SGD([entry], lr=0.1) for entry in model.parameters()}
        for entry in optimizers:
            entry.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
        model(ids).sum().backward()
    model.zero_grad()
    for entry in model.parameters():
        entry.grad = torch.ones_like(entry)
    optimizer.step()
    with pytest.warns(UserWarning, match="did not synchronize: .* Call the attached model itself"):
        optimizer.step()
    sync.detach()


@pytest.mark.slow
def test_no_false_alarm_of_steps_that_are_not_made_after_backward() -> None:
    run_ranks(_no_alarm, world_size=2, timeout_seconds=60)


def _knows_the_group(context: RankContext) -> list[int]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=thinwire.embedding_tables(model))
    sync = thinwire.attach(model)
    model(torch.tensor([context.rank])).sum().backward()
    ranks = dist.get_process_group_ranks(sync._inner.native_group())
    sync.detach()
    return ranks


def test_torch_knows_the_group_of_what_fsdp_gathers_also_beside_a_sparse_table() -> None:
    """It looks the group up to log an error, which it would replace by one about the group."""
    for outcome in run_ranks(_knows_the_group, world_size=2, timeout_seconds=60):
        assert outcome.value == [0, 1]
