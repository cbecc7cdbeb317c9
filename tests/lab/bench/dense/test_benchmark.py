"""`bench sync` with dense gradients: options, rows and sums."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from thinwire.lab.bench.dense.benchmark import DenseBenchmark
from thinwire.lab.bench.dense.workload import DenseWorkload
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
