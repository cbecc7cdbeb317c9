"""Scripts without DDP, and what is seen of a script's scaler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from measured import measurement
from thinwire.lab.analyze import step_recorder
from thinwire.lab.analyze.failure import ScriptFailed
from thinwire.lab.analyze.step_recorder import StepRecorder
from thinwire.lab.analyze.steps import run_watched
from thinwire.lab.planning.training import How

PLAIN = """
import torch
model = torch.nn.Linear(4, 4)
{sharded}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    model(torch.ones(2, 4)).sum().backward()
    {attach}
    optimizer.step()
"""
SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attach", ["", "__import__('thinwire').attach(model)"])
@pytest.mark.parametrize(
    ("sharded", "says", "says_not"),
    [
        ("", "wrap it in torch.nn.parallel.DistributedDataParallel", "fully_shard"),
        (SHARDED, "`thinwire.attach(model)` works with fully_shard", "DistributedDataParallel"),
    ],
    ids=["plain", "FSDP2"],
)
def test_a_script_that_trains_on_without_ddp_ends(
    sharded: str, says: str, says_not: str, attach: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text(PLAIN.format(sharded=sharded, attach=attach))
    try:
        with pytest.raises((ScriptFailed, ValueError)) as caught:
            run_watched(StepRecorder(How(steps=4)), script, [])
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert says in str(caught.value)
    assert says_not not in str(caught.value)
    assert "\n" not in str(caught.value)


SCALED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
another = torch.amp.GradScaler("cpu")
{build}
for step in range(60):
    {scale}(model(torch.ones(2, 4)).sum()).backward()
    {step}
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "scale", "step", "name"),
    [
        ("", "torch.clone", "optimizer.step()", ""),
        ("sc = torch.cuda.amp.GradScaler()", "sc.scale", "sc.step(optimizer); sc.update()", "sc"),
        ("sc = torch.amp.GradScaler('cpu')", "sc.scale", "(lambda: sc.step(optimizer))(); sc.update()", "sc"),
        (
            "optimizer.sc = torch.amp.GradScaler('cpu')",
            "optimizer.sc.scale",
            "optimizer.sc.step(optimizer); optimizer.sc.update()",
            "scaler",
        ),
    ],
    ids=["none", "disabled", "in a function", "attribute"],
)
def test_the_variable_of_the_scaler_that_steps_the_model_is_known(
    build: str, scale: str, step: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    monkeypatch.setattr(step_recorder, "finish", lambda *arguments: measurement())  # of one rank nothing is measured
    script.write_text(SCALED.format(build=build, scale=scale, step=step))
    recorder = StepRecorder(How(steps=2))
    try:
        run_watched(recorder, script, [])
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert recorder.measurement is not None
    assert recorder.measurement.ddp is not None
    assert recorder.measurement.ddp.scaler == name
