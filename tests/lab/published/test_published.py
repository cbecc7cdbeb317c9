"""Plans for published models, which nobody measures, and what is wrong in `thinwire plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plan_published import main
from published.models import MODELS
from published.plan import plan_published, published_cluster
from thinwire.compress.base import Parameter
from thinwire.lab.cli.main import app
from thinwire.plan.plan import STOCK, Plan

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["vgg16", "lstm"])
def test_a_plan_covers_a_published_model(name: str) -> None:
    plan, model = plan_published(name, published_cluster(8, 8, 25_000)), MODELS[name]()
    assert plan.parameters == model.names
    assert sum(group.size_bytes for group in plan.groups) == sum(model.size_bytes)
    plan.check([Parameter(entry.name, entry.shape) for entry in model.parameters], world_size=64)
    seconds = {candidate.name: candidate.seconds for candidate in plan.candidates}
    assert seconds[STOCK] == plan.dense_seconds
    assert min(seconds.values()) == plan.predicted_seconds == seconds[plan.choice]
    assert plan.speedup > 1.5  # the paper's link is slow for both


def test_on_a_fast_link_a_published_model_is_left_alone() -> None:
    fast = plan_published("lstm", published_cluster(2, 1, 1_000_000, "nvlink"))
    assert fast.does_nothing
    assert all(group.compressor is None for group in fast.groups)


def test_the_script_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, figures = tmp_path / "plan.json", tmp_path / "out.json"
    arguments = ["lstm", "--hosts", "8", "--ranks-per-host", "8", "--link", "25gbit"]
    main([*arguments, "--output", str(plan), "--json", str(figures)])
    data = json.loads(figures.read_text())
    assert data["plan"] == Plan.load(plan).to_json()
    assert sum(len(group["parameters"]) for group in data["plan"]["groups"]) == data["model"]["tensors"]
    assert "nothing was measured" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--from", "none.json", "--measure"], "give --measure or --from FILE"),
        ([], "give --measure or --from FILE"),
        (["--from", "none.json"], "cannot read the measurement none.json"),
        (["--measure", "--job", "lstn"], "unknown job 'lstn'"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
