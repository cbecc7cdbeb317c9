"""What is in `examples/` runs, and every command has help. What the documents show is run by tests/docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.lab.cli.main import app

LIMIT_SECONDS = 500  # a small language model takes 150 s of a processor without bfloat16 units
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(LIMIT_SECONDS + 20)]

ROOT = Path(__file__).parents[2]
EXAMPLES = [["demo"], ["analyze"], ["holder"], ["bench", "sync"], ["bench", "train"], ["bench", "checkpoint"]]


@pytest.mark.slow
def test_the_recommender_sends_its_rows_only() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "examples/ddp_sparse.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    sent, dense = (
        int(re.search(rf"{label}:\s+([\d,]+)", result.stdout)[1].replace(",", ""))
        for label in ("bytes sent per step", "a dense all-reduce")
    )
    assert sent < dense / 20
    assert "items.weight" in result.stderr, "the first step says what is synchronized how"


@pytest.mark.slow
def test_a_language_model_sends_few_bytes() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "examples/few_bytes.py", "10"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"loss ([0-9.]+)", result.stdout)[1]) < 3.6, (
        "4.85 is what a model knows that has seen nothing"
    )
    assert int(re.search(r"DDP sends [\d,]+, (\d+) times as many", result.stdout)[1]) > 40


@pytest.mark.slow
def test_a_process_that_is_killed_comes_back() -> None:
    result = subprocess.run(
        [sys.executable, "examples/outer_restart.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    begun = [int(step) for step in re.findall(r"rank 2 begins at step (\d+)", result.stdout)]
    assert begun[0] == 0 < begun[1]
    assert len(set(re.findall(r"parameters that add up to (-?[0-9.]+)", result.stdout))) == 1


@pytest.mark.parametrize("command", [[], *EXAMPLES, ["bench"]])
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    if command in EXAMPLES:
        assert "Example: thinwire" in result.output
        assert "--json" in result.output


@pytest.mark.slow
def test_zen_in_100_lines_has_the_bits_of_the_library() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
         "examples/zen_in_100_lines.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the same bits as thinwire.schemes.ZEN") == 3
