"""`thinwire plan --model`: plans for published models, which nobody measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.compress.base import Parameter
from thinwire.lab.espresso.models import MODELS
from thinwire.lab.espresso.published import plan_published, published_cluster
from thinwire.plan.plan import STOCK, Plan


@pytest.mark.parametrize("name", ["vgg16", "lstm"])
def test_a_plan_covers_a_published_model(name: str) -> None:
    found = plan_published(name, published_cluster(8, 8, 25_000))
    plan, model = found.plan, MODELS[name]()
    assert plan.parameters == model.names
    assert sum(group.size_bytes for group in plan.groups) == sum(model.size_bytes)
    plan.check([Parameter(entry.name, entry.shape) for entry in model.parameters], world_size=64)
    seconds = {candidate.name: candidate.seconds for candidate in plan.candidates}
    assert seconds[STOCK] == plan.dense_seconds
    assert min(seconds.values()) == plan.predicted_seconds == seconds[plan.choice]
    assert plan.speedup > 1.5  # the paper's link is slow for both
    assert found.strategy.upper_bound_seconds <= found.strategy.iteration_seconds


def test_on_a_fast_link_a_published_model_is_left_alone() -> None:
    fast = plan_published("lstm", published_cluster(2, 1, 1_000_000, "nvlink")).plan
    assert fast.does_nothing
    assert all(group.compressor is None for group in fast.groups)


def test_the_command_writes_the_plan(tmp_path: Path) -> None:
    plan, figures = tmp_path / "plan.json", tmp_path / "out.json"
    arguments = ["plan", "--model", "lstm", "--hosts", "8", "--ranks-per-host", "8", "--link", "25gbit"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(plan), "--json", str(figures)])
    assert result.exit_code == 0, result.output
    data = json.loads(figures.read_text())
    assert data["plan"] == Plan.load(plan).to_json()
    assert len(data["espresso"]["choices"]) == data["model"]["tensors"]
    assert "nothing was measured" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "vgg61"], "no published model 'vgg61'; there are vgg16"),
        (["--model", "lstm", "--link", "none"], "give --link such as 25gbit"),
        (["--model", "lstm", "--inside", "wood"], "accelerators are on pcie or nvlink, not 'wood'"),
        (["--model", "lstm", "--measure"], "give one of --measure, --from FILE, --model NAME"),
        ([], "give one of --measure, --from FILE, --model NAME"),
        (["--from", "none.json"], "cannot read the measurement none.json"),
        (["--measure", "--job", "lstn"], "unknown job 'lstn'"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
