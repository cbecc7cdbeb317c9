"""The laws of exact synchronization, for every scheme, format, dtype and world size.

A new scheme is one row of `SCHEMES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopback import Outcome, run_ranks, synchronized
from tests.sums.laws.cases import random_ids
from thinwire import schemes
from thinwire.kernels import nonzero_rows
from thinwire.lab.bench.workload import Workload
from thinwire.lab.ledger import sent_bytes, unit_ids, value_lower_bound_bytes
from thinwire.rows.sparse import SUPPORTED_DTYPES, SparseRows
from thinwire.schemes import Aggregation, Communication, Format, Ownership, Scheme, Unit
from thinwire.sums import owners, union_shares
from thinwire.sums.scheme import from_units, to_units, unit_shape

ANY = tuple(Format)
SCHEMES: dict[str, Scheme] = {
    **schemes.NAMED,
    "zen_hierarchical_hash": replace(schemes.ZEN, ownership=Ownership.HIERARCHICAL_HASH),
    "zen_published": replace(
        schemes.ZEN,
        ownership=Ownership.HIERARCHICAL_HASH,
        push_format=(Format.COO,),
        pull_format=(Format.HASH_BITMAP,),
    ),
    "sparse_ps_any_format": replace(schemes.SPARSE_PS, push_format=ANY, pull_format=ANY),
    "agsparse_any_format": replace(schemes.AGSPARSE, push_format=ANY),
    "ring_zen": replace(schemes.ZEN, communication="ring"),
    "ring_block_cyclic": replace(schemes.DENSE_RING, ownership="block_cyclic", push_format="auto", pull_format="auto"),
    "ring_dense_pull": replace(schemes.ZEN, communication="ring", pull_format="dense"),
    "agsparse_ring_any_format": replace(schemes.AGSPARSE_RING, push_format=ANY),
    "sparcml_any_format": replace(schemes.SPARCML, push_format=ANY),
    "sparcml_in_dense_format": replace(schemes.SPARCML, push_format="dense"),
    "sparcml_elements": replace(schemes.SPARCML, unit="elements"),
    "agsparse_elements": replace(schemes.AGSPARSE, unit="elements"),
    "zen_blocks": replace(schemes.ZEN, unit="blocks"),
    "column_split_blocks": replace(schemes.COLUMN_SPLIT, unit="blocks"),
    "halving_zen": replace(schemes.ZEN, communication="hierarchy"),
    "ring_pull_by_hierarchy_dense_switch": replace(
        schemes.SPARSE_PS,
        communication="ring",
        aggregation="incremental",
        pull_communication="hierarchy",
        dense_switch=True,
    ),
    "one_server_broadcast": replace(schemes.ZEN, servers=1, pull_communication="hierarchy"),
}
WORLD_SIZES = (1, 2, 3, 4, 5, 8)
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Case:
    """The rows of every rank."""

    rows: tuple[SparseRows, ...]

    def __repr__(self) -> str:
        like = self.rows[0]
        return f"Case({like.values.dtype} [{like.num_rows}, {like.width}], ids={[ids.tolist() for ids in self.ids]})"

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> list[Tensor]:
        return [rows.ids for rows in self.rows]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(rows.ids, rows.values) for rows in self.rows]

    @property
    def union(self) -> Tensor:
        return torch.cat(self.ids).unique()


def make_case(ids_per_rank: list[Tensor], num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(ids.numel(), width, generator=generator).to(dtype) for ids in ids_per_rank]
    return Case(tuple(SparseRows(ids, value, num_rows) for ids, value in zip(ids_per_rank, values, strict=True)))


@st.composite
def cases(draw: st.DrawFn, world_size: int, dtype: torch.dtype) -> Case:
    num_rows = draw(st.sampled_from([1, 2, 7, 40, 300]) | st.integers(0, 64))
    width = draw(st.sampled_from([1, 2, 7]))
    densities = draw(st.lists(st.sampled_from([0.0, 0.03, 0.3, 0.9, 1.0]), min_size=world_size, max_size=world_size))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    return make_case([random_ids(num_rows, d, generator) for d in densities], num_rows, width, dtype, seed)


def run(case: Case, scheme: Scheme, scale: float = 1.0) -> list[Outcome[SparseRows]]:
    return run_ranks(case.world_size, lambda peer: synchronized(peer, case.rows[peer.rank], scheme, scale))


def dense_sum(case: Case) -> Tensor:
    return torch.stack([rows.to_dense().double() for rows in case.rows]).sum(0)


def tolerance(case: Case, scheme: Scheme, exact: Tensor) -> Tensor:
    """Sums of n numbers err by n roundings of the accumulator's type, and one of the result's.

    What is merged on the way travels, and so is rounded, at each stage: at most n - 1 of them around a ring.
    """
    dtype = case.rows[0].values.dtype
    magnitude = torch.stack([rows.to_dense().double().abs() for rows in case.rows]).sum(0)
    # the group's own all-reduce adds in the dtype of the tensor
    in_16_bits = scheme.is_dense or merges_on_the_way(scheme)
    accumulator = ROUNDING[dtype] if in_16_bits else min(ROUNDING[dtype], ROUNDING[torch.float32])
    denormal = torch.finfo(dtype).smallest_normal * ROUNDING[dtype]
    return ROUNDING[dtype] * exact.abs() + (case.world_size + 2) * accumulator * magnitude + denormal


def merges_on_the_way(scheme: Scheme) -> bool:
    staged = scheme.communication in (Communication.RING, Communication.HIERARCHY)
    return staged and scheme.aggregation is Aggregation.INCREMENTAL


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def check_rows(case: Case, scheme: Scheme, total: SparseRows) -> None:
    """Which rows are in the sum: those of the union. What does not know rows has another law, and says so."""
    nonzero_sum = nonzero_rows(total.to_dense())
    if case.world_size == 1 or exact_rows(scheme):
        assert torch.equal(total.ids, case.union)
    elif (
        scheme.unit is Unit.ELEMENTS and not scheme.dense_switch
    ):  # rows that have an element that is not zero on some rank
        assert torch.equal(total.ids, torch.cat([ids[nonzero_rows(v)] for ids, v in case.pairs]).unique())
    elif scheme.is_dense or scheme.unit is Unit.BLOCKS:  # rows whose sum is not zero
        assert torch.equal(total.ids, nonzero_sum)
    else:  # a part that travels dense brings all its rows
        assert set(case.union.tolist()) <= set(total.ids.tolist())
    assert set(nonzero_sum.tolist()) <= set(case.union.tolist())


def exact_rows(scheme: Scheme) -> bool:
    """Whether the rows of the sum are those of the union, zeros or not."""
    by_name = (Format.DENSE,)
    dense = scheme.is_dense or (scheme.push_format == by_name) or (scheme.pull_format == by_name)
    return scheme.unit is Unit.ROWS and (scheme.knows_ids or not (dense or scheme.dense_switch))


def check_laws(case: Case, scheme: Scheme, scale: float = 1.0) -> SparseRows:
    outcomes = run(case, scheme, scale)
    results = [outcome.get() for outcome in outcomes]
    first = results[0]
    SparseRows(first.ids, first.values, first.num_rows)  # ids are strictly increasing and in range
    for other in results[1:]:
        assert torch.equal(other.ids, first.ids)
        assert torch.equal(bits(other.values), bits(first.values)), "ranks hold different bits"

    exact = dense_sum(case) * scale
    error = (first.to_dense().double() - exact).abs()
    assert bool((error <= tolerance(case, scheme, exact)).all()), f"off by {error.max()}"
    check_rows(case, scheme, first)

    like = case.rows[0]
    predicted = sent_bytes(scheme, case.ids, like.num_rows, like.width, like.values.dtype)
    assert [outcome.traffic.sent_bytes for outcome in outcomes] == predicted
    received = [outcome.traffic.received_bytes for outcome in outcomes]
    assert sum(received) == sum(predicted)
    return first


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SCHEMES)
def test_laws(name: str, world_size: int, dtype: torch.dtype) -> None:
    @settings(max_examples=3)
    @given(cases(world_size, dtype), st.booleans())
    def law(case: Case, mean: bool) -> None:
        check_laws(case, SCHEMES[name], 1.0 / world_size if mean else 1.0)

    law()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("posted_bytes", [0, 1 << 20], ids=["posted late", "posted early"])
@pytest.mark.parametrize("max_dealt_ranks", [1, 8], ids=["ids lead", "ids alone"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["column_split", "union_split"])
def test_laws_when_rows_are_dealt_to_ranks_that_hold_them(
    name: str,
    world_size: int,
    max_dealt_ranks: int,
    posted_bytes: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which small tables do not reach by themselves; of wide rows, so that there are early and late columns."""
    monkeypatch.setattr(owners, "POSTED_BYTES", posted_bytes)
    monkeypatch.setattr(union_shares, "MIN_DEALT_BYTES", 1)
    monkeypatch.setattr(union_shares, "MAX_DEALT_RANKS", max_dealt_ranks)

    @settings(max_examples=4)
    @given(st.integers(0, 2**31), st.sampled_from([4, 35, 67]), st.sampled_from([0.05, 0.4]))
    def law(seed: int, width: int, density: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = [random_ids(60, density, generator) for _ in range(world_size)]
        check_laws(make_case(ids, 60, width, dtype, seed), SCHEMES[name], 1.0 / world_size)

    law()


@pytest.mark.parametrize(("scheme", "most"), [(schemes.COLUMN_SPLIT, 1.05), (schemes.UNION_SPLIT, 1.025)])
@pytest.mark.parametrize("recipe", ["lstm", "nmt", "bert"])
def test_shares_of_a_union_come_near_the_values_that_no_scheme_can_avoid(
    recipe: str, scheme: Scheme, most: float
) -> None:
    """On 8 ranks, of the busiest one, ids and seals included."""
    workload = Workload(recipe, False, None, 0, 8, torch.float32)
    ids, (num_rows, width) = [workload.ids(rank) for rank in range(8)], workload.shape()
    sent = max(sent_bytes(scheme, ids, num_rows, width, torch.float32))
    assert sent <= most * value_lower_bound_bytes(ids, 4 * width)


SHAPES = [
    pytest.param(schemes.AGSPARSE, None, id="whole"),
    pytest.param(schemes.ZEN, Ownership.PERMUTATION, id=Ownership.PERMUTATION),
    pytest.param(schemes.ZEN, Ownership.HIERARCHICAL_HASH, id=Ownership.HIERARCHICAL_HASH),
    pytest.param(schemes.SPARSE_PS, Ownership.CONTIGUOUS, id=Ownership.CONTIGUOUS),
]
PAIRS = list(product(Format, Format))
SPARSE_PAIRS = [pair for pair in PAIRS if Format.DENSE not in pair]
DENSE_PAIRS = [pair for pair in PAIRS if Format.DENSE in pair]


@pytest.mark.few(9)
@pytest.mark.parametrize(("push", "pull"), SPARSE_PAIRS)
@pytest.mark.parametrize(("base", "ownership"), SHAPES)
def test_laws_for_every_pair_of_formats(base: Scheme, ownership: Ownership | None, push: Format, pull: Format) -> None:
    scheme = replace(base, ownership=ownership, push_format=(push,), pull_format=(pull,))

    @settings(max_examples=3)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from(SUPPORTED_DTYPES))
        check_laws(data.draw(cases(data.draw(st.sampled_from(WORLD_SIZES)), dtype)), scheme)

    law()


@pytest.mark.few(17)
@pytest.mark.parametrize(("push", "pull"), DENSE_PAIRS)
@pytest.mark.parametrize(("base", "ownership"), SHAPES)
def test_the_dense_format_predicts_its_bytes_and_adds_only_zero_rows(
    base: Scheme, ownership: Ownership | None, push: Format, pull: Format
) -> None:
    """A part sent whole does not say which of its rows were there; asked for by name, that is what one gets."""
    scheme = replace(base, ownership=ownership, push_format=(push,), pull_format=(pull,))
    for num_rows, world_size in ((23, 4), (3, 5)):
        generator = torch.Generator().manual_seed(world_size)
        ids = [random_ids(num_rows, 0.4, generator) for _ in range(world_size)]
        case = make_case(ids, num_rows, 3, torch.float32)
        outcomes = run(case, scheme)
        total = outcomes[0].get()
        assert set(case.union.tolist()) <= set(total.ids.tolist())
        extra = torch.isin(total.ids, case.union, invert=True)
        assert not bool(total.values[extra].any())
        torch.testing.assert_close(total.to_dense(), dense_sum(case).float())
        assert [o.traffic.sent_bytes for o in outcomes] == sent_bytes(scheme, ids, num_rows, 3, torch.float32)


EMPTY = torch.empty(0, dtype=torch.int64)
CORNERS = {
    "no_rank_has_rows": (50, lambda rank, n: EMPTY),
    "one_rank_has_rows": (50, lambda rank, n: torch.arange(0, 50, 3) if rank == n - 1 else EMPTY),
    "one_rank_has_none": (50, lambda rank, n: EMPTY if rank == 0 else torch.arange(rank, 50, 2)),
    "full_overlap": (50, lambda rank, n: torch.arange(0, 50, 4)),
    "no_overlap": (50, lambda rank, n: torch.arange(rank, 50, n)),
    "all_rows": (50, lambda rank, n: torch.arange(50)),
    "all_rows_but_one": (50, lambda rank, n: torch.arange(1, 50)),
    "one_row": (1, lambda rank, n: torch.zeros(1, dtype=torch.int64)),
    "fewer_rows_than_ranks": (3, lambda rank, n: torch.tensor([rank % 3])),
    "no_rows_at_all": (0, lambda rank, n: EMPTY),
    "more_than_a_byte_of_positions": (3000, lambda rank, n: torch.arange(rank, 3000, 701)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", SCHEMES)
def test_corners(name: str, corner: str, width: int) -> None:
    num_rows, ids_of = CORNERS[corner]
    for world_size, dtype in ((4, torch.float32), (5, torch.bfloat16)):
        case = make_case([ids_of(rank, world_size) for rank in range(world_size)], num_rows, width, dtype)
        check_laws(case, SCHEMES[name])


@pytest.mark.few(39)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_parts_of_more_than_two_bytes_of_positions(name: str, dtype: torch.dtype) -> None:
    ids = [torch.arange(rank, 140_000, 9973) for rank in range(2)]
    check_laws(make_case(ids, 140_000, 1, dtype), SCHEMES[name])


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_size", [3, 8])
def test_schemes_that_add_at_once_give_the_same_bits(world_size: int, dtype: torch.dtype) -> None:
    """All add in rank order, so that a change of scheme does not change a run."""
    generator = torch.Generator().manual_seed(1)
    ids = [random_ids(200, 0.4, generator) for _ in range(world_size)]
    case = make_case(ids, 200, 3, dtype)
    in_rank_order = torch.zeros(200, 3, dtype=dtype)
    for rows in case.rows:
        in_rank_order += rows.to_dense()
    for name, scheme in SCHEMES.items():
        if not scheme.is_dense and not merges_on_the_way(scheme):
            assert torch.equal(bits(run(case, scheme)[0].get().to_dense()), bits(in_rank_order)), name


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_nan_and_inf_pass_through(name: str, dtype: torch.dtype) -> None:
    case = make_case([torch.arange(0, 20, 2), torch.arange(0, 20), EMPTY], 20, 3, dtype)
    inf, nan = float("inf"), float("nan")
    case.rows[0].values[0] = torch.tensor([inf, -inf, nan])
    case.rows[1].values[2] = torch.tensor([-inf, 0.0, inf])
    case.rows[0].values[1, 0] = inf  # row 2 again: inf - inf is nan
    expected = dense_sum(case)
    for outcome in run(case, SCHEMES[name]):
        got = outcome.get().to_dense().double()
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got[got.isinf()], expected[expected.isinf()])
        assert bool(got.isnan().any())
        assert bool(got.isinf().any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """1 + many small ones: added in 16 bits they vanish one by one, added in float32 they count."""
    small = float(ROUNDING[dtype]) / 2
    ids = torch.zeros(1, dtype=torch.int64)
    values = [1.0] + [small] * 7
    case = Case(tuple(SparseRows(ids, torch.full((1, 1), value, dtype=dtype), 1) for value in values))
    expected = torch.tensor(sum(values), dtype=torch.float64).to(dtype).item()
    assert expected > 1.0
    for name, scheme in SCHEMES.items():
        if not scheme.is_dense and not merges_on_the_way(scheme):
            assert run(case, scheme)[0].get().values.item() == expected, name


@pytest.mark.parametrize("unit", Unit)
@given(st.data())
def test_units_are_another_view_of_the_same_rows(unit: Unit, data: st.DataObject) -> None:
    """There and back is the identity, but that rows of zeros vanish; ids are as by arithmetic."""
    (rows,) = data.draw(cases(1, data.draw(st.sampled_from(SUPPORTED_DTYPES)))).rows
    units = to_units(rows, unit)
    num_units, unit_width = unit_shape(rows.num_rows, rows.width, unit)
    assert (units.num_rows, units.width) == (num_units, unit_width)
    SparseRows(units.ids, units.values, units.num_rows)
    assert torch.equal(units.ids, unit_ids(rows.ids, rows.width, unit))
    flat = rows.to_dense().flatten()
    seen = units.to_dense().flatten()
    assert torch.equal(bits(seen[: flat.numel()]), bits(flat))
    assert not bool(seen[flat.numel() :].any())
    back = from_units(units, rows, unit)
    assert torch.equal(back.ids, rows.ids)
    assert torch.equal(bits(back.values), bits(rows.values))


def test_units_of_rows_with_zeros() -> None:
    """[[1, 0], [0, 0], [0, 2]] has two elements that are not zero, in one block; the row of zeros does not return."""
    rows = SparseRows(torch.tensor([3, 5, 200]), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]]), 300)
    elements = to_units(rows, Unit.ELEMENTS)
    assert elements.ids.tolist() == [6, 401]
    blocks = to_units(rows, Unit.BLOCKS)
    assert blocks.ids.tolist() == [0, 1]
    assert blocks.values[0].nonzero().flatten().tolist() == [6]
    for unit, units in ((Unit.ELEMENTS, elements), (Unit.BLOCKS, blocks)):
        assert from_units(units, rows, unit).ids.tolist() == [3, 200]


def test_the_cheapest_format_loses_no_row_and_adds_none() -> None:
    """A sparse gradient of which nearly all rows are present keeps its rows: optimizers such as SparseAdam move
    the momentum of every row that they are given, zero or not."""
    present = torch.arange(1, 4000)
    case = make_case([present, present[::2].contiguous()], 4000, 1, torch.float32)
    assert torch.equal(run(case, schemes.ZEN)[0].get().ids, present)


def test_rows_of_zeros_stay() -> None:
    """A row that is present and zero, and rows that cancel each other, are rows of the sum."""
    ids = torch.tensor([1, 5, 9])
    rows = SparseRows(ids, torch.tensor([[0.0], [1.0], [2.0]]), 12)
    minus = SparseRows(ids, torch.tensor([[0.0], [-1.0], [2.0]]), 12)
    for name, scheme in SCHEMES.items():
        total = run(Case((rows, minus)), scheme)[0].get()
        check_rows(Case((rows, minus)), scheme, total)
        if exact_rows(scheme):
            assert torch.equal(total.ids, ids), name
        assert total.to_dense().flatten().tolist() == [0.0] * 9 + [4.0, 0.0, 0.0], name


@pytest.mark.few(20)
@pytest.mark.parametrize("name", SCHEMES)
def test_inputs_are_not_changed(name: str) -> None:
    case = make_case([torch.arange(0, 30, 2), torch.arange(30)], 30, 2, torch.float32)
    before = [(rows.ids.clone(), rows.values.clone()) for rows in case.rows]
    for scale in (1.0, 0.5):
        run(case, SCHEMES[name], scale)
    for rows, (ids, values) in zip(case.rows, before, strict=True):
        assert torch.equal(rows.ids, ids)
        assert torch.equal(rows.values, values)
