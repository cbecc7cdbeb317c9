"""Ranks simulated in one process: their steps are those of ranks that average gradients, by the library's own code."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from thinwire.compress import top_k
from thinwire.lab.analyze.simulated import SimulatedRanks, SimulatedTraining, train_shortly
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.doctor.advice import method
from thinwire.lab.doctor.equal_loss import ShortRun
from thinwire.rows.formats import ring_all_reduce_bytes

RANKS = 4
QSGD = "qsgd:bits=8 by two_shot"


def gradients(*shape: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(shape, generator=random), "b": torch.randn(8, generator=random)} for _ in range(RANKS)]


@pytest.mark.parametrize("codec", [None, "bf16 by all_reduce", "bf16 by all_gather", "bf16 by two_shot"])
def test_means_and_bytes_are_those_of_the_exchange(codec: str | None) -> None:
    given = gradients(64, 32)
    ranks = SimulatedRanks(method(codec) if codec else "native", given[0], frozenset(), RANKS)
    means = ranks.mean(given)
    for name, mean in means.items():
        exact = torch.stack([of_rank[name] for of_rank in given]).mean(0)
        assert torch.allclose(mean, exact, atol=0.02 if codec and name == "w" else 1e-6)
    small, large = ring_all_reduce_bytes(32, RANKS), 4 * 64 * 32
    expected = {
        None: 2 * 3 / 4 * large,
        "bf16 by all_reduce": 2 * 3 / 4 * large / 2,
        "bf16 by all_gather": 3 * large / 2,
        "bf16 by two_shot": 2 * 3 / 4 * large / 2,
    }[codec]
    assert ranks.sent_bytes - small == pytest.approx(expected, rel=0.02)


def test_what_is_not_sent_is_remembered_and_tables_and_sparse_gradients_are_exact() -> None:
    given = gradients(64, 32)
    ranks = SimulatedRanks(top_k(0.1), given[0], frozenset(), RANKS)
    total = sum((ranks.mean(given)["w"] for _ in range(40)), torch.zeros(64, 32))
    exact = torch.stack([of_rank["w"] for of_rank in given]).mean(0)
    assert torch.allclose(total / 40, exact, atol=0.25)
    assert (ranks.mean(given)["w"] == 0).any()
    table = SimulatedRanks(top_k(0.1), given[0], frozenset(["w"]), RANKS)
    assert torch.allclose(table.mean(given)["w"], exact, atol=1e-6)
    sparse = [{"w": of_rank["w"].to_sparse(1)} for of_rank in given]
    assert torch.allclose(ranks.mean(sparse)["w"].to_dense(), exact, atol=1e-6)
    given[1]["w"][0, 0] = float("nan")
    assert ranks.mean(given)["w"].isnan().sum() == 1, "no rank's memory sees what is not finite"


def run(script: Path, source: str, training: SimulatedTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text(source)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with training.watching():
        run_as_main(str(script), [])


SCRIPT = """
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 40, bias=False), nn.Linear(40, 30), nn.Linear(30, 1))
data = torch.Generator().manual_seed(1)
matrices = [entry for entry in model[1:].parameters() if entry.ndim == 2]
rest = [entry for entry in model.parameters() if all(entry is not other for other in matrices)]
optimizers = [torch.optim.{matrices}, torch.optim.AdamW(rest, lr=0.01)]
schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1, 40) for one in optimizers]
for step in range({calls}):
    model.zero_grad()
    for _ in range(2):
        x = torch.randn(8, 6, generator=data)
        ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().div(2).backward()
    clip_grad_norm_(model.parameters(), 0.5)
    for one in optimizers:
        one.step()
    for schedule in schedules:
        schedule.step()
torch.save(model.state_dict(), {file!r})
"""


def reference(rate: float, seed: int, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """The same training by four ranks, written out."""
    torch.manual_seed(3 + 1000 * seed)
    model = nn.Sequential(nn.Linear(6, 40, bias=False), nn.Linear(40, 30), nn.Linear(30, 1))
    data = torch.Generator().manual_seed(1)
    matrices = [entry for entry in model[1:].parameters() if entry.ndim == 2]
    rest = [entry for entry in model.parameters() if all(entry is not other for other in matrices)]
    optimizers = [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]
    losses = []
    for step in range(steps):
        model.zero_grad()
        total = 0.0
        for _ in range(2 * RANKS):
            x = torch.randn(8, 6, generator=data)
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean() / 2 / RANKS
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        calls = RANKS * step + RANKS - 1
        for one, base in zip(optimizers, (0.05, 0.01), strict=True):
            for group in one.param_groups:
                group["lr"] = base * rate * (1.0 - 0.9 * min(calls, 40) / 40)
            one.step()
    return {name: entry.detach() for name, entry in model.state_dict().items()}, losses


@pytest.mark.slow
def test_a_script_trains_as_its_ranks_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "model.pt")
    source = SCRIPT.format(matrices="SGD(matrices, lr=0.05, momentum=0.9)", calls=48, file=file)
    for rate, seed in ((1.0, 0), (2.0, 1)):
        training = SimulatedTraining(ShortRun(None, rate, seed), RANKS, 100)
        run(tmp_path / "train.py", source, training, monkeypatch)
        parameters, losses = reference(rate, seed, 12)
        assert training.losses == pytest.approx(losses, rel=1e-4)
        saved = torch.load(file)
        assert all(torch.allclose(saved[name], entry, rtol=1e-3, atol=1e-5) for name, entry in parameters.items())
        exact = ring_all_reduce_bytes(4 * sum(entry.numel() for entry in parameters.values()), RANKS)
        assert training.sent_bytes == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
def test_muon_trains_and_the_script_ends_after_enough_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.pt"
    source = SCRIPT.format(matrices="Muon(matrices, lr=0.02)", calls=400, file=str(file))
    dense, coded = (SimulatedTraining(ShortRun(codec), RANKS, 30) for codec in (None, QSGD))
    for training in (dense, coded):
        run(tmp_path / "train.py", source, training, monkeypatch)
        assert len(training.losses) == 30
        assert not file.exists()
    assert dense.losses[-1] < dense.losses[0] / 2
    assert coded.losses == pytest.approx(dense.losses, rel=0.1)
    assert coded.losses != dense.losses
    assert coded.sent_bytes < 0.5 * dense.sent_bytes


def test_closures_are_called_once_and_lbfgs_is_refused() -> None:
    model = nn.Linear(2, 1)
    training, calls = SimulatedTraining(ShortRun(), 2, 10), []

    def stepped(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def closure() -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().mean()
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    with training.watching():
        step = stepped(torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.weight.detach().clone()
        step()
        assert torch.equal(model.weight, before), "the first rank only gives its gradients"
        step()
        assert not torch.equal(model.weight, before)
        assert len(calls) == 2
        with pytest.raises(ValueError, match="LBFGS evaluates a loss several times a step"):
            stepped(torch.optim.LBFGS(model.parameters()))()
    assert len(training.losses) == 1
    assert torch.manual_seed(5).initial_seed() == 5, "nothing stays patched"


@pytest.mark.ranks
@pytest.mark.slow
def test_scripts_with_ddp_train_alone_in_processes_of_their_own(tmp_path: Path) -> None:
    script, ended = tmp_path / "train.py", tmp_path / "ended"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "assert dist.get_world_size() == 1 and sys.argv[1:] == ['--lr', '0.1']\n"
        "torch.manual_seed(0)\n"
        "model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 1)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(200):\n"
        "    optimizer.zero_grad()\n"
        "    x = torch.randn(16, 8)\n"
        "    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()\n"
        "    optimizer.step()\n"
        f"open({str(ended)!r}, 'a').write('.')\n"
    )
    runs = [ShortRun(codec, rate) for codec in (None, QSGD) for rate in (1.0, 3e4)]
    stages: list[str] = []
    curves = train_shortly(script, ["--lr", "0.1"], RANKS, 300, 2, stages.append, runs)
    assert [curve.run for curve in curves] == runs
    assert [len(curve.losses) for curve in curves] == [50] * 4
    assert ended.read_text() == "..", "later trainings end before the last lines of the script"
    assert stages[-1].startswith("Training shortly: 4 of 4 done")
    assert curves[0].end < 0.2 * curves[0].losses[0]
    assert curves[2].end == pytest.approx(curves[0].end, rel=0.1)
    assert curves[1].end == math.inf, "it diverges"
    (failed,) = train_shortly(script, [], RANKS, 300, 1, stages.append, [ShortRun()])
    assert failed.failure == "AssertionError"
    assert failed.end == math.inf
