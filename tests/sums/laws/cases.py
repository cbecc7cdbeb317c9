"""Rows at random."""

from __future__ import annotations

import torch
from torch import Tensor


def random_ids(num_rows: int, density: float, generator: torch.Generator) -> Tensor:
    return (torch.rand(num_rows, generator=generator) < density).nonzero().flatten()
