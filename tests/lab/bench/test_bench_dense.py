"""Dense workloads of `thinwire bench sync`: their texts and buckets, the ideal code, and bits of a value."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from thinwire.lab.bench.dense.benchmark import DenseBenchmark
from thinwire.lab.bench.dense.ideal import ideal_bits, push_and_pull
from thinwire.lab.bench.dense.workload import DenseWorkload, buckets
from thinwire.lab.bench.train.rows import against_rank_order, bits_per_value
from thinwire.lab.bench.train.stock import rank_order_sum
from thinwire.lab.cli.main import app

DTYPES = {
    torch.float32: (torch.int32, 32, 8),
    torch.float64: (torch.int64, 64, 11),
    torch.bfloat16: (torch.int16, 16, 8),
    torch.float16: (torch.int16, 16, 5),
}


def by_strings(values: Tensor) -> float:
    """The ideal code of one chunk, from the binary digits of each value and conditional entropies one by one."""
    kind, width, exponent_bits = DTYPES[values.dtype]
    symbols, verbatim = [], 0
    for integer in values.view(kind).tolist():
        digits = format(integer & ((1 << width) - 1), f"0{width}b")
        exponent, mantissa = digits[1 : 1 + exponent_bits], digits[1 + exponent_bits :]
        kept = mantissa.rstrip("0")
        if not kept and "1" not in exponent:
            symbols.append((digits, 0))
            continue
        symbols.append((exponent, len(mantissa) - len(kept)))
        verbatim += 1 + max(0, len(kept) - 1)
    exponents = Counter(exponent for exponent, _ in symbols)
    bits = -sum(count * math.log2(count / len(symbols)) for count in exponents.values())
    for (exponent, _), count in Counter(symbols).items():
        bits -= count * math.log2(count / exponents[exponent])
    return bits + verbatim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ideal_code_by_another_way(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(700, generator=generator, dtype=torch.float64)
    values[::5] = 0.0
    values[1::7] = -0.0
    values[2::9] *= 1e-39
    values[3::50] = float("nan")
    values[4::60] = -float("inf")
    values[5::3] = values[5::3].bfloat16().double()
    values = values.to(dtype)
    assert ideal_bits(values) == pytest.approx(by_strings(values))
    parts = values.split(100)
    assert ideal_bits(values.view(70, 10), chunk=100) == pytest.approx(sum(map(by_strings, parts)))


def test_the_ideal_code_of_what_can_be_said_in_words() -> None:
    assert ideal_bits(torch.empty(0)) == 0.0
    assert ideal_bits(torch.zeros(9)) == ideal_bits(-torch.zeros(9)) == 0.0
    assert ideal_bits(torch.tensor([0.0, -0.0])) == 2.0, "zeros of both signs are two symbols"
    assert ideal_bits(torch.tensor([1.0, -1.0, 1.0, 1.0])) == 4.0, "a sign each"
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert 15.9 < ideal_bits(every) / every.numel() <= 16.0, "nothing is gained where all values are as likely"
    wide = torch.randn(1000).bfloat16()
    assert ideal_bits(wide.float()) == pytest.approx(ideal_bits(wide)), "zero low bits that all have cost nothing"
    pushed, pulled = push_and_pull([[torch.ones(8)], [torch.zeros(8)]], [torch.ones(4)])
    assert (pushed, pulled) == (0.5, 1.0), "a mean over values"


def test_a_text_names_a_job_and_how_its_gradients_are_made() -> None:
    workload = DenseWorkload("dense:gpt:num_words=300:autocast:accumulate=4:after=0")
    assert (workload.job.name, workload.job.autocast) == ("gpt:num_words=300", "bfloat16")
    assert (workload.accumulate, workload.after) == (4, 0)
    plain = DenseWorkload("dense:digits")
    assert (plain.job.autocast, plain.accumulate, plain.after) == ("", 1, 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt", "give dense:JOB"),
        ("dense:", "unknown job"),
        ("dense:gtp", "unknown job 'gtp'"),
        ("dense:gpt:width=3", "no setting 'width'"),
        ("dense:gpt:accumulate=0", "accumulate is at least 1"),
        ("dense:gpt:accumulate=-1", "give a whole number"),
        ("dense:gpt:after=x", "give a whole number"),
    ],
)
def test_a_text_that_names_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DenseWorkload(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schemes", "zen"], "unknown method 'zen' of a dense workload; legal are native, lossless"),
        (["--dtype", "bfloat16"], "leave out --dtype"),
        (["--sizes", "1mb"], "leave out --sizes"),
        (["--design-space"], "leave out --design-space"),
        (["--repeat", "0"], "must be at least one"),
    ],
)
def test_options_of_sparse_workloads_are_refused(arguments: list[str], says: str) -> None:
    ran = CliRunner().invoke(app, ["bench", "sync", "--workload", "dense:gpt", "--link", "none", *arguments])
    assert ran.exit_code == 2
    assert says in ran.output
    with pytest.raises(ValueError, match="at least one"):
        DenseBenchmark(DenseWorkload("dense:gpt"), methods=())


def test_buckets_are_those_of_ddp() -> None:
    """Against the function that DDP itself calls, with one small and other large limits, for two dtypes."""
    mib = 1 << 18
    sizes = [10, mib // 2, mib // 2, 3 * mib, mib // 4, 5, 30 * mib, 1]
    gradients = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
    gradients.insert(2, torch.full((7,), 9.0, dtype=torch.float64))
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(gradients, [1 << 20, 25 << 20])
    found = buckets(gradients)
    assert sorted(bucket.numel() for bucket in found) == sorted(
        sum(gradients[place].numel() for place in places) for places in expected
    )
    kept = torch.cat([bucket.double() for bucket in found if bucket.dtype == torch.float32])
    assert torch.equal(kept, torch.cat([entry.double() for entry in gradients if entry.dtype == torch.float32]))
    assert buckets([]) == []


def test_the_factor_of_a_ring_is_divided_out() -> None:
    for ranks, width in itertools.product((2, 3, 8), (4, 2)):
        sent = [2 * (ranks - 1) * width * 5040 // ranks] * ranks
        assert bits_per_value(sent, 5040) == pytest.approx(16 * width)
    assert bits_per_value([7], 5) is None
    assert bits_per_value([0, 0], 0) is None


def test_the_sum_in_rank_order_is_rounded_once() -> None:
    terms = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert rank_order_sum(terms).item() == 258.0, "in bfloat16 256 + 1 is 256"
    terms = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24)]
    assert rank_order_sum(terms).item() == 1.0
    assert rank_order_sum(terms[::-1]).item() > 1.0


def test_rows_are_compared_with_the_sum_in_rank_order() -> None:
    def row(method: str, losses: str, parameters: str) -> dict[str, Any]:
        return {"method": method, "losses_digest": losses, "parameters_digest": parameters}

    rows = [row("ddp", "a", "x"), row("rank_order", "b", "y"), row("lossless", "b", "y"), row("bf16", "b", "z")]
    assert [each["bitwise_rank_order"] for each in against_rank_order(rows)] == [False, True, True, False]
    assert [each["bitwise_rank_order"] for each in against_rank_order(rows[:1])] == [None]
