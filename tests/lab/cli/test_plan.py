"""`thinwire plan --measure` and `thinwire doctor` on two real ranks: they measure this model on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compiled import own_cache
from thinwire.compress.base import Parameter
from thinwire.lab.cli.main import app
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.speeds import COPIES
from thinwire.plan.plan import STOCK, Plan, fingerprint

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TOP_K = "top_k:density=0.01"
PARAMETERS = [("0.weight", (300, 64)), ("0.bias", (300,)), ("2.weight", (10, 300)), ("2.bias", (10,))]

FACTORY = """
    import torch
    from torch import nn

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))
        return model, lambda: torch.randn(8, 64), lambda model, batch: model(batch).square().mean()
"""

SCRIPT = """
    import sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from toy import make

    dist.init_process_group("gloo")
    module, batch, loss = make()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        loss(model, batch()).backward()
        optimizer.step()
    print("the script's own words")
    dist.destroy_process_group()
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a factory and a script; also where speeds are cached."""
    (tmp_path / "toy.py").write_text(textwrap.dedent(FACTORY))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path))
    return tmp_path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def check_measurement(measured: Measurement) -> None:
    expected = [Parameter(name, shape) for name, shape in PARAMETERS]
    assert measured.fingerprint == fingerprint(expected)
    assert {parameter.name for parameter in measured.parameters[:2]} == {"2.weight", "2.bias"}  # the last layer first
    assert measured.world_size == 2
    assert min(measured.backward_seconds) >= 0
    assert measured.forward_seconds > 0
    assert measured.link.mbit > 0.9
    assert [codec.compressor for codec in measured.codecs] == ["", TOP_K]


@pytest.mark.timeout(120)
def test_a_plan_is_measured_and_measured_again_from_the_cache(toy: Path) -> None:
    common = ("plan", "--measure", "--job", "toy:make", "--hosts", "2", "--link", "none", "--compress", TOP_K)
    result = invoke(*common, "--steps", "2", "--output", "plan.json", "--measurement", "m.json", "--json", "out.json")
    assert result.exit_code == 0, result.output
    plan, measured = Plan.load("plan.json"), Measurement.load("m.json")
    check_measurement(measured)
    assert {extra.compressor for extra in measured.extras} >= {STOCK, COPIES}, "trained with these"
    plan.check([Parameter(name, shape) for name, shape in PARAMETERS], world_size=2)
    assert plan.explain() in result.output
    for algorithm in ("parameter server", "ring", "tree", "recursive doubling"):
        assert algorithm in result.output
    figures = json.loads((toy / "out.json").read_text())
    assert figures["plan"] == plan.to_json()
    assert figures["measurement"] == json.loads(json.dumps(measured.to_json()))
    assert len(figures["costs"]) == 4
    cached = list((toy / "cache" / "thinwire").glob("*.json"))
    assert len(cached) == 1

    assert invoke(*common, "--steps", "2", "--measurement", "again.json").exit_code == 0
    again = Measurement.load("again.json")
    assert (again.link, again.codecs) == (measured.link, measured.codecs)
    assert again.backward_seconds != measured.backward_seconds
    replanned = invoke("plan", "--from", "m.json", "--compress", "none", "--output", "exact.json")
    assert replanned.exit_code == 0, replanned.output
    assert all(group.compressor is None for group in Plan.load("exact.json").groups)


def test_the_ranks_of_a_torchrun_job_measure_themselves(toy: Path) -> None:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]
    measure = ["thinwire", "plan", "--measure", "--job", "toy:make", "--compress", "none", "--steps", "1"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(toy)}
    command = [*torchrun, *measure, "--output", "plan.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    plan = Plan.load(toy / "plan.json")
    assert plan.world_size == 2
    assert {name for group in plan.groups for name in group.parameters} == {name for name, _ in PARAMETERS}
    assert done.stdout.count("made 20") == 1, "rank 0 alone says what was found"
