"""`bench sync` with dense gradients: options, rows and sums."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from thinwire.lab.bench.dense.benchmark import DenseBenchmark
from thinwire.lab.bench.dense.workload import DenseWorkload
from thinwire.lab.bench.train.rows import against_rank_order, bits_per_value
from thinwire.lab.bench.train.stock import rank_order_sum
from thinwire.lab.cli.main import app


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
