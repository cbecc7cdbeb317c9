"""What an error keeps alive."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest

from thinwire.errors import forget_locals

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("debugged", [False, True])
def test_locals_of_an_error_go_unless_somebody_debugs(debugged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold groups and gradients, and ``pdb.pm()``, of an interactive interpreter, shows them."""
    monkeypatch.setitem(vars(sys), "ps1", ">>> ") if debugged else monkeypatch.delattr(sys, "ps1", raising=False)
    ours: dict[str, Any] = {"__name__": "thinwire.somewhere"}
    exec("def fail():\n    held = 3\n    raise ValueError('inner')", ours)
    with pytest.raises(ValueError, match="inner") as caught:
        ours["fail"]()
    outer = RuntimeError("outer")
    outer.__cause__ = caught.value
    forget_locals(outer)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert [frame.f_code.co_name for frame in frames][1:] == ["fail"]
    assert frames[1].f_locals == ({"held": 3} if debugged else {})
    assert "ours" in frames[0].f_locals, "those of the user stay"
