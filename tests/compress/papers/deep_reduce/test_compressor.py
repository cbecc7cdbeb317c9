"""DeepReduce: codes of ids and of values by themselves, then together, under error feedback and out of broken bytes."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.compress.papers.deep_reduce.coded import BLOOM, EXACT
from thinwire import compress
from thinwire.compress import deep_reduce, error_feedback, polynomial, qsgd, top_k
from thinwire.compress.base import Compressor, Parameter, Payload
from thinwire.compress.methods.sparsify import HEADER_BYTES, opened, sealed
from thinwire.compress.named import parse
from thinwire.compress.papers.deep_reduce.compressor import DeepReduce
from thinwire.compress.warm_up import density_of, warm_up
from thinwire.compress.wrappers import code_of, packed_code
from thinwire.errors import CorruptMessageError
from thinwire.lab.doctor.advice import expression

pytestmark = pytest.mark.slow

VALUES: dict[str, str | Compressor] = {
    "raw": "raw",
    "lossless": "lossless",
    "qsgd": qsgd(4, 64),
    "bf16": compress.bf16(),
    "polynomial": "polynomial",
    "double_exponential": "double_exponential",
}


def step_of(code: DeepReduce, parameter: Parameter, gradient: Tensor) -> tuple[Payload, Tensor, Tensor]:
    """A payload under error feedback, its bytes, and what is kept."""
    compressor = error_feedback(code)
    state = compressor.init(parameter)
    payload = compressor.compress(gradient, parameter, state)
    return payload, code.pack(payload, parameter), state["error"]


# --- together


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


# --- bytes that nobody sends


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
        ((compress.ok_topk(0.1), "bloom:p0"), "ids and values of a sparsifier"),  # whose exchange would not code them
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
