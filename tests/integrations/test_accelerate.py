"""The Accelerate helper where there is one process, and copies of it. `accelerate` itself is not needed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.reproducible.digests import of_state


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


class Registered:
    """What an `Accelerator` does with hooks and registered objects, in its order."""

    scaler = None

    def __init__(self) -> None:
        self._custom_objects: list[Any] = []
        self._saved: list[Callable[..., Any]] = []
        self._loaded: list[Callable[..., Any]] = []
        self.register_for_checkpointing = self._custom_objects.append
        self.register_save_state_pre_hook = self._saved.append
        self.register_load_state_pre_hook = self._loaded.append

    def save_state(self, folder: Path) -> None:
        for hook in self._saved:
            hook([], [], str(folder))
        torch.save([one.state_dict() for one in self._custom_objects], folder / f"custom {dist.get_rank()}")

    def load_state(self, folder: Path) -> None:
        for hook in self._loaded:
            hook([], str(folder))
        states = torch.load(folder / f"custom {dist.get_rank()}")
        for one, state in zip(self._custom_objects, states, strict=True):  # as the real one demands
            one.load_state_dict(state)


def _registered(context: RankContext, folder: Path) -> tuple[Any, Callable[..., Any], Callable[[Any], str]]:
    stand_in = ModuleType("accelerate")
    stand_in.Accelerator = Registered  # type: ignore[attr-defined]
    sys.modules["accelerate"] = stand_in
    from thinwire.integrations.accelerate import attach

    accelerator = Registered()

    def trained(width: int, model: Any = None) -> Any:
        model = model or DistributedDataParallel(nn.Linear(width, width))
        sync = attach(accelerator, model, dense=thinwire.compress.power_sgd(rank=2))  # type: ignore[arg-type]
        for _ in range(2):
            model(torch.randn(4, width)).square().mean().backward()
        return sync

    return accelerator, trained, lambda sync: of_state(sync.synchronizer.state_dict())


def _detached(context: RankContext, folder: Path) -> None:
    accelerator, trained, state_of = _registered(context, folder)
    model = DistributedDataParallel(nn.Linear(64, 64))
    trained(64, model).detach()
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    assert not [*folder.glob("thinwire-*")]
    sync = trained(64, model)
    before = state_of(sync)
    accelerator.save_state(folder)
    model(torch.randn(4, 64)).square().mean().backward()
    assert state_of(sync) != before
    accelerator.load_state(folder)
    assert state_of(sync) == before
    assert len(accelerator._custom_objects) == 1
    sync.detach()
    accelerator.load_state(folder)


def _two_models(context: RankContext, folder: Path) -> None:
    accelerator, trained, state_of = _registered(context, folder)
    both = [trained(64), trained(48)]
    before = [*map(state_of, both)]
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    assert [*map(state_of, both)] == before


@pytest.mark.ranks
@pytest.mark.parametrize("what", [_detached, _two_models])
def test_checkpoints_have_the_state_of_each_model_that_is_attached(what: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(what, tmp_path, world_size=2)


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
