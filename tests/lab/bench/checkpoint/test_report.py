"""The page of a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.bench.checkpoint.results import result
from thinwire.lab.bench.checkpoint.methods import NONE, THINWIRE
from thinwire.lab.bench.checkpoint.report import build_report, write_picture
from thinwire.lab.bench.checkpoint.summary import COLUMNS, sentences, table_rows


@pytest.mark.slow
def test_the_table_and_the_report_show_every_method(tmp_path: Path) -> None:
    cells = table_rows(result()["rows"])
    assert [row[0] for row in cells] == [NONE, THINWIRE, "dcp_sync"]
    assert all(len(row) == len(COLUMNS) for row in cells)
    assert cells[1][1:] == ["1.5150", "1.010", "4.0", "1.96", "0.40", "0.90", "80%", "1.10", "yes"]
    often = "a checkpoint every 1.0 iterations, 1.2 at risk at most, 0.200 s of a core for one"
    assert f"thinwire: {often}, ratio 1.01 to 1.01 by turns." in sentences(result())
    assert "What the links carry" not in build_report(result()).html()
    with pytest.raises(ValueError, match="no picture of the links"):
        write_picture(result(), tmp_path / "links.png")
    pytest.importorskip("matplotlib")
    seldom = result()
    seldom["environment"]["bounds"]["reached_interval_iterations"] = 1.67
    assert "a checkpoint in every 1.67 steps" in build_report(seldom).html()
    page = build_report(result(traced=True)).html()
    assert "+1.0% a step for a checkpoint in every step" in page
    assert "<svg" in page
    assert "host 1" in page
    write_picture(result(traced=True), tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
