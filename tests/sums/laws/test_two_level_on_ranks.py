"""Two levels on real process groups: hosts discovered, given or from a mesh; failures; the accounts of attach."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from references.between_hosts import between_hosts_bytes
from thinwire.all_reduce import _lane_of
from thinwire.comm.groups import resolve_group
from thinwire.comm.hosts import HOST_VARIABLE, ranks_of_hosts
from thinwire.comm.process_group import Traffic
from thinwire.lab.ledger import sent_bytes
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.schemes import AGSPARSE, COLUMN_SPLIT, SPARCML, ZEN, TwoLevel

pytestmark = pytest.mark.ranks

UNEVEN = ((0, 1, 2), (3, 4))
SCHEMES = {
    "two_level:zen": TwoLevel(ZEN, UNEVEN),
    "two_level:column_split": TwoLevel(COLUMN_SPLIT, UNEVEN),
    TwoLevel(SPARCML): TwoLevel(SPARCML, UNEVEN),
    TwoLevel(AGSPARSE, ((4, 0), (2, 3, 1))): TwoLevel(AGSPARSE, ((4, 0), (2, 3, 1))),
}
"""What is asked for, and what it comes to on these hosts."""


def say_host(context: RankContext, hosts: tuple[tuple[int, ...], ...]) -> None:
    os.environ[HOST_VARIABLE] = next(str(host) for host, ranks in enumerate(hosts) if context.rank in ranks)


def gradient(rank: int) -> Tensor:
    """Of whole numbers: sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randperm(500, generator=generator)[: 40 + 10 * rank].sort().values
    values = torch.randint(1, 9, (ids.numel(), 6), generator=generator).float()
    return torch.sparse_coo_tensor(ids[None], values, (500, 6), check_invariants=False).coalesce()


def exact_sum(ranks: range) -> Tensor:
    return torch.stack([gradient(rank).to_dense() for rank in ranks]).sum(0)


def traffic(group: dist.ProcessGroup | None = None) -> Traffic:
    return _lane_of(resolve_group(group)).exchange.traffic


def _sums_and_bytes(context: RankContext) -> tuple[list[int], list[int]]:
    say_host(context, UNEVEN)
    mine, expected = gradient(context.rank), exact_sum(range(context.world_size))
    sent, between = [], []
    for scheme in SCHEMES:
        before = replace(traffic())
        total = thinwire.sparse_all_reduce(mine, scheme=scheme)
        assert torch.equal(total.to_dense(), expected)
        mean = thinwire.sparse_all_reduce(mine.to_dense(), scheme=scheme, op="mean")
        torch.testing.assert_close(mean * context.world_size, expected)
        sent.append(traffic().sent_bytes - before.sent_bytes)
        between.append(traffic().sent_between_hosts_bytes - before.sent_between_hosts_bytes)
    assert ranks_of_hosts(_lane_of(resolve_group(None)).exchange.hosts) == UNEVEN
    return sent, between


@pytest.mark.slow
def test_sums_and_bytes_on_uneven_hosts() -> None:
    outcomes = run_ranks(_sums_and_bytes, world_size=5)
    ids, shape = [gradient(rank).indices()[0] for rank in range(5)], (500, 6, torch.float32)
    for place, scheme in enumerate(SCHEMES.values()):
        assert [outcome.value[0][place] for outcome in outcomes] == [
            2 * sent for sent in sent_bytes(scheme, ids, *shape)
        ]
        crossed = [sum(outcomes[rank].value[1][place] for rank in ranks) for ranks in UNEVEN]
        assert crossed == [2 * sent for sent in between_hosts_bytes(scheme, UNEVEN, ids, *shape)]


def _meshes_and_groups(context: RankContext) -> None:
    mine, expected = gradient(context.rank), exact_sum(range(context.world_size))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "place"))
    scheme = TwoLevel.of_mesh(ZEN, mesh)
    assert scheme.hosts == ((0, 1), (2, 3))
    assert torch.equal(thinwire.sparse_all_reduce(mine, scheme=scheme).to_dense(), expected)
    with pytest.raises(ValueError, match="two levels need two"):
        TwoLevel.of_mesh(ZEN, init_device_mesh("cpu", (4,)))
    # without anything said, the ranks of one machine are on one host, and nothing crosses hosts
    assert torch.equal(thinwire.sparse_all_reduce(mine, scheme="two_level:zen").to_dense(), expected)
    assert traffic().sent_between_hosts_bytes == 0
    say_host(context, ((0, 1), (2,), (3,)))
    group = dist.new_group([1, 2, 3])
    assert isinstance(group, dist.ProcessGroup) == (context.rank > 0)
    if context.rank > 0:
        total = thinwire.sparse_all_reduce(mine, scheme="two_level:zen", process_group=group).to_dense()
        assert torch.equal(total, exact_sum(range(1, 4)))
        assert ranks_of_hosts(_lane_of(group).exchange.hosts) == ((0,), (1,), (2,))
        assert traffic(group).sent_between_hosts_bytes == traffic(group).sent_bytes > 0


def test_meshes_and_groups() -> None:
    run_ranks(_meshes_and_groups, world_size=4)


def _wrong(context: RankContext) -> None:
    say_host(context, UNEVEN)
    bad = {TwoLevel(ZEN, ((0, 1), (2, 3))): "4 ranks, the process group 5", "two_level:dense": "dense_ring"}
    for scheme, says in bad.items():
        with pytest.raises((ValueError, thinwire.ThinwireError), match=says):
            thinwire.sparse_all_reduce(gradient(context.rank), scheme=scheme)
    scheme = "zen" if context.rank == 4 else "two_level:zen"
    with pytest.raises(thinwire.MismatchError, match="two_level"):
        thinwire.sparse_all_reduce(gradient(context.rank), scheme=scheme)
    tensor = gradient(context.rank) if context.rank != 2 else gradient(2).to_dense().t()
    with pytest.raises((ValueError, thinwire.ThinwireError)):
        thinwire.sparse_all_reduce(tensor, scheme="two_level:zen")
    total = thinwire.sparse_all_reduce(gradient(context.rank), scheme="two_level:zen")
    assert torch.equal(total.to_dense(), exact_sum(range(5))), "the lane must be in step again"


def test_what_is_wrong_every_rank_is_told() -> None:
    run_ranks(_wrong, world_size=5, timeout_seconds=60)


def _dies(context: RankContext, dying: int) -> float:
    say_host(context, UNEVEN)
    thinwire.sparse_all_reduce(gradient(context.rank), scheme="two_level:zen")
    if context.rank == dying:
        os._exit(1)
    started = time.perf_counter()
    with pytest.raises(thinwire.PeerError):
        thinwire.sparse_all_reduce(gradient(context.rank), scheme="two_level:zen")
    return time.perf_counter() - started


@pytest.mark.few(1)
@pytest.mark.parametrize("dying", [2, 4])
def test_a_rank_that_dies_is_an_error_on_all_hosts_at_once(dying: int) -> None:
    outcomes = run_ranks(_dies, dying, world_size=5, check=False, timeout_seconds=60)
    assert all(outcome.value < 10 for outcome in outcomes if outcome.rank != dying)


def _attached(context: RankContext) -> None:
    say_host(context, ((0, 1), (2, 3)))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(400, 8, sparse=True), nn.Linear(8, 3)))
    sync = thinwire.attach(model, rows="two_level:zen")
    words = torch.arange(context.rank, 400, 7)
    for _ in range(2):
        model.zero_grad()
        model(words).square().mean().backward()
    rows = {str(row["name"]): row for row in sync.table()}
    assert rows["0.weight"]["scheme"] == "two_level:zen"
    stats = sync.stats()
    assert 0 < stats["comm/bytes_sent_between_hosts"] < stats["comm/bytes_sent"]
    predicted, sent = float(rows["0.weight"]["predicted_bytes"]), float(rows["0.weight"]["bytes"])
    assert predicted == pytest.approx(sent, rel=0.3)
    found = model.module[0].weight.grad.to_dense()
    sync.detach()
    model.zero_grad()
    model(words).square().mean().backward()
    torch.testing.assert_close(found, model.module[0].weight.grad.to_dense())


def test_attach_by_two_levels() -> None:
    run_ranks(_attached, world_size=4, timeout_seconds=100)
