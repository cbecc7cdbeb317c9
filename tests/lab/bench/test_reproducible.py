"""`thinwire bench reproducible`: where two runs part, and one digest."""

from __future__ import annotations

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
