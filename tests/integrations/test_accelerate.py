"""The Accelerate helper where there is one process, and copies of it. `accelerate` itself is not needed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import nn


def test_a_copy_is_a_copy_and_one_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("accelerate")
    stand_in.Accelerator = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate", stand_in)
    monkeypatch.delitem(sys.modules, "thinwire.integrations.accelerate", raising=False)
    from thinwire.integrations.accelerate import AcceleratorSync

    class Accelerator:
        scaler = None

    sync = AcceleratorSync(Accelerator(), nn.Linear(2, 2))  # type: ignore[arg-type]
    assert copy.copy(sync).synchronizer is None
    with pytest.raises(AttributeError, match="one process has nothing to synchronize"):
        sync.no_sync()
    with pytest.raises(AttributeError, match="nonsense"):
        sync.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="__wrapped__"):
        sync.__wrapped__  # noqa: B018
    monkeypatch.delitem(sys.modules, "thinwire.integrations.accelerate")


Run = Callable[..., dict[str, Any]]
PER_STEP = {f"comm/{name}_per_step" for name in ("bytes_sent", "bytes_dense", "ms", "exposed_ms")}


@pytest.fixture(scope="module")
def accelerate(torchrun: Run) -> dict[str, Any]:
    return torchrun("tests/integrations/scripts/accelerate_loop.py")


@pytest.mark.integrations
@pytest.mark.timeout(300)
class TestAccelerate:
    @pytest.mark.parametrize(("stock", "attached"), [("stock", "exact"), ("bf16", "bf16_exact")])
    def test_losses_are_those_without_thinwire(self, accelerate: dict[str, Any], stock: str, attached: str) -> None:
        assert accelerate[stock]["steps"] == 8
        for what in ("losses", "parameters"):
            assert accelerate[attached][what] == accelerate[stock][what], what
        stats = accelerate[attached]["stats"]
        assert stats["comm/steps"] == 8
        assert 0 < stats["comm/bytes_sent"] < stats["comm/bytes_dense"] / 2

    @pytest.mark.parametrize("name", ["exact", "low_rank"])
    def test_a_resumed_training_is_the_uninterrupted_one(self, accelerate: dict[str, Any], name: str) -> None:
        assert accelerate[f"{name}_resumed"]["losses"] == accelerate[name]["losses"][8:]
        assert accelerate[f"{name}_resumed"]["parameters"] == accelerate[name]["parameters"]
        assert accelerate["low_rank"]["losses"] != accelerate["exact"]["losses"]

    def test_each_rank_has_a_file_and_one_of_all_ranks_is_read(self, accelerate: dict[str, Any]) -> None:
        """The latter from the custom checkpoint of earlier versions."""
        assert accelerate["files"] == ["thinwire-00000.pt", "thinwire-00001.pt"]
        assert accelerate["old_resumed"]["parameters"] == accelerate["low_rank"]["parameters"]

    def test_ranks_end_with_the_same_parameters(self, accelerate: dict[str, Any]) -> None:
        first, second = accelerate["ranks"]
        assert first == second

    def test_trackers_have_the_steps(self, accelerate: dict[str, Any]) -> None:
        assert PER_STEP | {"loss"} <= set(accelerate["scalars"])

    @pytest.mark.parametrize("wrong", ["not prepared", "unwrapped"])
    def test_a_model_that_is_not_prepared_is_refused(self, accelerate: dict[str, Any], wrong: str) -> None:
        assert "accelerator.prepare(model)" in accelerate["refused"][wrong]
