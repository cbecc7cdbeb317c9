"""The Accelerate helper where there is one process, and copies of it. `accelerate` itself is not needed."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

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
