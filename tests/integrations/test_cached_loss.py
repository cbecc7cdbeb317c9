"""The cached loss of sentence-transformers, whose backward runs the model's in many parts: sent once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]


def test_a_step_of_eight_mini_batches_is_sent_once(torchrun: Callable[..., dict[str, Any]]) -> None:
    found = torchrun("tests/integrations/scripts/cached_loss.py")
    stock = [entry["loss"] for entry in found["stock"]]
    for how in ("exact", "auto"):
        assert [entry["loss"] for entry in found[how]] == pytest.approx(stock, rel=1e-5)
    parameters = 20_000 * 32 + 80 * 32 + 32
    for entry in found["exact"]:
        once = 4 * parameters  # of a ring of two, without the layer
        assert once < entry["comm/bytes_dense_per_step"] < 1.5 * once
        assert entry["comm/bytes_sent_per_step"] < once / 10
