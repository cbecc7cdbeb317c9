"""The verdict on a training."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.lab.cli.screens import RESULTS, stored
from thinwire.lab.bench.train import summary as train_summary
from thinwire.lab.bench.train.summary import summarize, verdict


def row(method: str, seconds: float | None, seed: int = 0, loss: float | None = 1.0) -> dict[str, Any]:
    return {
        "method": method, "seed": seed, "bytes_sent_max": 1e6, "step_seconds_median": 0.1, "exposed_seconds": 0.0,
        "step_seconds": 0.1, "final_loss": loss, "loss_vs_dense": 0.0, "seconds_to_dense_loss": seconds,
    }  # fmt: skip


@pytest.mark.parametrize(("of_ddp", "of_diloco", "fewer"), [(None, None, 50.0), (1.1e6, 5.5e4, 20.0)])
def test_bytes_are_compared_by_one_measure(of_ddp: float | None, of_diloco: float | None, fewer: float) -> None:
    rows = [row("ddp", 10.0) | {"bytes_link_max": of_ddp, "bytes_sent_max": of_ddp or 1e6}]
    rows.append(row("diloco:every=32", 10.0) | {"bytes_link_max": of_diloco, "bytes_sent_max": 2e4})
    assert summarize(rows)[1].fewer_bytes == pytest.approx(fewer), "headers of both are counted, or of none"


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"ddp": 10.0, "bf16": 8.0, "top_k": 4.0}, "Compression pays on this link: top_k .* 2.50x .* and 2.00x"),
        ({"ddp": 10.0, "bf16": 8.0, "zen": 4.0}, "Exact synchronization pays on this link: zen .* 2.50x"),
        ({"ddp": 10.0, "bf16": 10.4, "top_k": 11.0}, "does not pay on this link: the best, bf16, .* 0.96x"),
        ({"ddp": 10.0, "bf16": 5.0, "top_k": 6.0}, "nothing beats bf16 .* top_k, 1.67x"),
        ({"ddp": 10.0, "bf16": 8.0, "diloco:every=32": 1.0}, "Another algorithm, an outer loop, pays .* 10.00x"),
        ({"ddp": 10.0, "top_k": None}, "does not pay .* no other method reached .* within its steps: top_k"),
        ({"top_k": 1.0}, "add ddp"),
        ({"ddp": 10.0}, "Only stock DDP"),
        ({"ddp": 10.0, "top_k": 5.0}, r"bf16 to --methods"),
    ],
)
def test_the_verdict_is_plain(seconds: dict[str, float | None], says: str) -> None:
    assert re.search(says, verdict([row(method, value) for method, value in seconds.items()]))


def test_a_median_over_seeds_counts_runs_that_never_got_there() -> None:
    rows = [row("ddp", 10.0, seed) for seed in range(3)]
    rows += [row("top_k", seconds, seed) for seed, seconds in enumerate((5.0, None, None))]
    rows += [row("dgc", seconds, seed) for seed, seconds in enumerate((5.0, 8.0, None))]
    by_method = {summary.method: summary for summary in summarize(rows)}
    assert by_method["top_k"].seconds_to_dense_loss is None
    assert by_method["dgc"].speedup == 10.0 / 8.0


def test_one_step_and_one_seed_are_no_plural() -> None:
    name = next(path.name for path in sorted(RESULTS.glob("train-*.json")))
    result = stored(name)
    result["environment"] |= {"steps": 1, "seeds": 1}
    assert train_summary.conditions(result).endswith(" 1 step, 1 seed")
    result["environment"] |= {"steps": 20, "seeds": 3}
    assert train_summary.conditions(result).endswith(" 20 steps, 3 seeds")
