"""`thinwire bench reproducible`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.lab.cli import main


@pytest.mark.slow
def test_a_job_has_one_digest(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = "bench reproducible --job digits --world-sizes 1,3 --micro-batches 5 --steps 2 --quiet --json"
    result = CliRunner().invoke(main.app, [*command.split(), str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["same_bits"]
    rows = {(row["method"], row["ranks"]): row for row in found["rows"]}
    assert rows["reproducible", 3]["parts_at"] is None
    assert rows["ddp", 3]["parts_at"]["step"] == 0, "stock DDP adds in another order"
