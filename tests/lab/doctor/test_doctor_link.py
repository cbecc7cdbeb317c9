"""`thinwire doctor SCRIPT --link RATE`: the script is measured and tried on emulated hosts, not on a loopback."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compiled import own_cache
from namespaces import needs_namespaces
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.lab.cli.main import app
from thinwire.lab.planning.planner import ROWS
from thinwire.plan.plan import STOCK

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SCRIPT = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(20000, 16), nn.Linear(16, 4)

        def forward(self, ids):
            return self.out(self.words(ids).mean(1))

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tagger = DDP(Words())
    optimizer = torch.optim.Adam(tagger.parameters())
    for step in range(60):
        optimizer.zero_grad()
        tagger(torch.randint(0, 300, (8, 5))).square().mean().backward()
        optimizer.step()
"""


@needs_namespaces
@pytest.mark.timeout(180)
def test_a_table_is_most_of_stock_ddp_and_one_line_is_the_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path))
    Path("train.py").write_text(textwrap.dedent(SCRIPT))
    arguments = ["--link", "20mbit", "--ranks", "2", "--steps", "2", "--compress", "bf16", "--json", "out.json"]
    result = CliRunner().invoke(app, ["doctor", *arguments, "train.py"])
    assert result.exit_code == 0, result.output
    data = json.loads(Path("out.json").read_text())
    assert data["advice"]["lines"] == ["import thinwire", "sync = thinwire.attach(tagger)"]
    assert "line 16 of train.py, `tagger = DDP(Words())`" in data["advice"]["where"]
    assert "words.weight: 1.3 MB" in result.output
    assert data["measurement"]["hosts"] == 2
    assert 10 < data["link_mbit"] <= 20 * 1.02  # its bucket has 32 KiB to begin with, which is 1.3 % of a second
    tried = {row["name"]: row for row in data["confirmed"]}
    assert {STOCK, ROWS} <= set(tried)
    wire = ring_all_reduce_bytes(20_000 * 16 * 4, 2) * 8e-6 / 20
    assert min(tried[STOCK]["predicted_step_seconds"], tried[STOCK]["measured_step_seconds"]) > wire
    assert data["speedup"] > 2


AUTOCAST = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    classifier = DDP(nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 100), nn.ReLU(), nn.Linear(100, 10)))
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(classifier(torch.randn(32, 200)).float(), torch.randint(0, 10, (32,)))
        loss.backward()
        optimizer.step()
"""


@needs_namespaces
@pytest.mark.timeout(180)
@pytest.mark.parametrize("tried", [True, False])
def test_under_autocast_lossless_sums_are_the_advice(
    tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path))
    Path("train.py").write_text(textwrap.dedent(AUTOCAST))
    arguments = ["--link", "10mbit", "--ranks", "2", "--steps", "2", "--compress", "none", "--json", "out.json"]
    result = CliRunner().invoke(app, ["doctor", *arguments, *([] if tried else ["--no-confirm"]), "train.py"])
    assert result.exit_code == 0, result.output
    data = json.loads(Path("out.json").read_text())
    assert data["advice"]["lines"] == ["import thinwire", 'sync = thinwire.attach(classifier, dense="lossless")']
    assert "\nLossless sums " in result.output
    lossless = data["lossless"]
    assert lossless["pays"] is True
    assert lossless["push_bits"] < 14, "sixteen of the 32 bits are zero, and exponents have few values"
    assert lossless["sent_bytes"] < 0.5 * lossless["native_bytes"]
    assert data["speedup"] > 1.3
    if tried:
        rows = {row["name"]: row for row in data["confirmed"]}
        assert rows[data["advice"]["name"]]["measured_step_seconds"] < rows[STOCK]["measured_step_seconds"] / 1.3


@needs_namespaces
@pytest.mark.timeout(180)
def test_on_a_loopback_lossless_sums_are_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path))
    Path("train.py").write_text(textwrap.dedent(AUTOCAST))
    arguments = ["--ranks", "2", "--steps", "2", "--compress", "none", "--dense", "lossless", "--json", "out.json"]
    result = CliRunner().invoke(app, ["doctor", *arguments, "train.py"])
    assert result.exit_code == 0, result.output
    data = json.loads(Path("out.json").read_text())
    assert not any("dense=" in line for line in data["advice"]["lines"])
    assert any("lossless" in row["name"] for row in data["confirmed"]), "asked for"
    assert data["lossless"]["pays"] is False
    assert "\nLossless sums        nothing to gain, " in result.output
