"""`thinwire bench train` on emulated hosts: what the links carried, and that the link is what limits stock DDP."""

from __future__ import annotations

from typing import Any

import pytest

from namespaces import needs_namespaces
from thinwire.lab.bench.train.benchmark import TrainBenchmark, run
from thinwire.lab.testbed.network import Link

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@needs_namespaces
def test_two_hosts_by_ddp_and_in_bfloat16() -> None:
    pytest.importorskip("sklearn")
    seen = []
    benchmark = TrainBenchmark("digits", ("bf16", "ddp"), hosts=2, link=Link(400.0), seeds=1, steps=6, extra=0.0)
    result = run(benchmark, lambda method, seed, step, loss: seen.append((method, seed, step, loss > 0)))
    dense, bf16 = result["rows"]
    assert seen == [(method, 0, step + 1, True) for method in ("ddp", "bf16") for step in range(6)]
    gradients = 4 * dense["parameters"]
    check(dense, gradients)
    check(bf16, gradients // 2)
    assert dense["final_loss"] == pytest.approx(bf16["final_loss"], rel=0.05)
    assert 0 < dense["seconds_to_dense_loss"] <= dense["seconds_curve"][-1]


def check(row: dict[str, Any], num_bytes: int) -> None:
    """Of two hosts each sends as many bytes as there are; and headers, a few small messages, acknowledgements."""
    assert row["bytes_source"] == "interface"
    assert num_bytes < row["bytes_sent_max"] < 1.08 * num_bytes
    assert row["bytes_own_max"] == pytest.approx(num_bytes, rel=1e-6)
    assert 300 < row["link_mbit"] < 400
    assert row["bitwise_equal_across_ranks"]
    assert row["wire_seconds"] > 0.8 * num_bytes * 8e-6 / row["link_mbit"], "the link cannot be faster"
