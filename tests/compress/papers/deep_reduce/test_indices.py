"""Codes of ids: lossless ones and filters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.papers.deep_reduce.coded import BLOOM, EXACT
from thinwire.compress.papers.deep_reduce.indices import LOSSLESS, Auto, Bloom, _filter_bits, code_lengths, index_codec
from thinwire.errors import CorruptMessageError

pytestmark = pytest.mark.slow


def random_ids(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def clustered(count: int, size: int, seed: int = 0) -> Tensor:
    """Ids in runs, as of a gradient of which some rows are large."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(size, (max(1, count // 16),), generator=generator)
    near = (starts[:, None] + torch.randint(48, (starts.numel(), 32), generator=generator)).view(-1)
    return near[near < size].unique()[:count]


SETS = {
    "one, the first": (torch.tensor([0]), 1000),
    "one, the last": (torch.tensor([999]), 1000),
    "the only one": (torch.tensor([0]), 1),
    "all": (torch.arange(777), 777),
    "all but one": (torch.cat([torch.arange(300), torch.arange(301, 777)]), 777),
    "every other one": (torch.arange(0, 1000, 2), 1000),
    "both ends": (torch.tensor([0, 1, 2, 99_997, 99_998, 99_999]), 100_000),
    "far apart": (torch.tensor([3, 1 << 20, (1 << 40) + 5]), 1 << 41),
    "clustered": (clustered(1000, 100_000), 100_000),
    "random, 0.1 %": (random_ids(100, 100_000), 100_000),
    "random, 10 %": (random_ids(5000, 50_000), 50_000),
    "random, 70 %": (random_ids(700, 1000), 1000),
}


# --- codes of ids


@pytest.mark.parametrize(
    ("name", "ids"),
    [(name, ids) for name in EXACT for ids in SETS if ids != "far apart" or name not in ("bitmap", "auto")],
)
def test_lossless_codes_give_back_every_id(name: str, ids: str) -> None:
    (chosen, size), codec = SETS[ids], index_codec(name)
    data = codec.encode(chosen, size)
    assert torch.equal(codec.decode(data, chosen.numel(), size), chosen)
    assert codec.num_bytes(chosen.numel(), size) in (None, data.numel())


@given(st.sets(st.integers(0, 299), min_size=1), st.integers(300, 400))
@settings(max_examples=min(100, settings.default.max_examples), deadline=None)
def test_lossless_codes_give_back_any_ids(chosen: set[int], size: int) -> None:
    ids = torch.tensor(sorted(chosen))
    for codec in (*LOSSLESS, Auto()):
        assert torch.equal(codec.decode(codec.encode(ids, size), len(chosen), size), ids), codec.name


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("name", EXACT)
def test_random_ids_cost_what_the_formula_says(name: str, density: float) -> None:
    size, codec = 200_000, index_codec(name)
    count = round(density * size)
    data = codec.encode(random_ids(count, size), size)
    assert data.numel() == pytest.approx(codec.expected_bytes(count, size), rel=0.03)


def test_gaps_cost_little_more_than_their_entropy() -> None:
    for density in (0.001, 0.01, 0.1):
        size, absent = 1_000_000, 1 - density
        count = round(density * size)
        entropy = -size * (density * math.log2(density) + absent * math.log2(absent)) / 8
        spent = index_codec("huffman").encode(random_ids(count, size), size).numel()
        assert entropy < spent < 1.04 * entropy + 64, (density, spent / entropy)


def test_clusters_are_cheap_for_codes_that_depend_on_the_ids() -> None:
    ids, size = clustered(10_000, 1_000_000), 1_000_000
    spent = {name: index_codec(name).encode(ids, size).numel() for name in EXACT}
    assert spent["huffman"] < 0.8 * spent["elias_fano"]
    assert spent["run_length"] < 0.9 * spent["elias_fano"]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
@settings(max_examples=min(100, settings.default.max_examples), deadline=None)
def test_lengths_are_those_of_a_complete_code(counts: list[int]) -> None:
    assume(any(counts))
    lengths = code_lengths(tuple(counts))
    used = [length for length, count in zip(lengths, counts, strict=True) if count]
    assert [length > 0 for length in lengths] == [count > 0 for count in counts]
    assert max(used) <= 15
    assert sum(2.0**-length for length in used) == (1.0 if len(used) > 1 else 0.5)
    shares = np.array([count for count in counts if count]) / sum(counts)
    assert float(np.dot(shares, used)) <= 1.0 - float((shares * np.log2(shares)).sum()) + 0.01


def test_long_codes_are_shortened() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 30:
        fibonacci.append(sum(fibonacci[-2:]))
    assert max(code_lengths(tuple(fibonacci))) == 15


def test_auto_takes_the_fewest_bytes_by_formula() -> None:
    taken = set()
    for density in (0.0001, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9):
        size = 100_000
        count = round(density * size)
        best = Auto().of(count, size)
        assert best.expected_bytes(count, size) == min(codec.expected_bytes(count, size) for codec in LOSSLESS)
        assert Auto().num_bytes(count, size) == best.num_bytes(count, size)
        taken.add(best.name)
    assert taken >= {"elias_fano", "huffman"}


# --- Bloom filters


@pytest.mark.parametrize("ids", [name for name, (_, size) in SETS.items() if size < 1 << 30])
@pytest.mark.parametrize("fpr", [None, 0.5, 0.01])
def test_a_filter_has_no_false_negatives(fpr: float | None, ids: str) -> None:
    (chosen, size), codec = SETS[ids], Bloom("p0", fpr)
    data = codec.encode(chosen, size)
    assert data.numel() == codec.num_bytes(chosen.numel(), size)
    assert bool(torch.isin(chosen, codec.decode(data, chosen.numel(), size)).all())


@pytest.mark.parametrize("fpr", [0.5, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("make", [random_ids, clustered])
def test_false_positives_are_as_frequent_as_the_law_says(make: object, fpr: float) -> None:
    """Within five deviations of a binomial count, and 5 % for what the law leaves out; and near the rate asked for."""
    size, codec = 400_000, Bloom("p0", fpr)
    ids = make(2000, size)  # type: ignore[operator]
    count = ids.numel()
    wrong = codec.decode(codec.encode(ids, size), count, size).numel() - count
    expected = codec.rate(count, size) * (size - count)
    assert abs(wrong - expected) <= 5 * math.sqrt(expected) + 0.05 * expected
    assert 0.85 * fpr <= codec.rate(count, size) <= 1.15 * fpr


def test_by_default_a_tenth_more_ids_are_found() -> None:
    for density in (0.001, 0.01, 0.1):
        size, codec = 300_000, Bloom("p0")
        ids = random_ids(round(density * size), size)
        found = codec.decode(codec.encode(ids, size), ids.numel(), size).numel()
        assert found / ids.numel() == pytest.approx(1.1, abs=0.06)
        assert 8 * codec.num_bytes(ids.numel(), size) / ids.numel() == pytest.approx(
            1.4427 * math.log2(10 / density), rel=0.01
        )


def test_policies_give_so_many_of_what_is_found_and_conflict_sets_choose_well() -> None:
    size, ids = 300_000, random_ids(3000, 300_000)
    hits = {}
    for fpr in (None, 0.01, 0.1):
        everything = Bloom("p0", fpr).decode(Bloom("p0", fpr).encode(ids, size), ids.numel(), size)
        for policy in ("p1", "p2"):
            codec = Bloom(policy, fpr)  # type: ignore[arg-type]
            chosen = codec.decode(codec.encode(ids, size), ids.numel(), size)
            assert chosen.numel() == ids.numel()
            assert bool((chosen.diff() > 0).all())
            assert bool(torch.isin(chosen, everything).all())
            hits[policy, fpr] = float(torch.isin(ids, chosen).double().mean())
        share = ids.numel() / everything.numel()  # what a choice without any knowledge hits
        assert hits["p1", fpr] == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / ids.numel()) + 0.005)
        assert hits["p2", fpr] > hits["p1", fpr]
    assert hits["p2", None] > 0.98
    assert hits["p2", 0.01] > 1.2 * hits["p1", 0.01]


def test_the_only_id_that_explains_a_bit_is_always_taken() -> None:
    size, ids, codec = 50_000, random_ids(500, 50_000), Bloom("p2", 0.002)
    hashes, num_bits = codec.shape(500, size)
    everything = Bloom("p0", 0.002).decode(codec.encode(ids, size), 500, size)
    alone: dict[int, list[int]] = {}
    for places in _filter_bits(everything, hashes, num_bits):
        for place, found in zip(places.tolist(), everything.tolist(), strict=True):
            alone.setdefault(place, []).append(found)
    certain = {found[0] for found in alone.values() if len(set(found)) == 1}
    assert certain <= set(ids.tolist())
    assert certain <= set(codec.decode(codec.encode(ids, size), 500, size).tolist())
    assert len(certain) > 300


def test_choices_change_with_the_ids_and_with_nothing_else() -> None:
    size, codec = 100_000, Bloom("p1", 0.1)
    first, second = random_ids(1000, size, 1), random_ids(1000, size, 2)
    twice = [codec.decode(codec.encode(first, size), 1000, size) for _ in range(2)]
    assert torch.equal(*twice)
    extra = [set(found.tolist()) for found in (twice[0], codec.decode(codec.encode(second, size), 1000, size))]
    assert extra[0] != extra[1]


@pytest.mark.parametrize("name", [*EXACT, *BLOOM])
def test_any_bytes_of_ids_are_refused_or_are_ids(name: str) -> None:
    codec, generator, size = index_codec(name), np.random.default_rng(1), 3000
    for _ in range(300):
        count = int(generator.integers(1, 400))
        length = codec.num_bytes(count, size) if generator.integers(2) else int(generator.integers(0, 300))
        data = generator.integers(256, size=length or 20, dtype=np.uint8)
        data[:8] *= np.uint8(generator.integers(2))
        try:
            ids = codec.decode(torch.from_numpy(data), count, size)
        except CorruptMessageError:
            continue
        assert ids.numel() == count or not codec.keeps_count
        assert bool((ids.diff() > 0).all())
        assert 0 <= int(ids[0]) <= int(ids[-1]) < size


def test_a_filter_of_ones_is_refused() -> None:
    """It would have every id in it, and conflict sets as large as the gradient."""
    codec = Bloom("p2")
    data = torch.full((codec.num_bytes(100, 100_000),), 255, dtype=torch.uint8)
    with pytest.raises(CorruptMessageError, match="ones are no filter of 100 ids"):
        codec.decode(data, 100, 100_000)
