"""DeepReduce: codes of ids and of values by themselves, then together, under error feedback and out of broken bytes."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import compress
from thinwire.compress import deep_reduce, error_feedback, polynomial, qsgd, top_k
from thinwire.compress.base import Compressor, Parameter, Payload
from thinwire.compress.methods.sparsify import HEADER_BYTES, opened, sealed
from thinwire.compress.named import parse
from thinwire.compress.papers.deep_reduce.compressor import DeepReduce
from thinwire.compress.papers.deep_reduce.indices import LOSSLESS, Auto, Bloom, _filter_bits, code_lengths, index_codec
from thinwire.compress.papers.deep_reduce.values import SortedCurves, double_exponential
from thinwire.compress.warm_up import density_of, warm_up
from thinwire.compress.wrappers import code_of, packed_code
from thinwire.errors import CorruptMessageError
from thinwire.lab.doctor.advice import expression

pytestmark = pytest.mark.slow

EXACT = [codec.name for codec in (*LOSSLESS, Auto())]
BLOOM = ["bloom:p0", "bloom:p1", "bloom:p2", "bloom:p0:0.3", "bloom:p2:0.05"]
VALUES: dict[str, str | Compressor] = {
    "raw": "raw",
    "lossless": "lossless",
    "qsgd": qsgd(4, 64),
    "bf16": compress.bf16(),
    "polynomial": "polynomial",
    "double_exponential": "double_exponential",
}


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


# --- curves


def coded(code: Compressor, values: Tensor) -> Tensor:
    parameter, packed = Parameter("values", tuple(values.shape), values.dtype), packed_code(code)
    payload = code.compress(values, parameter, code.init(parameter))
    data = packed.pack(payload, parameter)
    assert data.numel() == packed.packed_bytes(parameter)
    decoded = packed.decompress(packed.unpack(data, parameter), parameter)
    assert torch.equal(decoded, packed.decompress(payload, parameter))
    return decoded


CURVES = [polynomial(), polynomial(1, 2), polynomial(0, 256), polynomial(12, 3), double_exponential()]
SHAPES = {
    "normal": lambda n: torch.randn(n),
    "top": lambda n: top_k(0.05).select(torch.randn(20 * n).double().float(), Parameter("w", (20 * n,)), {})[1],
    "one sign": lambda n: torch.rand(n) + 0.1,
    "negative": lambda n: -torch.rand(n),
    "equal": lambda n: torch.full((n,), 0.3),
    "zeros": lambda n: torch.zeros(n),
    "one outlier": lambda n: torch.randn(n).index_fill_(0, torch.tensor([n // 2]), 1e30),
    "denormal": lambda n: torch.randn(n) * 1e-41,
    "largest": lambda n: torch.randn(n).sign() * torch.finfo(torch.float32).max,
    "few": lambda n: torch.zeros(n).index_fill_(0, torch.tensor([3]), -2.0),
    "all scales": lambda n: torch.randn(n) * 10.0 ** torch.linspace(-44, 37, n),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("code", CURVES, ids=lambda code: code.name)
def test_a_curve_never_loses_more_than_the_values(code: Compressor, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (1, 2, 13, 200, 5000):
        values = SHAPES[kind](max(size, 4)).to(dtype)
        decoded = coded(code, values)
        assert bool(torch.isfinite(decoded).all())
        lost = (decoded.double() - values.double()).norm()
        assert float(lost) <= (1 + 1e-5) * float(values.double().norm())


def test_sorted_values_lie_on_the_curves() -> None:
    torch.manual_seed(0)
    values = SHAPES["top"](2000)

    def error(code: Compressor) -> float:
        return float((coded(code, values) - values).norm() / values.norm())

    by_pieces = [error(polynomial(5, pieces)) for pieces in (2, 4, 8, 16)]
    by_degree = [error(polynomial(degree)) for degree in (0, 1, 5)]
    assert by_pieces == sorted(by_pieces, reverse=True)
    assert by_degree == sorted(by_degree, reverse=True)
    assert by_pieces[2] < 0.01
    assert error(double_exponential()) < 0.05


def test_curves_of_their_own_kind_are_found() -> None:
    x = torch.linspace(0, 1, 1000, dtype=torch.float64)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    sums = {"both fall": 3 * torch.exp(-9 * x) + torch.exp(-1.5 * x), "from both ends": 2 - 0.01 * torch.exp(5 * x)}
    for name, values in sums.items():
        assert bool((values > 0).all())
        torch.testing.assert_close(coded(double_exponential(), values[order]), values[order], atol=2e-4, rtol=0), name
    quintic = 4 - x - x**3 - x**5
    torch.testing.assert_close(coded(polynomial(5, 2), quintic[order]), quintic[order], atol=1e-12, rtol=0)


def test_no_curve_is_larger_than_the_values() -> None:
    for code in CURVES:
        assert isinstance(code, SortedCurves)
        sizes = [code.packed_bytes(Parameter("values", (count,))) for count in range(400)]
        assert all(size <= 8 + 8 * -(-4 * count // 8) for count, size in enumerate(sizes) if size is not None)
        assert None not in sizes
    assert polynomial().packed_bytes(Parameter("values", (1000,))) == 3 * 8 + 200 + 32 + 1256


# --- together


def step_of(code: DeepReduce, parameter: Parameter, gradient: Tensor) -> tuple[Payload, Tensor, Tensor]:
    """A payload under error feedback, its bytes, and what is kept."""
    compressor = error_feedback(code)
    state = compressor.init(parameter)
    payload = compressor.compress(gradient, parameter, state)
    return payload, code.pack(payload, parameter), state["error"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("index", [*EXACT, *BLOOM])
def test_what_does_not_arrive_is_kept(index: str, values: str, dtype: torch.dtype) -> None:
    """Memory = gradient - what receivers decode, bit for bit; and bytes are those that were predicted."""
    for shape in ((), (0,), (1,), (40, 50), (9, 1111)):
        parameter = Parameter("weight", shape, dtype)
        code = deep_reduce(top_k(0.05), index, VALUES[values])
        gradient = torch.randn(shape, dtype=parameter.working_dtype)
        payload, data, kept = step_of(code, parameter, gradient)
        arrived = code.unpack(data, parameter)
        decoded = code.decompress(arrived, parameter)
        assert torch.equal(decoded, code.decompress(payload, parameter))
        assert torch.equal(kept, gradient - decoded)
        assert code.packed_bytes(parameter) in (None, data.numel())
        assert data.numel() % 8 == 0
        ids, sent = code.chosen(arrived, parameter)
        if values in ("raw", "lossless"):
            assert torch.equal(sent, gradient.view(-1)[ids])
            assert not kept.view(-1)[ids].any()
        if index in EXACT or ids.numel() == 0:
            assert torch.equal(ids, top_k(0.05).select(gradient.view(-1), parameter, {})[0])


def test_sizes_are_known_where_no_code_depends_on_the_gradient() -> None:
    parameter = Parameter("weight", (100, 1000))
    known = {
        (index, values): deep_reduce(top_k(0.01), index, VALUES[values]).packed_bytes(parameter)
        for index in ("elias_fano", "bitmap", "run_length", "huffman", "bloom:p0", "bloom:p1", "bloom:p2")
        for values in VALUES
    }
    unknown = {pair for pair, size in known.items() if size is None}
    assert unknown == {
        (index, values)
        for index, values in known
        if index in ("run_length", "huffman", "bloom:p0") or values == "lossless"
    }
    assert known["elias_fano", "raw"] == known["elias_fano", "bf16"] + 2000 - 8  # of the length of coded values
    assert deep_reduce(compress.threshold(0.1)).packed_bytes(parameter) is None


@pytest.mark.parametrize("index", [*EXACT, "bloom:p0", "bloom:p2"])
@pytest.mark.parametrize("values", ["raw", "qsgd", "polynomial"])
def test_bytes_of_random_ids_are_expected_by_formula(index: str, values: str) -> None:
    parameter = Parameter("weight", (100, 2000))
    code = deep_reduce(top_k(0.02), index, VALUES[values])
    payload = code.compress(torch.randn(parameter.shape), parameter, code.init(parameter))
    assert code.pack(payload, parameter).numel() == pytest.approx(code.expected_bytes(4000, parameter), rel=0.02)


@pytest.mark.parametrize("index", [*EXACT, *BLOOM])
def test_a_gradient_of_zeros_and_one_without_any_sent_element(index: str) -> None:
    parameter = Parameter("weight", (30, 30))
    for sparsifier in (compress.threshold(1.0), compress.gaussian_k(0.01), top_k(0.01), top_k(1.0)):
        code = deep_reduce(sparsifier, index, polynomial())
        _, data, kept = step_of(code, parameter, torch.zeros(30, 30))
        assert not code.decompress(code.unpack(data, parameter), parameter).any()
        assert not kept.any()


def test_elements_that_several_ranks_send_add_up() -> None:
    parameter = Parameter("weight", (100,))
    for index in (*EXACT, *BLOOM):
        code, payloads = deep_reduce(top_k(0.01), index), []
        for value in (9.0, 7.0):
            gradient = torch.zeros(100)
            gradient[42] = value
            payload = code.compress(gradient, parameter, code.init(parameter))
            payloads.append(code.unpack(code.pack(payload, parameter), parameter))
        assert float(code.combine(payloads, parameter)[42]) == 8.0


def test_a_warm_up_and_momentum_correction_see_the_sparsifier() -> None:
    parameter = Parameter("weight", (50, 100))
    warm = warm_up(error_feedback(deep_reduce(top_k(0.01), "huffman", qsgd(4))), steps=2)
    assert density_of(warm) == 0.01
    state, counts = warm.init(parameter), []
    for _ in range(4):
        payload = warm.compress(torch.randn(50, 100), parameter, state)
        code = packed_code(warm)
        counts.append(code.unpack(code.pack(payload, parameter), parameter).parts[0].numel())
    assert counts == [1250, 250, 50, 50]
    momentum = compress.momentum_correction(deep_reduce(top_k(0.1), "bloom:p2"), 0.9)
    state = momentum.init(parameter)
    ids = momentum.compress(torch.randn(50, 100), parameter, state).parts[0]
    assert not state["momentum"].view(-1)[ids].any()
    assert int(state["momentum"].count_nonzero()) == 5000 - ids.numel()
    assert int(state["velocity"].count_nonzero()) == 5000 - ids.numel()


def test_a_saved_state_continues_with_the_same_bits() -> None:
    parameter, compressor = Parameter("weight", (40, 50)), error_feedback(deep_reduce(top_k(0.1), "bloom:p1", qsgd(4)))
    state = compressor.init(parameter)
    compressor.compress(torch.randn(40, 50), parameter, state)
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    copy, gradient, code = torch.load(memory, weights_only=True), torch.randn(40, 50), packed_code(compressor)
    sent = [code.pack(compressor.compress(gradient, parameter, each), parameter) for each in (state, copy)]
    assert torch.equal(*sent)


# --- bytes that nobody sends


def broken(data: Tensor, generator: np.random.Generator) -> Tensor:
    """The payload with some bits of its body changed, or its end cut, under a checksum that fits."""
    count, number, body = opened(data)
    body = body.clone()
    kind = generator.integers(4)
    if kind == 0 and body.numel():
        return sealed(count, number, [body[: generator.integers(body.numel())]])
    if kind == 1:
        return sealed(int(generator.integers(1, 2 * count + 2)), number, [body])
    if kind == 2:
        return sealed(count, int(generator.integers(8)), [body])
    for place in generator.integers(body.numel(), size=generator.integers(1, 9)):
        body[place] = int(generator.integers(256))
    return sealed(count, number, [body])


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("index", [*EXACT, *BLOOM])
def test_broken_bytes_are_refused_or_decode_to_something(index: str, values: str) -> None:
    parameter, generator = Parameter("weight", (37, 53)), np.random.default_rng(0)
    code = deep_reduce(top_k(0.2), index, VALUES[values])
    _, data, _ = step_of(code, parameter, torch.randn(37, 53))
    refused = 0
    for _ in range(60):
        try:
            payload = code.unpack(broken(data, generator), parameter)
        except CorruptMessageError:
            refused += 1
        else:
            ids, chosen = code.chosen(payload, parameter)
            assert ids.numel() == chosen.numel() <= parameter.numel
            assert bool((ids.diff() > 0).all())
            assert 0 <= int(ids.min()) <= int(ids.max()) < parameter.numel
    assert refused >= 15
    for size in (0, 8, HEADER_BYTES, HEADER_BYTES + 8, data.numel() - 8):
        with pytest.raises(CorruptMessageError):
            code.unpack(data[:size].clone(), parameter)


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


def test_curves_that_cannot_be_are_refused() -> None:
    parameter, code = Parameter("values", (1000,)), polynomial()
    payload = code.compress(torch.randn(1000), parameter, {})
    numbers, ends, mapping = payload.parts
    for parts in (
        (numbers.index_fill(0, torch.tensor([5]), math.nan), ends, mapping),
        (numbers.index_fill(0, torch.tensor([0]), math.inf), ends, mapping),
        (numbers, ends.index_fill(0, torch.tensor([2]), 1001), mapping),
        (numbers, ends.index_fill(0, torch.tensor([2]), -1), mapping),
        (numbers, ends, mapping.index_fill(0, torch.tensor([0]), 0)),
    ):
        with pytest.raises(CorruptMessageError, match=r"curves with|no permutation"):
            code.unpack(code.pack(Payload(parts), parameter), parameter)


# --- names and wrong arguments


def test_names_say_all_settings() -> None:
    assert deep_reduce().name == "deep_reduce(top_k(0.01), elias_fano, raw)"
    assert deep_reduce(top_k(0.1), "bloom:p2:0.01", qsgd(4)).name == (
        "deep_reduce(top_k(0.1), bloom:p2:0.01, qsgd(4, 512))"
    )
    assert code_of(error_feedback(deep_reduce())).name == deep_reduce().name


def test_a_text_names_every_code() -> None:
    text = "deep_reduce:sparsifier=top_k(density=0.05):index=bloom(p1;0.01):values=qsgd(bits=4;bucket=64)"
    assert parse(text) == deep_reduce(top_k(0.05), "bloom:p1:0.01", qsgd(4, 64))
    assert parse("deep_reduce:index=huffman:values=raw") == deep_reduce(index="huffman")
    assert parse("deep_reduce:values=polynomial") == deep_reduce(values="polynomial")
    assert expression("deep_reduce:sparsifier=top_k(density=0.05):index=bloom(p1):values=qsgd(bits=4)") == (
        "thinwire.compress.deep_reduce(sparsifier=thinwire.compress.top_k(density=0.05), index='bloom:p1',"
        " values=thinwire.compress.qsgd(bits=4))"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((compress.random_k(0.1),), "ids and values of a sparsifier"),
        ((error_feedback(top_k(0.1)),), r"memories and other wrappers go around it"),
        ((deep_reduce(),), "ids and values of a sparsifier"),
        ((qsgd(4),), "ids and values of a sparsifier"),
        ((0.01,), "ids and values of a sparsifier"),
        ((top_k(0.1, values=compress.bf16()),), "give that code to deep_reduce"),
        ((top_k(0.1), "hufman"), "Did you mean 'huffman'"),
        ((top_k(0.1), "bloom:p3"), "unknown code of ids 'bloom:p3'"),
        ((top_k(0.1), "bloom:p1:2"), r"rate of false positives in \[1e-9, 0.9\]"),
        ((top_k(0.1), "bloom:p1:1e"), "unknown code of ids 'bloom:p1:1e'"),
        ((top_k(0.1), None), "unknown code of ids 'None'"),
        ((top_k(0.1), "auto", "polynom"), "Did you mean 'polynomial'"),
        ((top_k(0.1), "auto", top_k(0.1)), "cannot code its values"),
        ((top_k(0.1), "auto", error_feedback(compress.bf16())), "cannot code its values"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deep_reduce(*arguments)  # type: ignore[arg-type]


def test_curves_without_sense_are_refused() -> None:
    for degree, pieces in ((-1, 8), (13, 8), (5, 1), (5, 257), ("5", 8)):
        with pytest.raises(ValueError, match="degree from 0 to 12 and 2 to 256 pieces"):
            polynomial(degree, pieces)  # type: ignore[arg-type]
