"""Losses of our tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.compress.named import parse
from thinwire.lab.doctor.losses import describe_loss, loss_of


def test_the_loss_of_the_nearest_training_is_named() -> None:
    assert describe_loss([None, "qsgd:bits=8"], "Adam") == "loss +0.04 % (a character transformer, AdamW, 300 steps)"
    assert describe_loss(["power_sgd:rank=4", "bf16"], "") == "loss +2.6 % (gpt, AdamW, 300 steps)", "the worst of both"
    assert describe_loss(["bf16"], "AdamW") == "loss +0 % (gpt, AdamW, 300 steps)"
    assert describe_loss(["ef_sign_sgd"], "SGD") == "loss +0.1 to +0.7 % (lstm, SGD, 300 steps)"
    assert describe_loss(["atomo"], "SGD") == "loss not in our tables"
    assert describe_loss([None], "SGD") == ""


def test_losses_are_those_of_our_results() -> None:
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    for job in ("bert", "gpt", "xlmr"):
        rows = {row["method"]: row for row in json.loads((results / f"losses-{job}.json").read_text())["rows"]}
        stock = rows.pop("ddp")["final_loss"]
        for method, row in rows.items():
            excess = 100 * (row["final_loss"] / stock - 1)
            loss = loss_of(method, row["optimizer"])
            assert loss is not None
            assert excess < loss.most + 0.05, "the worst row is named"
            if loss.job == job and parse(method) == parse(loss.compressor):
                assert loss.steps == row["steps"]
                assert row["optimizer"].startswith(loss.optimizer)
                assert excess == pytest.approx(loss.most, abs=0.05)
