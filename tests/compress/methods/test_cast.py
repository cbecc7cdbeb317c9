"""Casts to 16 bits."""

from __future__ import annotations

import pytest
import torch

from tests.compress.quantized import sent
from thinwire import compress
from thinwire.compress.base import (
    Compressor,
)


@pytest.mark.parametrize(("method", "largest"), [(compress.fp16(), 65504.0), (compress.bf16(), 3.3895e38)])
def test_casts_saturate(method: Compressor, largest: float) -> None:
    value = sent(method, torch.tensor([3.4028e38, -3.4028e38, 1.0]))
    assert value.tolist() == pytest.approx([largest, -largest, 1.0], rel=1e-4)
