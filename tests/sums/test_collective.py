"""The laws of exact sums on the collectives of a process group: the same bits as the staged path, and as few bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopback import run_ranks, synchronized
from tests.sums.collectives.collective import LoopbackCollectives, results, run_collectives
from thinwire import schemes
from thinwire.kernels import stack_starts
from thinwire.rows.sparse import SUPPORTED_DTYPES, SparseRows
from thinwire.schemes import Format, Scheme
from thinwire.sums.collective import CollectiveSum, Counts, NamedGradient, plan, sent_bytes, stacks

SCHEMES: dict[str, Scheme] = {
    "zen": schemes.ZEN,
    "balanced_parallelism": schemes.BALANCED_PARALLELISM,
    "sparse_ps": schemes.SPARSE_PS,
    "block_cyclic": replace(schemes.SPARSE_PS, ownership="block_cyclic"),
    "zen_in_bitmaps": replace(schemes.ZEN, push_format=Format.HASH_BITMAP, pull_format=Format.HASH_BITMAP),
    "agsparse": schemes.AGSPARSE,
    "agsparse_coded": schemes.AGSPARSE_CODED,
    "agsparse_ring": schemes.AGSPARSE_RING,
    "one_server": replace(schemes.ZEN, servers=1),
    "dense": schemes.DENSE,
}
WORLD_SIZES = range(1, 9)
DENSITIES = (0.1, 0.9, 0.0, 1.0, 0.5)


def gradient(rank: int, step: int, num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient whose number of rows changes from step to step and from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(num_rows, width, generator=generator).to(dtype)
    values[torch.rand(num_rows, generator=generator) >= DENSITIES[(rank + step) % len(DENSITIES)]] = 0
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, world_size, marks=() if name == "zen" or world_size in (1, 3) else pytest.mark.slow)
        for name in SCHEMES
        for world_size in WORLD_SIZES
    ],
)
def test_sums_have_the_bits_of_the_staged_path_and_the_predicted_bytes(name: str, world_size: int) -> None:
    scheme, scale = SCHEMES[name], 1 / 3
    shapes = {dtype: (70 * place, 3) for place, dtype in enumerate(SUPPORTED_DTYPES)}  # one of them is empty

    def run(exchange: LoopbackCollectives) -> list[tuple[list[Tensor], dict[str, Counts], int, int]]:
        total, steps = CollectiveSum(exchange), []
        for step in range(3):
            waits, sent = exchange.host_waits, exchange.traffic.sent_bytes
            dense = [
                NamedGradient(f"{dtype}", gradient(exchange.rank, step, *shapes[dtype], dtype)) for dtype in shapes
            ]
            sparse = [NamedGradient(f"sparse {table.name}", table.gradient.to_sparse(1)) for table in dense]
            sums = total.all_reduce([*dense, *sparse], scheme, scale)
            assert all(table.gradient is mine for table, mine in zip(dense, sums, strict=False))
            assert all(mine.is_coalesced() for mine in sums[len(dense) :])
            moved = exchange.host_waits - waits, exchange.traffic.sent_bytes - sent
            steps.append(([each.to_dense() for each in sums], total.counts, *moved))
        return steps

    outcomes = results(run_collectives(world_size, run))
    for step in range(3):
        plans, pushed, unions = [], [], []
        for place, (dtype, (num_rows, width)) in enumerate(shapes.items()):
            rows = [SparseRows.from_tensor(gradient(rank, step, num_rows, width, dtype)) for rank in range(world_size)]
            staged = run_ranks(world_size, lambda peer, of=rows: synchronized(peer, of[peer.rank], scheme, scale))
            plans += [plan(scheme, num_rows, width, dtype, world_size)] * 2  # the dense one and the sparse one
            partition = plans[-1].partition
            pushed += [[dealt(partition, each.ids, world_size) for each in rows]] * 2
            unions += [dealt(partition, torch.cat([each.ids for each in rows]).unique(), world_size)] * 2
            for steps, outcome in zip(outcomes, staged, strict=True):
                sums, counts, waits, _ = steps[step]
                expected = outcome.get().to_dense()
                for mine in (sums[place], sums[place + len(shapes)]):
                    assert torch.equal(mine, expected)
                held = tuple(each.ids.numel() for each in rows)
                assert counts[f"sparse {dtype}"] == Counts(held, int((expected != 0).any(1).sum()))
                assert waits == 2
        if world_size > 1:
            for rank, steps in enumerate(outcomes):
                assert steps[step][3] == sent_bytes(plans, pushed, unions, rank)


STACKED = ((70, False), (0, False), (33, True), (64, False), (5, True), (1, False), (40, True))
"""Rows of tables, and whether they are sparse."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zen", "sparse_ps", "zen_in_bitmaps", "agsparse", "one_server", "dense"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stacked_tables_have_the_bits_of_tables_alone_and_the_predicted_bytes(name: str, world_size: int) -> None:
    scheme = SCHEMES[name]

    def table(rank: int, step: int, place: int) -> Tensor:
        num_rows, sparse = STACKED[place]
        return uneven(rank, 7 * step + place, num_rows, 3, torch.float32, sparse)

    def run(exchange: LoopbackCollectives) -> list[tuple[list[Tensor], dict[str, Counts], int]]:
        together, steps = CollectiveSum(exchange), []
        alone = [CollectiveSum(exchange) for _ in STACKED]
        for step in range(4):
            there = [place for place in range(len(STACKED)) if step != 2 or place % 3]  # not all in each step
            mine = [NamedGradient(f"{place}", table(exchange.rank, step, place)) for place in there]
            before = exchange.traffic.sent_bytes
            sums = together.all_reduce(mine, scheme, 0.5)
            sent = exchange.traffic.sent_bytes - before
            for place, total in zip(there, sums, strict=True):
                again = NamedGradient("alone", table(exchange.rank, step, place))
                (single,) = alone[place].all_reduce([again], scheme, 0.5)
                assert torch.equal(total.to_dense(), single.to_dense())
                assert total.is_sparse == single.is_sparse
                assert together.counts[f"{place}"] == alone[place].counts["alone"]
            steps.append((sums, together.counts, sent))
        return steps

    outcomes = results(run_collectives(world_size, run))
    if world_size == 1 or name == "dense":
        return
    plans, pushed, unions = [], [], []
    for places in stacks((scheme, 3, torch.float32, sparse) for _, sparse in STACKED):
        *starts, num_rows = stack_starts([STACKED[place][0] for place in places])
        plans.append(plan(scheme, num_rows, 3, torch.float32, world_size))
        ids = [
            torch.cat([
                table(rank, 3, place).to_dense().any(1).nonzero().flatten() + start
                for place, start in zip(places, starts, strict=True)
            ])
            for rank in range(world_size)
        ]  # fmt: skip
        pushed.append([dealt(plans[-1].partition, each, world_size) for each in ids])
        unions.append(dealt(plans[-1].partition, torch.cat(ids).unique(), world_size))
    assert len(plans) == 2
    for rank, steps in enumerate(outcomes):
        assert steps[3][2] == sent_bytes(plans, pushed, unions, rank, len(STACKED))


SHAPES = (((50,), 1), ((40, 3), 1), ((9, 8), 2), ((5, 6, 2, 2), 2), ((7, 0), 1), ((0, 3), 1))


@pytest.mark.parametrize("name", ["zen", "agsparse", "dense"])
@pytest.mark.parametrize("counts", [(20, 21, 0), (0, 0, 0)])
def test_tensors_of_any_dimensions(name: str, counts: tuple[int, ...]) -> None:
    def local(rank: int, shape: tuple[int, ...], sparse_dim: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        count = counts[rank] if shape[0] else 0
        indices = torch.stack([torch.randint(0, max(1, size), (count,), generator=generator) for size in shape])
        values = torch.randn(count, *shape[sparse_dim:], generator=generator)
        return torch.sparse_coo_tensor(indices[:sparse_dim], values, shape, check_invariants=False)

    def run(exchange: LoopbackCollectives) -> list[Tensor]:
        mine = [local(exchange.rank, *kind) for kind in SHAPES]
        tables = [
            NamedGradient(f"{place}", each) for place, each in enumerate([*mine, *[one.to_dense() for one in mine]])
        ]
        sums = CollectiveSum(exchange).all_reduce(tables, schemes.NAMED[name])
        for total, (shape, sparse_dim) in zip(sums, SHAPES, strict=False):
            assert (total.shape, total.sparse_dim(), total.is_coalesced()) == (shape, sparse_dim, True)
            torch.sparse_coo_tensor(total._indices(), total._values(), shape, is_coalesced=True, check_invariants=True)
        return sums

    for sums in results(run_collectives(3, run)):
        for place, total in enumerate(sums):
            exact = sum(local(rank, *SHAPES[place % len(SHAPES)]).to_dense() for rank in range(3))
            torch.testing.assert_close(total.to_dense(), exact)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, torch.dtype, bool, str]], int]:
    """The number of ranks, the tables of a step (rows, width, dtype, whether sparse, scheme), and a seed."""
    sizes = st.sampled_from([0, 1, 2, 255, 256, 257, 600]) | st.integers(0, 90)
    several = st.sampled_from([name for name in SCHEMES if name != "dense"])
    table = st.tuples(sizes, st.sampled_from([1, 2, 5]), st.sampled_from(SUPPORTED_DTYPES), st.booleans(), several)
    tables = draw(st.lists(table, min_size=1, max_size=4) | st.lists(table, min_size=65, max_size=66))
    return draw(st.sampled_from([1, 2, 3, 4])), tables, draw(st.integers(0, 1000))


@pytest.mark.slow
@given(jobs())
@settings(max_examples=8)
def test_any_tables_have_the_bits_of_the_staged_path(
    job: tuple[int, list[tuple[int, int, torch.dtype, bool, str]], int],
) -> None:
    world_size, tables, seed = job

    def run(exchange: LoopbackCollectives) -> list[Tensor]:
        total, sums = CollectiveSum(exchange), []
        for step in range(2):
            mine = [
                NamedGradient(f"{place}", uneven(exchange.rank, seed + step + place, rows, width, dtype, sparse))
                for place, (rows, width, dtype, sparse, _) in enumerate(tables)
            ]
            sums = [one.to_dense() for one in total.all_reduce(mine, [SCHEMES[name] for *_, name in tables], 0.5)]
        return sums

    outcomes = results(run_collectives(world_size, run))
    for place, (num_rows, width, dtype, sparse, name) in enumerate(tables):
        rows = [
            SparseRows.from_tensor(uneven(rank, seed + 1 + place, num_rows, width, dtype, sparse))
            for rank in range(world_size)
        ]
        staged = run_ranks(
            world_size, lambda peer, of=rows, by=name: synchronized(peer, of[peer.rank], SCHEMES[by], 0.5)
        )
        for sums, outcome in zip(outcomes, staged, strict=True):
            assert torch.equal(sums[place], outcome.get().to_dense())


def uneven(rank: int, seed: int, num_rows: int, width: int, dtype: torch.dtype, sparse: bool) -> Tensor:
    """A gradient; a sparse one is not coalesced and has repeated ids."""
    dense = gradient(rank, seed, num_rows, width, dtype)
    if not sparse:
        return dense
    tensor = dense.to_sparse(1)
    ids, values = tensor._indices(), tensor._values()
    order = torch.cat([torch.arange(ids.shape[1]).flip(0), torch.arange(ids.shape[1] // 2)])
    return torch.sparse_coo_tensor(ids[:, order], values[order], dense.shape, check_invariants=False)


def dealt(partition: object, ids: Tensor, world_size: int) -> list[int]:
    """The number of these ids that each owner has."""
    if partition is None:
        return [ids.numel()] * world_size
    return [len(places) for _, places in partition.split(ids)]  # type: ignore[attr-defined]
