"""`thinwire bench train`: its table, and what it refuses."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.lab.cli.screens import cells_of, printed, stored
from thinwire.lab.bench.train import summary as train_summary
from thinwire.lab.cli import bench_train
from thinwire.lab.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--job", "alexnet"], "legal are lstm, digits, gpt"),
        (["--job", "digits", "--scale", "1"], "digits has one size"),
        (["--job", "nowhere/train.py:make", "--scale", "1"], "has no scale"),
        (["--job", "gpt", "--scale", "2"], "at most 1"),
        (["--job", "gpt:depth=3"], "no setting 'depth'; legal are steps, batch_size"),
        (["--job", "gpt:length=long"], "length of the job gpt is int such as 24, not 'long'"),
        (["--job", "gpt:optimizer=lion"], "legal are sgd, adamw and adagrad"),
        (["--job", "dlrm:sparse=True:optimizer=adamw"], "AdamW takes no sparse gradients"),
        (["--job", "gpt:autocast=int8"], "autocast is bfloat16 or float16"),
        (["--job", "nowhere/train.py:make"], "no file nowhere/train.py"),
        (["--methods", "ddp,zip"], "legal are ddp"),
        (["--methods", "ddp,ddp"], "named twice"),
        (["--hosts", "0"], "at least one"),
        (["--extra", "-1"], "at least 0"),
        (["--link", "fast"], "100mbit"),
        (["--report", "/nowhere/page.html"], "not a directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "train", "--link", "none", *arguments], terminal_width=200)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("width", [60, 80, 160])
def test_bench_train(width: int) -> None:
    result = stored("train-lstm-8x100mbit.json")
    text = printed(lambda console: bench_train._print(result, console), width)
    for cells in train_summary.table_rows(result["rows"]):
        assert set(" ".join(cells[1:]).split()) <= cells_of(text)
        assert cells[0][:6] in text
