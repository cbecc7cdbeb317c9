"""`thinwire bench reproducible`: where two runs part, and one digest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.lab.bench.reproducible import ReproducibleBenchmark, parting
from thinwire.lab.cli import main


def test_the_first_step_and_parameter_are_named() -> None:
    one = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert parting(one, [dict(step) for step in one]) is None
    assert parting(one, [one[0], {"a": "3", "b": "5"}]) == {"step": 1, "parameter": "b"}


def test_numbers_that_are_none_are_refused() -> None:
    result = CliRunner().invoke(main.app, ["bench", "reproducible", "--world-sizes", "1,two"])
    assert result.exit_code == 2
    assert "--world-sizes is '1,two'" in result.output
    with pytest.raises(ValueError, match="numbers from 1"):
        ReproducibleBenchmark(ranks=(0,))


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
