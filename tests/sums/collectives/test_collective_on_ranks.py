"""Sums on the collectives of real process groups: Gloo with tensors of the CPU, NCCL on a simulated device."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from simgpu import has_interpreter, peek, simulated
from thinwire import schemes
from thinwire.comm.collectives import Collectives
from thinwire.errors import LostPeerError, PeerError
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.sums.collective import CollectiveSum, NamedGradient
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import LEVEL_LAUNCHES, SUM_LAUNCHES, TABLE_LAUNCHES

pytestmark = pytest.mark.ranks

SCHEMES = ("zen", "sparse_ps", "agsparse_coded", "dense")
STEPS = 3


def rows(rank: int, step: int, dtype: torch.dtype, sparse: bool = False) -> Tensor:
    """A gradient of which the number of rows changes with rank and step; rank 1 has none in step 1."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    gradient = torch.randn(120, 4, generator=generator).to(dtype)
    gradient[torch.rand(120, generator=generator) >= (0.3, 0.0, 0.9)[(step + rank + 1) % 3]] = 0
    return gradient.to_sparse(1) if sparse else gradient


def expected(world_size: int, step: int, dtype: torch.dtype) -> Tensor:
    """The sum in rank order, rounded once."""
    accumulator = torch.zeros(120, 4, dtype=torch.promote_types(dtype, torch.float32))
    for rank in range(world_size):
        accumulator += rows(rank, step, dtype)
    return accumulator.to(dtype)


def _sums(context: RankContext, scheme: str, device: str) -> tuple[int, int]:
    group = dist.group.WORLD
    assert group is not None
    total = CollectiveSum(Collectives(group))
    cases = [(dtype, sparse) for dtype in (torch.float32, torch.bfloat16) for sparse in (False, True)]
    for step in range(STEPS):
        gradients = [
            NamedGradient(f"{dtype} {sparse}", rows(context.rank, step, dtype, sparse).to(device))
            for dtype, sparse in cases
        ]
        sums = total.all_reduce(gradients, schemes.NAMED[scheme])
        for (dtype, sparse), mine in zip(cases, sums, strict=True):
            seen = peek(mine) if device == "cuda" else mine
            assert seen.is_sparse == (sparse and device == "cpu")
            exact = expected(context.world_size, step, dtype)
            if scheme == "dense":
                torch.testing.assert_close(seen.to_dense(), exact)
            else:
                assert torch.equal(seen.to_dense(), exact)
    return total.exchange.host_waits, total.exchange.traffic.sent_bytes


@pytest.mark.slow
def test_sums_over_gloo() -> None:
    run_ranks(_all_schemes, world_size=3, timeout_seconds=60)


def _all_schemes(context: RankContext) -> None:
    for scheme in SCHEMES:
        waits, _ = _sums(context, scheme, "cpu")
        assert 2 * STEPS <= waits <= 3 * STEPS


def _one_dies(context: RankContext) -> str:
    group = dist.group.WORLD
    assert group is not None
    total = CollectiveSum(Collectives(group))
    gradients = [NamedGradient("words", rows(context.rank, 0, torch.float32))]
    total.all_reduce(gradients, schemes.ZEN)
    if context.rank == 1:
        os._exit(1)
    with pytest.raises(LostPeerError, match=f"rank {context.rank}: the exchange with the other 2 ranks broke off"):
        total.all_reduce(gradients, schemes.ZEN)
    return "told"


@pytest.mark.slow
def test_a_rank_that_dies_is_lost_to_all_over_gloo() -> None:
    outcomes = run_ranks(_one_dies, world_size=3, timeout_seconds=30, check=False)
    assert [outcomes[rank].value for rank in (0, 2)] == ["told", "told"]


@dataclass
class Seen:
    """What a simulated device saw."""

    races: list[str]
    errors: list[str]
    waits: dict[str, int]
    host_waits: int
    launches: int


def _on_a_device(context: RankContext) -> list[Seen]:
    seen = []
    for scheme in SCHEMES:
        with simulated(own=(0,), nccl=True) as world:
            host_waits, _ = _sums(context, scheme, "cuda")
            waits = {place: count for (_, _, place), count in world.waits.items() if Path(__file__).name not in place}
            launches = sum(world.launches.values())
            seen.append(Seen([*map(str, world.races)], [*map(str, world.errors)], waits, host_waits, launches))
    return seen


@pytest.mark.slow
def test_sums_over_nccl_on_a_simulated_device() -> None:
    """No race, no second device, NCCL from one thread; with Triton the host waits only where that is counted."""
    for outcome in run_ranks(_on_a_device, world_size=2, timeout_seconds=100):
        for seen in outcome.value:
            assert seen.races == []
            assert seen.errors == []
            assert 2 * STEPS <= seen.host_waits <= 3 * STEPS
            if has_interpreter():
                assert sum(seen.waits.values()) == seen.host_waits, seen.waits


def _all_reduces(context: RankContext) -> list[str]:
    with simulated(own=(0,), nccl=True) as world:
        mine = rows(context.rank, 0, torch.float32)
        exact = expected(context.world_size, 0, torch.float32)
        for tensor in (mine.to("cuda"), mine.to_sparse(1).to("cuda")):
            total = thinwire.sparse_all_reduce(tensor)
            assert total.is_sparse == tensor.is_sparse
            assert torch.equal(peek(total), exact)
            assert torch.equal(peek(tensor), mine)
            future = thinwire.sparse_all_reduce(tensor, "agsparse", op="mean", async_op=True)
            torch.testing.assert_close(peek(future.wait()), exact / context.world_size)
        tensor, is_bad = mine.to("cuda"), context.rank == 1
        for good, bad in (({"op": "sum"}, {"op": "max"}), ({"scheme": "zen"}, {"scheme": "sparcml"})):
            with pytest.raises(ValueError if is_bad else PeerError, match=r"max|SPARCML"):
                thinwire.sparse_all_reduce(tensor, **(bad if is_bad else good))
        with pytest.raises(PeerError if context.rank else ValueError, match="strides"):
            thinwire.sparse_all_reduce(tensor if context.rank else tensor.t())
        assert torch.equal(peek(thinwire.sparse_all_reduce(tensor)), exact)
        assert not any(thread.name == "thinwire-lane" for thread in threading.enumerate())
        return [*map(str, world.races), *map(str, world.errors)]


def test_sparse_all_reduce_on_a_simulated_device() -> None:
    for outcome in run_ranks(_all_reduces, world_size=2, timeout_seconds=60):
        assert outcome.value == []


def _launches(context: RankContext) -> dict[tuple[int, bool], int]:
    """What one sum launches on a device, once capacities are known, by the number of tables and whether sparse."""
    found, group = {}, dist.group.WORLD
    assert group is not None
    for num_tables, sparse in ((1, False), (4, False), (26, False), (1, True), (4, True), (26, True)):
        with simulated(own=(0,), nccl=True) as world:
            total = CollectiveSum(Collectives(group))
            for step in range(2):
                gradients = [
                    NamedGradient(f"{place}", rows(context.rank, 2 * step, torch.float32, sparse).to("cuda"))
                    for place in range(num_tables)
                ]
                before = sum(world.launches.values())
                total.all_reduce(gradients, schemes.ZEN, 0.5)
                found[num_tables, sparse] = sum(world.launches.values()) - before
    return found


def _launches_of_two_levels(context: RankContext) -> int:
    with simulated(own=(0,), nccl=True) as world:
        group = dist.group.WORLD
        assert group is not None
        total, count = CollectiveSum(Collectives(group)), 0
        total.exchange.hosts = (0, 0, 1, 1)
        for step in range(2):
            gradient = NamedGradient("words", rows(context.rank, 2 * step, torch.float32).to("cuda"))
            before = sum(world.launches.values())
            total.all_reduce([gradient], TwoLevel(schemes.ZEN), 0.5)
            count = sum(world.launches.values()) - before
        assert world.races == world.errors == []
        return count


@pytest.mark.skipif(not has_interpreter(), reason="the references of Triton's kernels launch more: TRITON_INTERPRET=1")
def test_launches_of_a_second_level() -> None:
    for outcome in run_ranks(_launches_of_two_levels, world_size=4, timeout_seconds=110):
        assert outcome.value <= SUM_LAUNCHES + TABLE_LAUNCHES + LEVEL_LAUNCHES, outcome.value
        assert outcome.value > SUM_LAUNCHES + LEVEL_LAUNCHES // 2, "what the price says"


@pytest.mark.skipif(not has_interpreter(), reason="the references of Triton's kernels launch more: TRITON_INTERPRET=1")
def test_launches_of_a_sum() -> None:
    """They hardly grow with the tables; `auto` and the roofline count with these constants."""
    for outcome in run_ranks(_launches, world_size=2, timeout_seconds=110):
        for (num_tables, sparse), launches in outcome.value.items():
            assert launches <= SUM_LAUNCHES + num_tables * TABLE_LAUNCHES, (num_tables, sparse, launches)
