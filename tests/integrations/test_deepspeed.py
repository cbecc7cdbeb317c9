"""DeepSpeed engines: restored bitwise after a worker was killed, and ZeRO stage 0 with gradients by thinwire."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.integrations import deepspeed

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deepspeed")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "THINWIRE_HOLDER": str(folder / "holder.sock"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    script = ROOT / "tests/integrations/scripts/deepspeed_engine.py"
    ran = subprocess.run(
        [sys.executable, "-m", *launch, str(script), str(folder)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "thinwire", "holder", "--stop"], env=environment, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("kind", ["stage 1", "stage 2, bf16"])
def test_a_killed_engine_goes_on_bitwise(result: dict[str, Any], kind: str) -> None:
    """Losses after the restore, parameters, masters, moments, the schedule and the counters of each rank."""
    assert result["attempt"] == 2, "a worker was killed in each of the two attempts before"
    for rank in result["ranks"]:
        found = rank[kind]
        assert found["first"] > 0, "restored, not started again"
        assert found["losses_equal"]
        assert found["tensors"] >= 8
        assert found["bitwise"]
        assert found["counters"] == [True, True]


def test_the_gradients_of_stage_0_travel_as_rows(result: dict[str, Any]) -> None:
    for rank in result["ranks"]:
        stock, ours = zip(*rank["attached"]["losses"], strict=True)
        assert ours == pytest.approx(stock, rel=1e-6)
        stats = rank["attached"]["stats"]
        assert stats["comm/steps"] == len(ours) - 3, "the last were after detach, by the engine itself"
        assert stats["comm/bytes_sent"] < stats["comm/bytes_dense"] / 5


def test_what_an_engine_reduces_by_itself_is_refused(result: dict[str, Any]) -> None:
    for rank in result["ranks"]:
        engine, module, sharded = rank["attached"]["refused"]
        assert engine == module
        assert "thinwire.integrations.deepspeed.attach(engine)" in engine
        assert "only stage 0 can be attached" in sharded


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_engine_reduces_by_itself_again_after_an_attach_that_ended(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """After Ctrl-C ranks of a notebook would have trained on without any sums."""

    def end(*_: object, **__: object) -> None:
        assert not engine.enable_backward_allreduce
        raise error

    engine = SimpleNamespace(zero_optimization_stage=lambda: 0, module=None, enable_backward_allreduce=True)
    monkeypatch.setattr(deepspeed, "attach_model", end)
    with pytest.raises(error):
        deepspeed.attach(engine)
    assert engine.enable_backward_allreduce
