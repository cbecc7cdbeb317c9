"""Judgements of short trainings whose losses are known, and the advice that follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from measured import codec, measurement
from measured import option as measured_option
from thinwire.lab.doctor.diagnosis import describe, diagnose
from thinwire.lab.doctor.equal_loss import ShortCurve, ShortRun, contenders, judge
from thinwire.lab.planning.planner import Option, best_option, price_options

TEXTS = ["bf16", "top_k:density=0.01"]
BF16, TOP_K = f"{TEXTS[0]} by all_reduce", f"{TEXTS[1]} by all_gather"
CODECS = [codec(*one.split(" by ")) for one in (BF16, TOP_K)]
QSGD = "qsgd:bits=8 by two_shot"
SLOWER = {None: 1.0, BF16: 1.0, QSGD: 1.25, TOP_K: 5.0}
"""Steps that a method needs for what dense reaches in one."""
BEST = {None: 2.0, BF16: 2.0, QSGD: 2.0, TOP_K: 0.5}


def trained(runs: Sequence[ShortRun], steps: int = 200) -> list[ShortCurve]:
    """Losses that fall as 2 + 2 / (1 + step / 20), at the best rate; a seed shifts all alike."""
    curves = []
    for run in runs:
        worse = 0.1 * abs(math.log2(run.rate / BEST[run.codec])) + 0.01 * run.seed
        losses = [2.0 + worse + 2.0 / (1.0 + step / 20.0 / SLOWER[run.codec]) for step in range(steps)]
        curves.append(ShortCurve(run, tuple(losses), 1000.0))
    return curves


def test_what_holds_has_its_steps_to_the_dense_loss_and_the_rest_is_refused() -> None:
    judgement = judge([BF16, QSGD, TOP_K], 4, 0.03, trained)
    dense, bf16, qsgd, top_k = judgement.rows
    assert (dense.codec, dense.rate, judgement.doubt, judgement.steps) == (None, 2.0, "", 200)
    assert (bf16.refused, bf16.rate) == ("", 2.0)
    assert bf16.steps == pytest.approx(1.0, abs=0.01)
    assert qsgd.refused == ""
    assert qsgd.steps == pytest.approx(1.25, rel=0.06)
    assert qsgd.excess == pytest.approx(2.0 * (1 / (1 + 190 / 25) - 1 / (1 + 190 / 20)) / dense.loss, rel=0.05)
    assert "more than 3.0% above" in top_k.refused
    assert top_k.rate == 0.5, "each at its best rate"
    assert dense.gain == pytest.approx(0.1 / 2.295, rel=0.05)
    text = "\n".join(judgement.describe(lambda row: None if row.refused else 0.1))
    assert "top_k:density=0.01 by all_gather  x0.5" in text
    assert "refused: more than 3.0% above" in text
    rows = judgement.to_json(lambda row: 0.1)["rows"]
    assert [not row["refused"] for row in rows] == [True, True, True, False]
    assert rows[2]["seconds_to_loss"] == pytest.approx(200 * qsgd.steps * 0.1)


def test_what_is_decided_is_trained_with_no_further_seed() -> None:
    asked: list[ShortRun] = []

    def train(runs: Sequence[ShortRun]) -> list[ShortCurve]:
        asked.extend(runs)
        return trained(runs)

    judge([BF16, TOP_K], 4, 0.01, train)
    assert [run.rate for run in asked[:9]] == [0.5, 1.0, 2.0] * 3, "the same rates for all"
    further = [(run.codec, run.rate, run.seed) for run in asked[9:]]
    assert further == [(codec, 2.0, seed) for seed in (1, 2) for codec in (None, BF16)], "one was hopeless"


def test_seeds_that_disagree_ask_for_further_ones_and_then_nothing_is_known() -> None:
    asked: list[ShortRun] = []

    def disagreeing(runs: Sequence[ShortRun]) -> list[ShortCurve]:
        asked.extend(runs)
        factors = [1.02 if run.codec and run.seed % 2 else 1.0 for run in runs]
        return [
            ShortCurve(one.run, tuple(factor * loss for loss in one.losses))
            for factor, one in zip(factors, trained(runs), strict=True)
        ]

    row = judge([BF16], 4, 0.015, disagreeing).rows[1]
    assert max(run.seed for run in asked) == 5
    assert row.excess == pytest.approx(0.01, rel=0.05), "within the limit"
    assert row.error == pytest.approx(2 * 0.02 * math.sqrt(0.3 / 6), rel=0.05), "and not with its error"
    assert row.refused == "refused: not known well enough"
    assert judge([BF16], 4, 0.03, disagreeing).rows[1].refused == ""


def test_a_training_that_says_too_little_advises_nothing_lossy() -> None:
    def flat(runs: Sequence[ShortRun]) -> list[ShortCurve]:
        return [ShortCurve(run, (2.0,) * 100) for run in runs]

    judgement = judge([BF16], 4, 0.01, flat)
    assert "the dense loss fell by 0.0% only" in judgement.doubt
    assert judgement.of([option("bf16", BF16)]) == []
    for why, curve in (("stopped", (2.0,) * 100), ("a loss of -1 cannot be judged", (-1.0,) * 100)):
        failure = why if why == "stopped" else ""
        judgement = judge(
            [BF16], 4, 0.01, lambda runs, f=failure, c=curve: [ShortCurve(run, c, 0.0, f) for run in runs]
        )
        assert why in judgement.doubt
        assert judgement.rows == ()
        assert judgement.describe(lambda row: None) == [f"No lossy way is advised: {judgement.doubt}."]


def option(name: str, codec: str | None, seconds: float = 1.0) -> Option:
    text, exchange = codec.split(" by ") if codec else (None, "all_reduce")
    return measured_option(name, seconds, text, exchange, is_plain=True)


def test_the_choice_is_by_seconds_to_the_dense_loss() -> None:
    measured = measurement(100)
    judgement = judge([BF16, QSGD, TOP_K], 4, 0.03, trained)
    other = measured.other_seconds
    stock, bf16, qsgd, top_k = (
        option(name, codec, seconds)
        for name, codec, seconds in (
            ("stock DDP", None, 1.0),
            ("bf16", BF16, 0.9),
            ("qsgd", QSGD, 0.8),
            ("k", TOP_K, 0.1),
        )
    )
    held = judgement.of([stock, bf16, qsgd, top_k])
    assert [one.name for one in held] == ["stock DDP", "bf16", "qsgd"]
    assert best_option(measured, held).name == "bf16", "1.11 times as fast as stock, with as many steps"
    assert best_option(measured, [stock, bf16, qsgd]).name == "stock DDP", "without a judgement 1.3 times is asked for"
    faster = option("qsgd", QSGD, 0.6 - other)
    assert best_option(measured, judgement.of([stock, bf16, faster])).name == "qsgd", "0.75 against 0.93"


def test_the_screen_has_the_table_and_the_rate() -> None:
    measured = measurement(100, codecs=CODECS)
    judgement = judge([BF16, TOP_K], 8, 0.01, trained)
    diagnosed = diagnose("a test", measured, TEXTS, judgement=judgement, with_plan=False)
    assert diagnosed.plan.choice.startswith("bf16 by all_reduce")
    text = describe(diagnosed)
    assert "Loss after 200 steps of 8 simulated ranks, each at its best rate:" in text
    assert "loss +0.00% ± 0.00% at rate x2, by short trainings" in text
    assert "\nMultiply the learning rates by 2: short trainings ended 4.4% lower so." in text
    figures = diagnosed.to_json()
    assert figures["advice"]["rate"] == 2.0
    assert [row["method"] for row in figures["losses"]["rows"]] == ["dense", BF16, TOP_K]
    nothing = diagnose("a test", measured, TEXTS, judgement=judge([BF16], 8, 0.01, lambda runs: [
        ShortCurve(run, (2.0,) * 100) for run in runs
    ]), with_plan=False)  # fmt: skip
    assert not any(group.compressor for group in nothing.plan.groups)
    assert "No lossy way is advised: the dense loss fell" in describe(nothing)


def test_only_what_would_be_faster_is_trained() -> None:
    slow, fast = (
        measurement(10, codecs=CODECS),
        measurement(100_000, alpha=1e-5),
    )
    assert contenders(slow, price_options(slow, TEXTS)) == [BF16, TOP_K], "what loses least first"
    assert contenders(fast, price_options(fast, TEXTS)) == []
