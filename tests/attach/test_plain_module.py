"""`attach` to plain modules on real ranks: parameters that are used by some, by nobody, frozen, or of odd kinds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """A table of either kind and layers, of which a batch uses what it is told to."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 16, sparse=sparse)
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 3)

    def forward(self, ids: Tensor, used: tuple[str, ...] = ("table", "second")) -> Tensor:
        found = self.table(ids) if "table" in used else torch.ones(len(ids), 16)
        found = torch.tanh(self.first(found))
        if "second" in used:
            found = torch.tanh(self.second(found))
        return self.last(found)


def batch(context: RankContext, step: int) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + context.rank)
    return torch.randint(0, 600, (12,), generator=data)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def everywhere(tensor: Tensor) -> list[Tensor]:
    """What each rank has."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def assert_same_on_all_ranks(module: nn.Module) -> None:
    for parameter in module.parameters():
        mine = parameter.detach()
        assert all(torch.equal(other, mine) for other in everywhere(mine))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {
        name: grad.to_dense().clone() if grad is not None and grad.is_sparse else grad for name, grad in found.items()
    }


def local_gradients(make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    module = seeded(make)
    loss(module).backward()
    return gradients(module)


def assert_mean(found: Tensor | None, local: Tensor | None, like: Tensor) -> None:
    """The mean over ranks, zeros for one that has none; None if all have none."""
    ranks = everywhere(torch.tensor([float(local is not None)]))
    if not any(map(bool, ranks)):
        assert found is None
        return
    mine = torch.zeros_like(like) if local is None else local.to_dense()
    expected = torch.stack(everywhere(mine)).mean(0)
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert all(torch.equal(other, found) for other in everywhere(found))


# --- used by some ranks, and by none


def _partly_used(context: RankContext, sparse: bool, options: dict[str, Any]) -> None:
    """Which rank uses what, step by step; in the last two one thing is used by nobody."""
    usage = [
        ("table", "second"),
        ("table",) if context.rank == 0 else ("second",),
        ("second",),
        ("table",),
        ("table", "second") if context.rank == 1 else (),
    ]
    module = seeded(lambda: Net(sparse))
    sync = thinwire.attach(module, **options)
    for step, used in enumerate(usage):
        module.zero_grad()

        def loss(model: nn.Module, used: tuple[str, ...] = used, step: int = step) -> Tensor:
            return model(batch(context, step), used).square().sum()

        loss(module).backward()
        local = local_gradients(lambda: Net(sparse), loss)
        for name, gradient in gradients(module).items():
            assert_mean(gradient, local[name], module.get_parameter(name))
    assert sync.stats()["comm/steps"] == len(usage)
    sync.detach()


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("scheme", ["auto", "zen", "dense", "omnireduce"])
def test_what_any_rank_used_has_the_mean_and_what_none_used_has_no_gradient(scheme: str, sparse: bool) -> None:
    run_ranks(_partly_used, sparse, {"rows": scheme}, world_size=2, timeout_seconds=60)


def _compressed_and_unused(context: RankContext) -> None:
    module = seeded(Net)
    sync = thinwire.attach(module, dense=thinwire.compress.top_k(0.1))
    module(batch(context, 0), ("table",)).sum().backward()
    assert module.second.weight.grad is None
    assert module.second.bias.grad is None
    module.zero_grad()
    module(batch(context, 0), ("second",) if context.rank else ()).sum().backward()
    for parameter in module.second.parameters():
        assert parameter.grad is not None
        assert all(torch.equal(other, parameter.grad) for other in everywhere(parameter.grad))
    sync.detach()


def test_unused_parameters_that_are_compressed() -> None:
    run_ranks(_compressed_and_unused, world_size=2, timeout_seconds=60)


def _zero_gradients(context: RankContext) -> None:
    """A gradient of zeros on one rank, and none on the other: all must treat the parameter alike."""
    for scheme in ("zen", "dense", "omnireduce"):
        module = seeded(Net)
        sync = thinwire.attach(module, scheme)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            used = ("table", "second") if context.rank == 0 else ()
            (module(batch(context, 0), used) * 0.0).sum().backward()
            optimizer.step()
            assert module.table.weight.grad is not None
            assert module.second.weight.grad is not None
        assert_same_on_all_ranks(module)
        sync.detach()


def test_gradients_of_zeros_are_gradients() -> None:
    run_ranks(_zero_gradients, world_size=2, timeout_seconds=60)


# --- frozen and unfrozen


def _frozen(context: RankContext) -> None:
    """Decay must not move what is frozen; what is unfrozen is synchronized from then on."""
    module = seeded(Net)
    module.second.requires_grad_(False)
    sync = thinwire.attach(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
    bytes_dense = []
    for step in range(8):
        optimizer.zero_grad()
        if step == 2:
            module.second.requires_grad_(True)
            module.first.requires_grad_(False)
        if step == 5:
            module.first.requires_grad_(True)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        module(batch(context, step)).square().sum().backward()
        optimizer.step()
        assert_same_on_all_ranks(module)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, before[name]) == (not parameter.requires_grad), (step, name)
        bytes_dense.append(sync.stats()["comm/bytes_dense"])
    assert bytes_dense[1] - bytes_dense[0] < bytes_dense[7] - bytes_dense[6], "what is frozen does not travel"
    sync.detach()


def test_parameters_are_frozen_and_unfrozen_after_attach() -> None:
    run_ranks(_frozen, world_size=2, timeout_seconds=60)


def _frozen_in_between(context: RankContext) -> None:
    """As a GAN does: the graph is there, but torch accumulates no gradient."""
    module = seeded(Net)
    sync = thinwire.attach(module)
    for step in range(3):
        module.zero_grad()
        module.second.requires_grad_(True)
        loss = module(batch(context, step)).square().sum()
        module.second.requires_grad_(step != 1)
        loss.backward()
        for parameter in module.parameters():
            assert (parameter.grad is None) == (not parameter.requires_grad)
            if parameter.grad is not None:
                assert all(torch.equal(other, parameter.grad) for other in everywhere(parameter.grad))
    sync.detach()


@pytest.mark.slow
def test_what_is_frozen_after_the_forward_stays_without_gradient() -> None:
    run_ranks(_frozen_in_between, world_size=2, timeout_seconds=60)


def _frozen_while_it_accumulates(context: RankContext) -> None:
    """The optimizer steps by what a local pass has left, so that is averaged, too; the next pass is without it."""
    module = seeded(Net)
    sync = thinwire.attach(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with sync.no_sync():
        module(batch(context, 0)).square().sum().backward()
    local = everywhere(module.second.weight.grad.clone())
    assert not torch.equal(*local)
    module.second.requires_grad_(False)
    for step in (1, 2):
        module(batch(context, step)).square().sum().backward()
        torch.testing.assert_close(module.second.weight.grad, sum(local) / 2)
        optimizer.step()
        assert_same_on_all_ranks(module)
    assert len(sync._plug.order) == len([*module.parameters()]) - len([*module.second.parameters()])
    sync.detach()


def test_what_is_frozen_while_it_accumulates_is_averaged() -> None:
    run_ranks(_frozen_while_it_accumulates, world_size=2, timeout_seconds=60)


def _frozen_on_one_rank(context: RankContext) -> None:
    module = seeded(Net)
    thinwire.attach(module)
    module(batch(context, 0)).sum().backward()
    module.second.requires_grad_(context.rank != 0)
    with pytest.raises(thinwire.MismatchError, match="which parameters are trained"):
        module(batch(context, 0)).sum().backward()


def test_ranks_that_freeze_different_parameters_all_hear_of_it() -> None:
    run_ranks(_frozen_on_one_rank, world_size=2, timeout_seconds=60)


def _loaded_on_one_rank(context: RankContext) -> None:
    """A state has the order in which gradients become ready, which is not that of registration here."""
    module = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    module.forward = lambda batch: module[1](module[0](module[2](batch)))
    sync = thinwire.attach(module)
    module(torch.ones(2, 4)).sum().backward()
    state = sync.state_dict()
    sync.detach()
    sync = thinwire.attach(module, timeout=timedelta(seconds=20))
    if context.rank == 0:
        sync.load_state_dict(state)
    with pytest.raises(thinwire.MismatchError, match=r"on ranks \[0\] alone.*load a state"):
        module(torch.ones(2, 4)).sum().backward()


def test_ranks_of_which_one_has_loaded_a_state_all_hear_of_it() -> None:
    run_ranks(_loaded_on_one_rank, world_size=2, timeout_seconds=60)


def _unfrozen_under_ddp(context: RankContext) -> None:
    module = seeded(Net)
    module.second.requires_grad_(False)
    model = DistributedDataParallel(module)
    sync = thinwire.attach(model)
    model(batch(context, 0)).sum().backward()
    module.second.requires_grad_(True)
    with pytest.warns(UserWarning, match="unfrozen after DistributedDataParallel was built"):
        model(batch(context, 0)).sum().backward()
    sync.detach()
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    model = DistributedDataParallel(module)
    sync = thinwire.attach(model)
    sync.watch_lane(lambda started, ended: None)
    module.requires_grad_(True)
    with pytest.warns(UserWarning, match="unfrozen after DistributedDataParallel was built"):
        model(torch.ones(2, 4)).sum().backward()
    sync.detach()


def test_ddp_does_not_synchronize_what_is_unfrozen_and_that_is_said() -> None:
    run_ranks(_unfrozen_under_ddp, world_size=2, timeout_seconds=60)


# --- gradients that are changed, or used up, before they are sent


def _stale(context: RankContext, as_view: bool, replaces: bool) -> None:
    """A hook on the AccumulateGrad node before that of DDP, as apex and FSDP have them, that edits the gradient."""
    found = []
    for attached in (False, True):
        module = seeded(Net)
        weight = module.table.weight
        node = get_gradient_edge(weight).node

        def edit(*_: object, weight: nn.Parameter = weight) -> None:
            decay = 0.01 * weight.detach()
            weight.grad = weight.grad + decay if replaces else weight.grad.add_(decay)

        node.register_hook(edit)
        model = DistributedDataParallel(module, gradient_as_bucket_view=as_view)
        sync = thinwire.attach(model, "zen") if attached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(context, step)).square().mean().backward()
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        if sync is not None:
            sync.detach()
    for mine, stock in zip(*found, strict=True):
        torch.testing.assert_close(mine, stock, atol=1e-7, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("as_view", [False, True])
def test_rows_are_not_known_when_a_hook_on_the_node_edits_the_gradient(as_view: bool, replaces: bool) -> None:
    run_ranks(_stale, as_view, replaces, world_size=2, timeout_seconds=60)


def _steps_in_a_hook(context: RankContext, when: str, zeroes: bool) -> None:
    module = seeded(Net)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in module.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        if zeroes:
            optimizers[parameter].zero_grad()

    if when == "after":
        thinwire.attach(module)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    if when == "before":
        thinwire.attach(module)
    with pytest.raises(thinwire.ThinwireError, match="used up before they are averaged"):
        module(batch(context, 0)).sum().backward()


@pytest.mark.few(1)
@pytest.mark.parametrize("zeroes", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_that_steps_in_a_hook_is_refused(when: str, zeroes: bool) -> None:
    run_ranks(_steps_in_a_hook, when, zeroes, world_size=2, timeout_seconds=60)


# --- re-entrant checkpointing


class Checkpointed(Net):
    """Segments that run backward passes of their own inside of that of the loss; one is used twice."""

    def forward(self, ids: Tensor, used: tuple[str, ...] = ()) -> Tensor:
        found = self.table(ids)
        for segment in (self.first, self.second, self.second, self.last):
            found = checkpoint(lambda found, segment=segment: torch.tanh(segment(found)), found, use_reentrant=True)
        return found


def _checkpointed(context: RankContext, sparse: bool) -> None:
    module = seeded(lambda: Checkpointed(sparse))
    sync = thinwire.attach(module, "zen")
    for step in range(3):
        module.zero_grad()
        loss: Callable[[nn.Module], Tensor] = lambda model, step=step: model(batch(context, step)).square().sum()  # noqa: E731
        loss(module).backward()
        local = local_gradients(lambda: Checkpointed(sparse), loss)
        for name, gradient in gradients(module).items():
            assert_mean(gradient, local[name], module.get_parameter(name))
    stats = sync.stats()
    assert stats["comm/steps"] == 3
    dense = sum(parameter.numel() + 1 for parameter in module.parameters()) * 4
    assert stats["comm/bytes_dense"] <= 3 * dense, "each gradient travels once"
    sync.detach()


@pytest.mark.few(1)
@pytest.mark.parametrize("sparse", [False, True])
def test_reentrant_checkpointing_is_one_synchronization(sparse: bool) -> None:
    run_ranks(_checkpointed, sparse, world_size=2, timeout_seconds=60)


class Segmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 16, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids)
        for layer in self.layers:
            found = checkpoint(lambda found, layer=layer: torch.tanh(layer(found)), found, use_reentrant=True)
        return found


def _checkpointed_ddp(context: RankContext, static_graph: bool) -> float:
    model = DistributedDataParallel(seeded(Segmented), static_graph=static_graph, bucket_cap_mb=0.001)
    sync = thinwire.attach(model)
    for step in range(3):
        model.zero_grad()
        model(batch(context, step)).square().sum().backward()
    steps = sync.stats()["comm/steps"]
    sync.detach()
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("static_graph", [False, True])
def test_steps_of_ddp_with_reentrant_checkpointing_are_counted_once(static_graph: bool) -> None:
    found = run_ranks(_checkpointed_ddp, static_graph, world_size=2, timeout_seconds=60)
    assert [result.value for result in found] == [3.0, 3.0]


# --- gradients and parameters of odd kinds


class SparseProduct(torch.autograd.Function):
    """Rows of a weight times a number, with a sparse gradient, which thinwire cannot foresee."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids] * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(ids[None], gradient * 2.0, ctx.shape), None


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50, 4))
        self.layer = nn.Linear(4, 2)

    def forward(self, ids: Tensor, sparse: bool = True) -> Tensor:
        found = SparseProduct.apply(self.weight, ids) if sparse else self.weight[ids] * 2.0
        return self.layer(found)


def _is_sparse(step: int, rank: int, first: str) -> bool:
    """On all ranks, on none, on either of them; beginning with any of these."""
    order = {"all": 3, "none": 0, "one": 1}[first]
    return bool((order + (0, 3, 1, 0, 2, 3)[step]) % 4 & (1 << rank))


def _own_sparse(context: RankContext, first: str) -> None:
    module = seeded(Own)
    sync = thinwire.attach(module)
    for step in range(6):
        module.zero_grad()
        sparse = _is_sparse(step, context.rank, first)
        loss: Callable[[nn.Module], Tensor] = lambda model, step=step, sparse=sparse: (  # noqa: E731
            model(batch(context, step) % 50, sparse).square().sum()
        )
        loss(module).backward()
        assert module.weight.grad is not None
        assert module.weight.grad.is_sparse == sparse
        local = local_gradients(Own, loss)
        for name, gradient in gradients(module).items():
            assert_mean(gradient, local[name], module.get_parameter(name))
    kinds = {str(row["name"]): row["kind"] for row in sync.table()}
    assert (kinds.get("weight") == "sparse gradient") == (first == "all")
    sync.detach()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["all", "none", "one"])
def test_sparse_gradients_of_functions_of_users(first: str) -> None:
    run_ranks(_own_sparse, first, world_size=2, timeout_seconds=60)


class Remainders(nn.Module):
    """The quotient-remainder embedding of DLRM, and a hybrid gradient of two sparse dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.quotients = nn.Parameter(torch.randn(80, 16))
        self.remainders = nn.Parameter(torch.randn(10, 16))
        self.pairs = nn.Parameter(torch.randn(20, 30, 2))

    def forward(self, ids: Tensor) -> Tensor:
        bags = torch.arange(0, len(ids), 2)
        high = F.embedding_bag(ids // 10, self.quotients, bags, mode="sum", sparse=True)
        low = F.embedding_bag(ids % 10, self.remainders, bags, mode="sum", sparse=True)
        return (high * low).square().sum() + Pairs.apply(self.pairs, ids % 20, ids % 30).square().sum()


class Pairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.shape = weight.shape
        return weight[first, second]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.sparse_coo_tensor(torch.stack(ctx.saved_tensors), gradient, ctx.shape), None, None


def _remainders(context: RankContext) -> None:
    module = seeded(Remainders)
    sync = thinwire.attach(module)
    for step in range(3):
        module.zero_grad()
        loss: Callable[[nn.Module], Tensor] = lambda model, step=step: model(batch(context, step))  # noqa: E731
        loss(module).backward()
        assert [entry.grad.sparse_dim() for entry in module.parameters() if entry.grad is not None] == [1, 1, 2]
        local = local_gradients(Remainders, loss)
        for name, gradient in gradients(module).items():
            assert_mean(gradient, local[name], module.get_parameter(name))
    assert {str(row["kind"]) for row in sync.table()} >= {"sparse gradient"}
    sync.detach()


def test_quotient_and_remainder_tables_of_a_user() -> None:
    run_ranks(_remainders, world_size=2, timeout_seconds=60)


class Odd(nn.Module):
    """Parameters that are complex, not contiguous, and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 16)
        self.table.weight = nn.Parameter(torch.randn(16, 600).t())
        self.complex = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.narrow = nn.Embedding(600, 0)
        self.filters = nn.Parameter(torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last))
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("rare", torch.randn(2, 3).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.randint(9, (3, 2), dtype=torch.int16).t())

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids).sum() * (self.complex * self.complex).abs().sum()
        return found + self.empty.sum() + self.narrow(ids).sum() + (self.filters * len(ids) * ids[0]).square().sum()


def _odd(context: RankContext, wrapped: bool) -> None:
    module = seeded(Odd)
    if context.rank and not wrapped:
        for buffer in module.buffers():
            buffer.zero_()
    # Stock DDP broadcasts no such buffers over Gloo.
    model = DistributedDataParallel(module, init_sync=False, broadcast_buffers=False) if wrapped else module
    sync = thinwire.attach(model)
    for buffer, expected in zip(module.buffers(), seeded(Odd).buffers(), strict=True):
        assert torch.equal(buffer.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    for step in range(2):
        model.zero_grad()
        loss: Callable[[nn.Module], Tensor] = lambda model, step=step: model(batch(context, step))  # noqa: E731
        loss(model).backward()
        local = local_gradients(Odd, loss)
        for name, gradient in gradients(module).items():
            expected = local[name]
            assert gradient is not None
            assert expected is not None
            mine, theirs = (
                torch.view_as_real(each) if each.is_complex() else each.contiguous() for each in (gradient, expected)
            )
            mean = torch.stack(everywhere(theirs)).mean(0)
            torch.testing.assert_close(mine, mean, atol=1e-4, rtol=1e-5)
    sync.detach()


@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_of_odd_kinds(wrapped: bool) -> None:
    run_ranks(_odd, wrapped, world_size=2, timeout_seconds=60)


class Parametrized(nn.Module):
    """An embedding whose weight is made anew whenever it is read, which is counted."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, weight: Tensor) -> Tensor:
            self.count += 1
            return F.dropout(weight, 0.1)

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 16, sparse=sparse)
        register_parametrization(self.table, "weight", self.Dropped())

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def _parametrized(context: RankContext, wrapped: bool) -> None:
    """Neither `attach` nor a step reads it, so random numbers are drawn as without thinwire."""
    module = seeded(Parametrized)
    model = DistributedDataParallel(module) if wrapped else module
    count, drawn = module.get_buffer("table.parametrizations.weight.0.count"), torch.get_rng_state()
    before = int(count)
    sync = thinwire.attach(model)
    assert int(count) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    for step in range(2):
        model(batch(context, step)).square().sum().backward()
    assert int(count) == before + 2
    sync.detach()


@pytest.mark.parametrize("wrapped", [False, True])
def test_attach_evaluates_no_parametrization(wrapped: bool) -> None:
    run_ranks(_parametrized, wrapped, world_size=2, timeout_seconds=60)


def _wide_gradients(context: RankContext) -> None:
    """Gradients of float32 of parameters in 16 bits, which the first rank alone uses in the first step."""
    module = seeded(Net).to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    sync = thinwire.attach(module)
    for step in range(2):
        module.zero_grad()
        used = ("table", "second") if context.rank == 0 or step else ("table",)
        module(batch(context, step), used).float().square().mean().backward()
        assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}
        assert_same_on_all_ranks(module)
    sync.detach()


def test_gradients_wider_than_their_parameters_that_one_rank_has() -> None:
    run_ranks(_wide_gradients, world_size=2, timeout_seconds=60)


class Widened(torch.autograd.Function):
    """A cast to float32 whose gradient stays as wide."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OfAnyDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
        self.used.grad_dtype = self.unused.grad_dtype = None

    def forward(self, uses_both: bool) -> Tensor:
        return sum(Widened.apply(weight).sum() for weight in (self.used, self.unused)[: 1 + uses_both])


def _any_width_on_one_rank(context: RankContext) -> str:
    """A gradient that one rank has in float32, and for which the other one sends zeros of the parameter's dtype."""
    module = OfAnyDtype()
    thinwire.attach(module)
    with pytest.raises(thinwire.MismatchError) as raised:
        module(context.rank == 0).backward()
    return str(raised.value)


def test_ranks_with_gradients_of_different_dtypes_all_hear_of_it() -> None:
    """Gloo ends a process that gets a message of another size."""
    for outcome in run_ranks(_any_width_on_one_rank, world_size=2, timeout_seconds=60):
        assert "float32" in outcome.value
        assert "bfloat16" in outcome.value


def _refused_on_one_rank(context: RankContext) -> None:
    """What only one rank finds wrong, all ranks hear of."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta" if context.rank == 0 else "cpu"))
    with pytest.raises((ValueError, thinwire.MismatchError), match="is on meta, others are on cpu"):
        thinwire.attach(module)
    with pytest.raises(ValueError, match="no values yet"):
        thinwire.attach(nn.Linear(2, 2, device="meta"))


def test_devices_are_checked_on_all_ranks() -> None:
    run_ranks(_refused_on_one_rank, world_size=2, timeout_seconds=60)


def _edited_later(context: RankContext, how: str) -> None:
    """As under DDP, the mean is that of the edited gradients."""

    def edit(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(0.01 * parameter.detach())

    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(3000, 16), nn.Linear(16, 4))
        weight = model[0].weight
        assert isinstance(weight, nn.Parameter)
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        if how == "node":
            node.register_hook(lambda *_, weight=weight: edit(weight))
        sync = thinwire.attach(model, "zen") if attached else None
        if how == "accumulation":
            weight.register_post_accumulate_grad_hook(edit)
        trained = model if attached else DistributedDataParallel(model)
        data = torch.Generator().manual_seed(context.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            trained(torch.randint(3000, (400,), generator=data)).square().mean().backward()
            optimizer.step()
        found.append(weight.detach().clone())
        if sync is not None:
            sync.detach()
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["node", "accumulation"])
def test_gradients_that_hooks_edit_after_they_were_added(how: str) -> None:
    run_ranks(_edited_later, how, world_size=2, timeout_seconds=60)


def _hooked_in_each_step(context: RankContext) -> None:
    """Such a hook goes with the node, and torch makes another one for the next graph."""
    module = nn.Linear(4, 4)
    sync = thinwire.attach(module)
    weight, ones = module.weight, torch.ones(2, 4)
    for step in range(4):
        module.zero_grad()
        loss = module(ones).sum()
        if step:
            get_gradient_edge(weight).node.register_hook(lambda *_: weight.grad.mul_(2 + context.rank) is None or None)
        loss.backward()
        del loss  # with the graph
        torch.testing.assert_close(weight.grad, torch.full((4, 4), 5.0 if step else 2.0))
    sync.detach()


def test_a_hook_on_a_node_that_nobody_keeps_is_for_one_pass() -> None:
    run_ranks(_hooked_in_each_step, world_size=2, timeout_seconds=60)


# --- a process group


def _in_pairs(context: RankContext, kind: str) -> None:
    """Ranks 0 and 2, and ranks 1 and 3, have copies of one module each; rank r trains on r + 1 times the loss."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = whole["dp"]
    torch.manual_seed(context.rank)
    module = Net()
    sync = thinwire.attach(module, process_group=mesh if kind == "mesh" else mesh.get_group())
    pair = [context.rank % 2, context.rank % 2 + 2]
    for mine in everywhere(module.first.weight.detach())[context.rank % 2 :: 2]:
        assert torch.equal(mine, module.first.weight)  # of the first rank of the pair
    for step in range(3):
        module.zero_grad()
        loss = (context.rank + 1) * module(batch(context, step)).square().sum()
        names, parameters = zip(*module.named_parameters(), strict=True)
        local = dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))
        loss.backward()
        for name, gradient in gradients(module).items():
            both = torch.stack([everywhere(local[name])[rank] for rank in pair])
            torch.testing.assert_close(gradient, both.mean(0), atol=1e-6, rtol=1e-5)
            assert torch.equal(*[everywhere(gradient)[rank] for rank in pair])
    assert sync.stats()["comm/steps"] == 3
    sync.detach()
    with pytest.raises(ValueError, match=r"built with: leave out process_group="):
        thinwire.attach(DistributedDataParallel(Net()), process_group=mesh)
    with pytest.raises(ValueError, match=r"has 2 dimensions; pass one of them"):
        thinwire.attach(Net(), process_group=whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["mesh", "group"])
def test_a_plain_module_is_synchronized_over_the_group_it_is_given(kind: str) -> None:
    run_ranks(_in_pairs, kind, world_size=4, timeout_seconds=60)
