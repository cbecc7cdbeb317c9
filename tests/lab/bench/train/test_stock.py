"""Sums of stock DDP and in rank order."""

from __future__ import annotations

import torch

from thinwire.lab.bench.train.stock import rank_order_sum


def test_the_sum_in_rank_order_is_rounded_once() -> None:
    terms = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert rank_order_sum(terms).item() == 258.0, "in bfloat16 256 + 1 is 256"
    terms = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24)]
    assert rank_order_sum(terms).item() == 1.0
    assert rank_order_sum(terms[::-1]).item() > 1.0
