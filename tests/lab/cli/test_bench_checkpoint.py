"""`thinwire bench checkpoint`: its table, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.lab.cli.screens import cells_of, printed, stored
from thinwire.lab.bench.checkpoint import summary as checkpoint_summary
from thinwire.lab.cli import bench_checkpoint
from thinwire.lab.cli.bench import app as bench


def test_the_command_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    for arguments, reason in (
        (["--report", str(tmp_path / "missing" / "page.html")], "is not a directory"),
        (["--methods", "none,tape"], "unknown methods tape"),
        (["--link", "fast"], "unknown link"),
    ):
        ended = CliRunner().invoke(bench, ["checkpoint", *arguments])
        assert ended.exit_code == 2
        assert reason in re.sub(r"[│\s]+", " ", ended.output)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_bench_checkpoint(width: int) -> None:
    result = stored("checkpoint-8x100mbit.json")
    text = printed(lambda console: bench_checkpoint._print(result, console), width)
    for cells in checkpoint_summary.table_rows(result["rows"]):
        assert set(" ".join(cells[1:]).split()) <= cells_of(text)
        assert cells[0][:6] in text
