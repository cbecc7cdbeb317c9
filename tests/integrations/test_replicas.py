"""Replicas of tables kept equal by touched rows, beside averages of whole tables; stand-ins for what TorchRec has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.integrations.torchrec import ReplicaSync
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

SPECS = [(700, 16), (300, 4)]


class Kernel(nn.Module):
    """Two tables with a state of one number a row; a lookup changes rows as fused optimizers do, uncounted."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.tables = [torch.randn(shape, generator=made) for shape in SPECS]
        self.states = [torch.rand(rows, generator=made) for rows, _ in SPECS]
        self.hash_size_cumsum = torch.tensor([0, SPECS[0][0], sum(rows for rows, _ in SPECS)])

    def split_embedding_weights(self) -> list[Tensor]:
        return self.tables

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        return [{"sum": state} for state in self.states]

    def forward(self, indices: Tensor, offsets: Tensor) -> None:
        for table, state, ids in zip(self.tables, self.states, indices.split(offsets.diff().tolist()), strict=True):
            table.data[ids] *= 1.0 + 0.1 * (dist.get_rank() + 1)
            state.data[ids] += 1.0


def _collection(seed: int, **taken: Any) -> Any:
    kernel = Kernel(seed)
    context = SimpleNamespace(
        modules_to_sync=[(kernel, None)],
        weights_by_dtype={torch.float32: kernel.tables},
        optimizer_tensors_by_dtype={torch.float32: kernel.states},
        hash_zch_modules=[],
        replica_pg=dist.group.WORLD if dist.is_initialized() else None,
        sharding_strategy=SimpleNamespace(name="DEFAULT"),
    )
    free = {"_custom_all_reduce": None, "_all_reduce_hook": None, "_use_sharded_relay": False}
    model = SimpleNamespace(kernel=kernel, _ctxs=[context], **(free | taken))
    model.set_all_reduce_hook = lambda hook: setattr(model, "_all_reduce_hook", hook)
    return model


def _average(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        total = tensor.double()
        dist.all_reduce(total)
        tensor.data.copy_(total / dist.get_world_size())


def _train(context: RankContext) -> None:
    ours, whole = _collection(context.rank), _collection(context.rank)  # replicas begin with different tables
    replicas = ReplicaSync(ours)
    replicas.start()
    group, drawn, sent = dist.group.WORLD, torch.Generator().manual_seed(context.rank), []
    for step in range(12):
        counts = torch.randint(0, 4, (2,), generator=drawn).tolist() if step != 4 else [0, 0]  # sometimes no row at all
        ids = [torch.randint(rows, (count,), generator=drawn) for count, (rows, _) in zip(counts, SPECS, strict=True)]
        offsets = torch.tensor([0, counts[0], sum(counts)])
        for model in (ours, whole):
            model.kernel(torch.cat(ids), offsets)
            if step == 8 and context.rank == 1:  # on one rank only, which the others have to hear of
                model.kernel.tables[1].mul_(0.5)
        if step % 3 != 2:
            before = replicas.stats()["replicas/bytes_sent"]
            ours._all_reduce_hook(group, ours.kernel.tables)
            _average(whole.kernel.tables)
            if step % 2 == 0:  # states wait for the next average that includes them
                ours._all_reduce_hook(group, ours.kernel.states)
                _average(whole.kernel.states)
            sent.append((step, replicas.stats()["replicas/bytes_sent"] - before))
            for mine, theirs in zip(ours.kernel.tables, whole.kernel.tables, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
        if step % 3 != 2 and step % 2 == 0:
            for mine, theirs in zip(ours.kernel.states, whole.kernel.states, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    ours._all_reduce_hook(group, ours.kernel.tables)
    ours._all_reduce_hook(group, ours.kernel.states)
    for tensor in (*ours.kernel.tables, *ours.kernel.states):
        same = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(same, tensor)
        assert all(torch.equal(same[0], other) for other in same[1:])
    tables = sum(table.nbytes for table in ours.kernel.tables)
    assert [step for step, num_bytes in sent if num_bytes > tables] == [0, 9], "the first, and after the edit"
    assert max(num_bytes for step, num_bytes in sent if step not in (0, 9, 10)) < tables / 10
    replicas.stop()
    assert ours._all_reduce_hook is None


def test_touched_rows_are_averaged_as_whole_tables_are() -> None:
    run_ranks(_train, world_size=3, timeout_seconds=60)


def _looked_up(drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    counts = torch.randint(1, 4, (2,), generator=drawn).tolist()
    ids = [torch.randint(rows, (count,), generator=drawn) for count, (rows, _) in zip(counts, SPECS, strict=True)]
    return torch.cat(ids), torch.tensor([0, counts[0], sum(counts)])


def _outer(context: RankContext, is_compressed: bool) -> None:
    """Replicas are averaged in every second call, with momentum; states stay those of each replica."""
    ours, whole = _collection(context.rank), _collection(0)  # an outer loop begins with the tables of rank 0
    replicas = ReplicaSync(ours)
    codec = thinwire.compress.error_feedback(thinwire.compress.top_k(0.05)) if is_compressed else None
    recipe = thinwire.outer.diloco(every=2, lr=0.5, momentum=0.8, nesterov=False)
    ((name, loop),) = replicas.loops(recipe, {"dense": codec} if is_compressed else {})
    replicas.start()
    assert name == "replicas 0 torch.float32"
    drawn, group = torch.Generator().manual_seed(context.rank), dist.group.WORLD
    anchors = [table.clone() for table in whole.kernel.tables]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    states = [state.clone() for state in ours.kernel.states]
    for step in range(6):
        lookup = _looked_up(drawn)
        for model in (ours, whole):
            model.kernel(*lookup)
        ours._all_reduce_hook(group, ours.kernel.tables)
        ours._all_reduce_hook(group, ours.kernel.states)
        if step % 2:
            means = [table.clone() for table in whole.kernel.tables]
            _average(means)
            for table, anchor, momentum, mean in zip(whole.kernel.tables, anchors, momenta, means, strict=True):
                momentum.mul_(0.8).add_(anchor - mean)
                anchor.sub_(momentum, alpha=0.5)
                table.data.copy_(anchor)
        if not is_compressed:
            for mine, theirs in zip(ours.kernel.tables, whole.kernel.tables, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert all(float((now - then).sum()) >= 6 for now, then in zip(ours.kernel.states, states, strict=True))
    loop.synchronize()
    for table in ours.kernel.tables:
        same = [torch.empty_like(table) for _ in range(dist.get_world_size())]
        dist.all_gather(same, table)
        assert all(torch.equal(same[0], other) for other in same[1:])
    stats = loop.stats()
    assert stats["outer/inner_steps"] == 6
    assert 0 < stats["comm/bytes_sent"] < stats["comm/bytes_dense"] / 4
    loop.detach()
    replicas.stop()


@pytest.mark.parametrize("is_compressed", [False, True])
def test_an_outer_loop_of_replicas(is_compressed: bool) -> None:
    run_ranks(_outer, is_compressed, world_size=2, timeout_seconds=60)


def test_rounds_in_the_background_are_refused() -> None:
    with pytest.raises(ValueError, match=r"take outer=diloco\(\.\.\., delay=1\)"):
        list(ReplicaSync(_collection(0)).loops(thinwire.outer.shadow_sync(), {}))


@pytest.mark.parametrize("taken", ["_custom_all_reduce", "_all_reduce_hook", "_use_sharded_relay"])
def test_another_all_reduce_is_not_replaced(taken: str) -> None:
    with pytest.raises(ValueError, match="has an all-reduce of its own"):
        ReplicaSync(_collection(0, **{taken: True}))


def test_tables_that_are_not_whole_are_refused() -> None:
    model = _collection(0)
    model._ctxs[0].sharding_strategy.name = "FULLY_SHARDED"
    with pytest.raises(ValueError, match="no whole tables"):
        ReplicaSync(model)
