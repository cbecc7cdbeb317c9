"""`thinwire doctor SCRIPT` on real ranks: what it measures, tries and advises, and that the advice runs when pasted."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.lab.analyze.steps import measure_script
from thinwire.lab.analyze.trials import run_on_ranks, try_script
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.doctor.advice import Advice, advice_of, lines_of, where_to_paste
from thinwire.lab.testbed.rank import RankContext
from thinwire.measure.training import How
from thinwire.plan.measurement import Measurement
from thinwire.plan.plan import STOCK, Plan
from thinwire.plan.planner import ROWS, Way, usual_groups, ways

TOP_K = "top_k:density=0.01"

DENSE = """
    import argparse
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    ddp = DistributedDataParallel(network, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    for step in range(options.steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    print("the last words of the script")
    dist.destroy_process_group()
"""

TABLES = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn import parallel

    class Recommender(nn.Module):
        def __init__(self):
            super().__init__()
            self.users = nn.Embedding(4000, 16)
            self.items = nn.EmbeddingBag(6000, 16, sparse=True)
            self.top = nn.Linear(32, 1)

        def forward(self, users, items):
            return self.top(torch.cat([self.users(users), self.items(items)], 1))

    def main():
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        wrapped = parallel.DistributedDataParallel(Recommender())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(60):
            users = torch.randint(0, 200, (20,), generator=generator)
            items = torch.randint(0, 100, (20, 3), generator=generator)
            optimizer.zero_grad()
            wrapped(users, items).square().mean().backward()
            optimizer.step()

    if __name__ == "__main__":
        main()
"""

HELPER = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def wrapped(module):
        return DistributedDataParallel(module)

    dist.init_process_group("gloo")
    trained = wrapped(nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 10)))
    for step in range(60):
        trained(torch.randn(8, 64)).square().mean().backward()
"""


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(text: str, name: str = "train.py") -> Path:
    path = Path(name)
    path.write_text(textwrap.dedent(text))
    return path


def measured(text: str, arguments: Sequence[str] = (), compressors: Sequence[str] = ()) -> Measurement:
    return measure_script(written(text), arguments, 2, How(compressors, steps=2))


def pasted(script: Path, advice: Advice, measurement: Measurement) -> str:
    """Return the text of the script with the advised lines where the advice says."""
    site = measurement.ddp
    assert site is not None
    lines = script.read_text().splitlines()
    old = lines[site.line - 1]
    indent = old[: len(old) - len(old.lstrip())]
    new = [indent + line for line in lines_of(advice, site)]
    kept = [] if where_to_paste(advice, site).startswith("in place of") else [old]
    return "\n".join([*lines[: site.line - 1], *kept, *new, *lines[site.line :]]) + "\n"


def run_rank(context: RankContext, script: str, arguments: list[str]) -> None:
    run_as_main(script, arguments, lambda: False)


@pytest.mark.timeout(120)
def test_the_doctor_tries_what_it_recommends() -> None:
    written(DENSE)
    arguments = ["doctor", "--ranks", "2", "--compress", TOP_K, "--json", "out.json", "train.py", "--steps", "100"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(Path("out.json").read_text())
    tried = {row["name"]: row["measured_step_seconds"] for row in data["confirmed"]}
    assert STOCK in tried
    assert data["stock_step_seconds"] == pytest.approx(tried[STOCK])
    assert data["plan_step_seconds"] == pytest.approx(tried[data["advice"]["name"]])
    assert "Trained for a few steps" in result.output
    measurement = Measurement.from_json(data["measurement"])
    assert measurement.ddp is not None
    assert len(measurement.ddp.buckets) > 1, "the caps of the script are those of stock DDP"
    assert sum(len(names) for names in measurement.ddp.buckets) == 6
    predicted_only = CliRunner().invoke(app, [*arguments[:3], "--no-confirm", *arguments[3:]])
    assert predicted_only.exit_code == 0, predicted_only.output
    assert "Trained for a few steps" not in predicted_only.output


@pytest.mark.timeout(120)
def test_tables_of_a_script_are_measured_with_the_rows_that_its_ranks_touch() -> None:
    measurement = measured(TABLES)
    users, items = sorted(measurement.tables, key=lambda table: table.is_sparse)
    assert (users.name, users.num_rows, users.width, users.is_sparse) == ("users.weight", 4000, 16, False)
    assert (items.name, items.num_rows, items.width, items.is_sparse) == ("items.weight", 6000, 16, True)
    assert all(15 < rows <= 20 for rows in users.held), "20 lookups of 200 rows"
    assert max(users.held) < users.union <= sum(users.held)
    assert all(30 < rows <= 60 for rows in items.held)
    assert {parameter.name for parameter in measurement.parameters} == {"top.weight", "top.bias"}
    assert measurement.ddp is not None
    assert {name for names in measurement.ddp.buckets for name in names} == {
        "users.weight", "items.weight", "top.weight", "top.bias",
    }  # fmt: skip
    assert usual_groups(measurement) == ((0, 1),)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["rows", "compressor", "plan"])
def test_advice_runs_when_it_is_pasted(kind: str) -> None:
    if kind == "rows":
        measurement, arguments = measured(TABLES), []
        found = ways(measurement, ())
        (way,) = [way for way in found if way.name == ROWS]
    else:
        arguments = ["--steps", "4"]
        measurement = measured(DENSE, ["--steps", "100"], [TOP_K])
        found = ways(measurement, [TOP_K])
        (way,) = (
            [way for way in found if not way.is_exact and way.is_plain] if kind == "compressor" else [layerwise(found)]
        )
    advice = advice_of(way, measurement, found)
    if advice.plan is not None:
        advice.plan.save("plan.json")
        assert Plan.load("plan.json").jobs == advice.plan.jobs
    text = pasted(Path("train.py"), advice, measurement)
    if kind == "plan" and measurement.ddp is not None and not measurement.ddp.follows_plans:
        pytest.skip("this torch has no DistributedDataParallel(bucket_cap_mb_list=...)")
    target = {"rows": "wrapped", "compressor": "ddp", "plan": "ddp"}[kind]
    assert f"sync = thinwire.attach({target}" in text
    checked = text + ("" if kind == "rows" else 'assert sync.stats()["comm/steps"] == options.steps\n')
    run_on_ranks(run_rank, str(written(checked, "advised.py")), arguments, world_size=2, network=None)


def layerwise(found: Sequence[Way]) -> Way:
    return next(way for way in found if way.name == f"{TOP_K} by all_gather, layerwise")


@pytest.mark.timeout(120)
def test_where_a_helper_builds_the_model_its_name_is_explained() -> None:
    measurement = measured(HELPER)
    assert measurement.ddp is not None
    assert (measurement.ddp.target, measurement.ddp.line) == ("", 7)
    advice = Advice("any")
    assert lines_of(advice, measurement.ddp) == ["import thinwire", "sync = thinwire.attach(model)"]
    assert where_to_paste(advice, measurement.ddp) == (
        "after line 7 of train.py, where `model` is the DistributedDataParallel"
    )


@pytest.mark.timeout(120)
def test_a_way_that_fails_is_reported_and_the_others_are_tried() -> None:
    measurement = measured(DENSE, ["--steps", "100"])
    stock, *_ = found = ways(measurement, ())
    impossible = replace(stock, name="impossible", groups=((0,), (1, 2, 3, 4, 5)), is_plain=False)
    advised = [
        (stock, advice_of(stock, measurement, found)),
        (impossible, Advice("impossible", compressor="atomo:rank=0")),
    ]
    rows = try_script(Path("train.py"), ["--steps", "100"], advised, measurement, None)
    assert rows[0].measured_step_seconds is not None
    assert rows[0].measured_step_seconds > 0
    assert rows[1].measured_step_seconds is None
    assert rows[1].failure.startswith("failed: ValueError")


@pytest.mark.timeout(60)
def test_a_script_that_ends_too_early_is_one_line() -> None:
    text = TABLES.replace("range(60)", "range(2)") + "    dist.destroy_process_group()\n"
    with pytest.raises(ValueError, match=r"^train.py ended before 5 training steps were timed") as caught:
        measured(text)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
def test_a_script_that_fails_says_why() -> None:
    from thinwire.lab.analyze.run import ScriptFailed

    script: Any = written("import torch\nraise RuntimeError('no data here')\n")
    with pytest.raises(ScriptFailed, match="no data here"):
        measure_script(script, [], 2, How((), steps=2))
