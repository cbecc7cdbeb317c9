"""The page of a benchmark of trainings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.lab.bench.train.report import build_report
from thinwire.lab.bench.train.summary import verdict
from thinwire.lab.cli.main import app

FUSED = "top_k:fuse=layerwise"
CONTRACT = {
    "job", "method", "hosts", "link_mbit", "seed", "step_seconds_median", "step_seconds_p10", "step_seconds_p90",
    "backward_seconds", "encode_seconds", "wire_seconds", "decode_seconds", "exposed_seconds", "bytes_sent_max",
    "bytes_source", "final_loss", "seconds_to_dense_loss", "loss_curve", "seconds_curve", "curve_steps", "density",
    "parameters",
}  # fmt: skip


@pytest.mark.slow
def test_a_run_without_a_link(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    rows_file, page = tmp_path / "out.json", tmp_path / "out.html"
    result = CliRunner().invoke(
        app,
        ["bench", "train", "--job", "digits", "--methods", f"{FUSED},top_k,ddp", "--hosts", "2", "--link", "none",
         "--seeds", "1", "--steps", "4", "--json", str(rows_file), "--report", str(page)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(rows_file.read_text())
    dense, behind, top_k = written["rows"]
    assert [each["method"] for each in written["rows"]] == ["ddp", FUSED, "top_k"], "stock DDP is first"
    assert (dense["groups"], dense["tensor_missing_rate"], top_k["tensor_missing_rate"]) == (None, None, 0.0)
    assert behind["groups"] > 1
    for each in written["rows"]:
        assert each.keys() >= CONTRACT
        assert each["bitwise_equal_across_ranks"]
        assert each["link_mbit"] is None
        parts = each["backward_seconds"] + each["exposed_seconds"] + each["optimizer_seconds"]
        assert parts == pytest.approx(each["step_seconds_median"], rel=0.5)
        assert len(each["loss_curve"]) == len(each["seconds_curve"]) == len(each["curve_steps"])
    assert dense["bytes_sent_max"] == 4 * dense["parameters"], "2 (n - 1) / n of the gradients, of two ranks"
    assert dense["bytes_source"] == "formula"
    assert (top_k["bytes_source"], top_k["density"] < 0.05) == ("counted", True)
    assert 0 < dense["seconds_to_dense_loss"] <= dense["seconds_curve"][-1]
    html = page.read_text()
    assert html.count("<figure") == 4
    assert verdict(written["rows"]).split(":")[0] in html
    again = build_report(written).html().partition("<footer")[0]
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"  # of writing the page
    assert re.sub(date, "", again) == re.sub(date, "", html.partition("<footer")[0])
