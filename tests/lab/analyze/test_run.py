"""`thinwire analyze` on real ranks: what is recorded is what a direct computation gives; scripts that go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from analyzed import FAILING
from thinwire.lab.analyze.run import ScriptFailed, run_script
from thinwire.lab.bench.trace import load_trace
from thinwire.lab.cli.analyze import app

# Rows 2000 and up are never looked up; word 0 is padding, which has no gradient in the dense table.
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import helper

mode, steps, log = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if mode == "crash":
    raise RuntimeError("boom")
if mode == "no model":
    sys.exit()
dist.init_process_group("gloo")
torch.manual_seed(0)
tables = nn.ModuleDict({
    "sparse": nn.Embedding(3000, 8, sparse=True),
    "dense": nn.Embedding(3000, 4, padding_idx=0),
    "small": nn.Embedding(20, 4),
})
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = tables
        self.linear = nn.Linear(16, 1)
    def forward(self, words):
        parts = [self.tables["sparse"](words), self.tables["dense"](words), self.tables["small"](words % 20)]
        return self.linear(torch.cat(parts, -1)).square().sum()
model = DistributedDataParallel(Model())
if mode == "no step":
    sys.exit()
if mode == "attach":
    import thinwire
    thinwire.attach(model)
if mode == "hook":
    def their_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])
    model.register_comm_hook(None, their_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
losses = []
for step in range(steps):
    for half in (0, 1):  # accumulation: one step is two backwards, the first without synchronization
        with model.no_sync() if half == 0 else __import__("contextlib").nullcontext():
            loss = model(helper.words(dist.get_rank(), step, half))
            loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(helper.words(0, 0, 0))
    model.train()
    with open(f"{log}.{dist.get_rank()}", "w") as file:
        print(*losses, file=file)
print("ended by itself")
"""
HELPER = """
import torch

def words(rank, step, half):
    generator = torch.Generator().manual_seed(100 * step + 10 * half + rank)
    return torch.randint(0, 2000, (60,), generator=generator)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text(HELPER)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def expected_ids(rank: int, step: int) -> Tensor:
    """The words that the helper draws, over both halves of a step."""
    halves = []
    for half in (0, 1):
        generator = torch.Generator().manual_seed(100 * step + 10 * half + rank)
        halves.append(torch.randint(0, 2000, (60,), generator=generator))
    return torch.cat(halves).unique()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "hook", "attach"])
def test_recorded_ids_are_those_of_the_local_gradients(script: Path, mode: str) -> None:
    told: list[int] = []
    arguments = [mode, "50", str(script.with_suffix(".log"))]
    recording = run_script(script, arguments, workers=2, steps=3, on_step=told.append)
    assert recording.num_steps == 3
    assert told == sorted(set(told)), "only news is told"
    assert told[-1] == 3
    assert set(recording.traces) == {"tables.sparse.weight", "tables.dense.weight"}
    for step in range(3):
        for rank in range(2):
            words = expected_ids(rank, step)
            assert torch.equal(recording.traces["tables.sparse.weight"].steps[step][rank], words)
            without_padding = words[words > 0]
            assert torch.equal(recording.traces["tables.dense.weight"].steps[step][rank], without_padding)
    assert recording.densities["linear.bias"].tolist() == [[1.0, 1.0]] * 3
    losses = script.with_suffix(".log.0").read_text().split()
    assert len(losses) == 3, "the script goes on after the last recorded step"


@pytest.mark.ranks
@pytest.mark.slow
def test_command_writes_json_page_and_trace(script: Path, tmp_path: Path) -> None:
    paths = {option: tmp_path / f"out.{option}" for option in ("json", "report", "record")}
    options = [part for option, path in paths.items() for part in (f"--{option}", str(path))]
    options += ["--ranks", "2", "--steps", "5", "--link", "100mbit", "--latency", "2ms"]
    result = CliRunner().invoke(app, [*options, str(script), "plain", "2", str(tmp_path / "log")])
    assert result.exit_code == 0, result.output
    assert "ended before the 5 asked for" in " ".join(result.output.split())
    assert "Seconds are predicted: 100 Mbit/s a rank and 2000 us between two, assumed" in " ".join(
        result.output.split()
    )
    assert "\x1b" not in result.output, "no bar where there is no terminal"
    figures = json.loads(paths["json"].read_text())
    assert (figures["workers"], figures["steps"], figures["steps_wanted"]) == (2, 2, 5)
    assert (figures["machine"]["mbit"], figures["machine"]["latency_seconds"]) == (100, 0.002)
    assert [one["name"] for one in figures["parameters"]] == ["tables.sparse.weight", "tables.dense.weight"]
    assert paths["report"].read_text().count("<svg") == 20, "five plots of each table, for wide windows and narrow ones"
    trace = load_trace(paths["record"])
    assert (trace.num_rows, trace.width, trace.world_size, len(trace.steps)) == (3000, 8, 2, 2)
    assert torch.equal(trace.steps[1][1], expected_ids(rank=1, step=1))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "message"), [("no model", "without wrapping a model"), ("no step", "before a single training step")]
)
def test_a_script_without_gradients(script: Path, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_script(script, [mode, "5", "log"], workers=2, steps=2)


@pytest.mark.ranks
@pytest.mark.slow
def test_an_interrupt_ends_the_ranks_and_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    endless = FAILING.replace("    learn(model)\n", "    while True: learn(model)\n")
    script.write_text(endless.replace("{end}", "open(__file__ + '.runs', 'w').write(str(os.getpid()))"))
    # What a shell starts in the background ignores interrupts, tests included.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    heeding += "from thinwire.lab.cli.main import command; command()"
    command = [sys.executable, "-c", heeding, "analyze", "--ranks", "2", "--steps", "100000", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            while not (said := process.stderr.readline()).startswith("Recording"):
                assert said, "first it says what cannot be kept from a script"
            runs = tmp_path / "train.py.runs"
            while not (runs.exists() and (rank := runs.read_text())):
                assert process.poll() is None
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 130, rest
    assert [line for line in rest.splitlines() if not line.startswith("Recording")] == ["interrupted"]
    assert not Path(f"/proc/{rank}/cmdline").exists()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_script_that_fails(script: Path) -> None:
    with pytest.raises(ScriptFailed, match=r"train.py failed on rank \d .*\n(.*\n)*RuntimeError: boom"):
        run_script(script, ["crash", "5", "log"], workers=2, steps=2)
