"""`thinwire doctor`: its answers from given measurements, its screen, its pictures."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from measured import codec, measurement, table
from thinwire import fuse
from thinwire.compress.named import parse
from thinwire.lab.analyze import trials
from thinwire.lab.analyze.failure import ScriptFailed
from thinwire.lab.analyze.step_recorder import StepRecorder
from thinwire.lab.analyze.steps import run_watched
from thinwire.lab.bench import measured as jobs
from thinwire.lab.bench.jobs.own import OwnJob
from thinwire.lab.cli.main import app
from thinwire.lab.doctor.advice import Advice
from thinwire.lab.doctor.diagnosis import (
    NOT_TRIED,
    SPEEDS_MBIT,
    Confirmed,
    Diagnosis,
    confirm,
    describe,
    diagnose,
    finalists,
)
from thinwire.lab.doctor.losses import describe_loss, loss_of
from thinwire.lab.doctor.lossless import format_mbit
from thinwire.lab.doctor.report import build_report
from thinwire.lab.planning.measurement import DdpSite
from thinwire.lab.planning.outer import outer_option
from thinwire.lab.planning.planner import LOSSY_WORTH, ROWS, step_seconds
from thinwire.lab.planning.training import How
from thinwire.lab.testbed.launch import RanksFailed
from thinwire.lab.testbed.network import Link
from thinwire.plan.plan import STOCK, Plan
from thinwire.plan.policy import Policy
from thinwire.plan.text import format_bytes, format_seconds

TOP_K = "top_k:density=0.01"
POLICIES: tuple[Policy, ...] = (fuse.cupcake(), fuse.one_bucket())


def diagnosis(mbit: float, **changes: Any) -> Diagnosis:
    return diagnose("a test", measurement(mbit, **changes), [TOP_K], POLICIES)


def test_a_slow_link_is_exposed_and_compression_pays() -> None:
    slow = diagnosis(20)
    assert slow.is_exposed
    assert slow.exposed_share > 0.9
    assert not slow.plan.does_nothing
    assert slow.plan.speedup > 3
    assert slow.exposed_seconds == pytest.approx(slow.plan.dense_seconds - 8 * 0.01)


def test_a_fast_link_is_not_exposed_and_nothing_is_done() -> None:
    fast = diagnosis(50_000, backward_seconds=0.1, alpha=1e-5)
    assert not fast.is_exposed
    assert fast.plan.does_nothing
    text = describe(fast)
    assert "\nExposed?             no: 0.0% of a step waits" in text
    assert (
        "\nRecommended          do nothing, by prediction: no exact way is faster than stock DDP by more than 3 %"
        in text
    )
    assert text.endswith("\nDo nothing. Stock DDP is as good as anything here, and simpler.\n")
    assert "import thinwire" not in text


def test_where_it_stops_paying_is_where_the_planner_turns() -> None:
    slow = diagnosis(20, alpha=1e-5)
    stops = slow.stops_mbit
    assert stops is not None
    assert stops > 20
    assert slow.compression_stops_mbit is not None
    assert 20 < slow.compression_stops_mbit <= stops
    measured = measurement(20, alpha=1e-5)
    below = diagnose("", measured.at(stops * 0.95), [TOP_K], POLICIES)
    above = diagnose("", measured.at(stops * 1.25), [TOP_K], POLICIES)
    assert not below.plan.does_nothing
    assert above.plan.does_nothing


def test_what_pays_nowhere_and_everywhere_is_said() -> None:
    dear = codec(TOP_K, "all_gather", alpha=100.0)
    nowhere = diagnose("", measurement(100, codecs=[dear], shapes=[(64, 64)]), [TOP_K], POLICIES)
    assert nowhere.stops_mbit == 0.0
    assert "\nCompression pays     on no link\n" in describe(nowhere)
    assert "An exact way pays" not in describe(nowhere)
    # Three buckets of DDP, where a message takes half a second however fast the link is.
    everywhere = diagnosis(100, shapes=[(512, 550), (6600, 1000), (64, 64)], alpha=0.5)
    assert everywhere.stops_mbit is None
    assert "\nAn exact way pays    on any link up to 100 Gbit/s\n" in describe(everywhere)


def test_curves_fall_with_the_speed_of_the_link() -> None:
    curves = {curve.name: curve.step_seconds for curve in diagnosis(100).curves}
    assert list(curves) == [STOCK, "exact, fused", TOP_K]
    for seconds in curves.values():
        assert len(seconds) == len(SPEEDS_MBIT)
        assert list(seconds) == sorted(seconds, reverse=True)
    assert curves[TOP_K][0] < curves[STOCK][0]


def test_the_screen() -> None:
    assert describe(diagnosis(100, world_size=4), "best.json") == SCREEN


LOSS = "loss +29 % (gpt, AdamW, 300 steps)"
LOSSY = f"lossy; {LOSS}"
PREDICTED = f"{LOSSY}; predicted"
PARTS = "forward and the rest 30.0 ms, backward 80.0 ms, waiting for the network 362.9 ms"

SCREEN = f"""\
thinwire doctor: a test

Model                8 parameters, 3.3 MB of gradients
Ranks                4 on 4 hosts, cpu
Link                 100 Mbit/s a rank, 1.00 ms for an all-to-all round, 1.00 ms to one rank
A step of stock DDP  472.9 ms, predicted: {PARTS}
Exposed?             yes: 77% of a step waits for the network
Best exact way       exact, cupcake: 452.9 ms a step, 1.04 times as fast; predicted
Recommended          top_k:density=0.01 by all_gather, buckets of DDP: 116.4 ms a step, 4.06 times as fast; {PREDICTED}
Compression pays     on links below about 530 Mbit/s
An exact way pays    on links below about 940 Mbit/s

Add, before the first step, with `model` the plain module on every rank, without DistributedDataParallel:

    import thinwire
    sync = thinwire.attach(model, dense=thinwire.compress.top_k(density=0.01))

It is lossy: compare the loss too, or take the exact way with --compress none.
"""


def test_where_nothing_was_tried_the_screen_and_the_page_say_predicted() -> None:
    fast = diagnosis(10_000)
    text, page = describe(fast), build_report(fast).html()
    assert re.search(r"\nA step of stock DDP +[0-9.]+ ms, predicted: forward", text)
    assert re.search(r"\nBest exact way +.*; predicted\n", text)
    assert re.search(r"\nRecommended +do nothing, by prediction: no exact way", text)
    assert "a step, predicted." in page
    assert "a step of stock DDP, predicted" in page
    assert "predicted" not in describe(trained(fast, {})).partition("Trained for a few steps")[0]
    assert "a step of stock DDP, measured" in build_report(trained(fast, {})).html()


def test_another_algorithm_is_named_where_the_network_dominates_and_is_never_the_advice() -> None:
    slow = diagnose("a test", measurement(20, world_size=4), ["bf16"], POLICIES)
    option = slow.outer
    assert option is not None
    size, computing = sum(slow.measurement.size_bytes), 0.03 + 0.08
    assert option.sent_bytes == pytest.approx(2 * 3 / 4 * size / 32, rel=1e-3)
    assert option.exposed_seconds == pytest.approx(option.sent_bytes * 0.4e-6, rel=0.01), "of 20 Mbit/s"
    assert option.step_seconds == pytest.approx(computing + option.exposed_seconds)
    assert option.best_step_seconds == slow.plan.step_seconds > 1.5 * option.step_seconds
    text, figures = describe(slow), slow.to_json()
    assert f"Another algorithm, diloco(every=32), would send {format_bytes(option.sent_bytes)} a step" in text
    assert "see docs/guides/outer.md" in text
    assert text.endswith(
        "\n\n    import thinwire\n    loop = thinwire.outer.attach(model, optimizer, thinwire.outer.diloco(every=32))\n"
    )
    assert figures["outer"]["lines"] == option.lines
    assert figures["outer"]["step_seconds"] == option.step_seconds
    assert not any("outer" in line for line in figures["advice"]["lines"])


def test_another_algorithm_is_not_named_where_it_gains_little() -> None:
    fast = diagnosis(100, world_size=4)
    assert fast.exposed_share > 0.7, "under stock DDP, and not where the best way is taken"
    assert fast.outer is None
    assert fast.to_json()["outer"] is None
    assert "Another algorithm" not in describe(fast)
    assert outer_option(fast.measurement, 10.0, 5.1) is None, "less than half of the step waits"
    assert outer_option(fast.measurement.at(0.01), 10.0, 1.0) is None, "a thirty-second of the bytes is too much"


def test_an_outer_loop_sends_the_rows_of_all_its_steps_and_no_more_than_there_are() -> None:
    few, all_rows = table(world_size=4, held=(50.0,) * 4, union=180.0), table("b", 4, held=(2e4,) * 4, union=4e4)
    measured = measurement(1, world_size=4, tables=[few, all_rows], shapes=[(64, 64)])
    option = outer_option(measured, 1e6, 0.1)
    assert option is not None
    whole = 1.5 * 12.8e6 / 32
    few_rows = option.sent_bytes - whole - 1.5 * 16384 / 32
    assert 0 < few_rows < 3 * 50 * (256 + 8) * 2, "rows of 64 values and their ids: pushed, and the sums pulled"


def with_tables(mbit: float, **changes: Any) -> Diagnosis:
    tables = [table(world_size=4), table("items.weight", 4, num_rows=100_000, held=(50.0,) * 4, union=180.0)]
    measured = measurement(mbit, world_size=4, tables=tables, **changes)
    return diagnose("a test", measured, [TOP_K, "bf16"], POLICIES, with_plan=False)


def test_tables_have_a_line_and_the_model_has_all_its_parameters() -> None:
    diagnosed = with_tables(100, shapes=[(64, 64), (64,)])
    text = describe(diagnosed)
    assert "\nModel                4 parameters, 38.4 MB of gradients\n" in text
    assert "\nTables               words.weight: 12.8 MB; each rank touches 0.4 % of the rows; thinwire sends " in text
    assert "                     items.weight: 25.6 MB; each rank touches 0.05 % of the rows; " in text
    assert "    sync = thinwire.attach(model)\n" in text
    assert diagnosed.plan.speedup > 5
    assert not any(group.compressor for group in diagnosed.plan.groups)
    assert [set(job) for job in diagnosed.to_json()["tables"]] == [
        {"tables", "scheme", "sent_bytes", "wire_seconds", "seconds", "ready_seconds"}
    ] * 2


def test_a_model_of_tables_alone_is_diagnosed() -> None:
    alone = replace(with_tables(100).measurement, parameters=(), backward_seconds=())
    diagnosed = diagnose("a test", alone, [TOP_K], POLICIES, with_plan=False)
    assert diagnosed.advice.name == ROWS
    assert "    sync = thinwire.attach(model)\n" in describe(diagnosed)
    assert [way.name for way in finalists(diagnosed)] == [STOCK, ROWS]
    assert trained(diagnosed, {ROWS: 99.0}).plan.does_nothing


def trained(diagnosed: Diagnosis, seconds: dict[str, float]) -> Diagnosis:
    """Confirm with the given factors on predicted seconds, by the beginning of the name."""
    rows = []
    for way in finalists(diagnosed):
        predicted = step_seconds(diagnosed.measurement, way)
        factor = next((value for name, value in seconds.items() if way.name.startswith(name)), 1.0)
        rows.append(Confirmed(way.name, predicted, predicted * factor))
    return confirm(diagnosed, rows)


def on_any_wire(diagnosed: Diagnosis) -> Diagnosis:
    """Let any time be measured that is not too far from its prediction."""
    return replace(diagnosed, options=tuple(replace(way, wire_seconds=0.0) for way in diagnosed.options))


def test_ways_are_tried_in_the_order_of_what_they_lose() -> None:
    diagnosed = with_tables(100)
    names = [way.name for way in finalists(diagnosed)]
    assert names == [STOCK, ROWS, "bf16 by all_reduce, buckets of DDP", f"{TOP_K} by all_gather, buckets of DDP"]
    fast = with_tables(100, shapes=[(64, 64), (64,)])
    assert [way.name for way in finalists(fast)] == [STOCK, ROWS], "nothing that compresses is predicted to gain"


def test_what_was_measured_decides() -> None:
    diagnosed = diagnosis(200, world_size=4)
    assert diagnosed.plan.choice.startswith(TOP_K)
    slow = trained(diagnosed, {TOP_K: 2.5, "exact": 2.5})
    assert slow.plan.does_nothing
    assert slow.advice.dense is None
    text = describe(slow)
    assert "Compression pays" not in text, "which the measured steps contradict"
    assert "An exact way pays" not in text
    assert "\nDo nothing. Stock DDP is as good as anything here, and simpler.\n" in text
    alike = trained(diagnosed, {STOCK: 1.5})
    assert alike.stock_step_seconds == pytest.approx(1.5 * diagnosed.stock_step_seconds)
    assert alike.plan.choice == diagnosed.plan.choice
    assert "Compression pays" in describe(alike)
    (row,) = [row for row in alike.to_json()["confirmed"] if row["name"] == STOCK]
    assert row["measured_step_seconds"] == pytest.approx(alike.to_json()["stock_step_seconds"])


def test_the_recommended_way_is_as_near_the_best_that_was_measured_as_the_rules_allow() -> None:
    diagnosed = on_any_wire(with_tables(100))
    for factor in (0.4, 0.8, 0.9, 0.95, 1.0, 1.1, 1.3):
        for kind in (TOP_K, "bf16", ROWS):
            chosen = trained(diagnosed, {kind: factor})
            assert not chosen.error
            measured = {row.name: row.measured_step_seconds or 0.0 for row in chosen.confirmed}
            assert chosen.plan.step_seconds <= LOSSY_WORTH * min(measured.values())
            assert chosen.plan.step_seconds <= 1.1 * min(measured[STOCK], measured[ROWS])
            if any(group.compressor for group in chosen.plan.groups):
                assert LOSSY_WORTH * chosen.plan.step_seconds < min(measured[STOCK], measured[ROWS])


def test_a_way_that_failed_is_listed_and_not_taken() -> None:
    diagnosed = diagnosis(100, world_size=4)
    rows = [
        Confirmed(way.name, 1.0, None, "failed: OSError")
        if way.name.startswith(TOP_K)
        else Confirmed(way.name, 1.0, 1.0)
        for way in finalists(diagnosed)
    ]
    failed = confirm(diagnosed, rows)
    assert failed.plan.does_nothing
    assert "failed: OSError" in describe(failed)
    assert f"\nIn doubt: {TOP_K} by all_gather, buckets of DDP could not be tried, and might be faster" in describe(
        failed
    )


@pytest.mark.parametrize("failing", ["every way", "exact ways"])
def test_a_way_that_failed_is_never_advised_and_no_lossy_one_where_the_exact_one_failed(failing: str) -> None:
    diagnosed = on_any_wire(with_tables(100))
    stock, *others = finalists(diagnosed)
    rows = [Confirmed(stock.name, 1.0, 1.0)]
    for way in others:
        fails = failing == "every way" or way.is_exact
        rows.append(Confirmed(way.name, 1.0, None if fails else 0.5, "failed: OSError" if fails else ""))
    failed = confirm(diagnosed, rows)
    text, names = describe(failed), ", ".join(row.name for row in failed.failed)
    assert failed.plan.does_nothing
    assert failed.advice.name == failed.best_exact[0] == STOCK
    assert failed.stock_step_seconds == pytest.approx(1.0)
    assert f"do nothing: {names} failed when tried, and nothing else is proven\n" in text
    assert f"Do nothing. {names} failed when tried, and nothing else is proven.\n" in text
    assert "failed: OSError" in text
    assert "rerun with --compress" not in text
    assert f"{names} failed when tried" in build_report(failed).html()


def test_a_lossy_way_may_be_advised_where_another_exact_one_ran() -> None:
    diagnosed = on_any_wire(with_tables(100))
    stock, exact, *lossy = finalists(diagnosed)
    other = replace(exact, name="exact, in another way")
    diagnosed = replace(diagnosed, options=(*diagnosed.options, other))
    rows = [Confirmed(stock.name, 1.0, 1.0), Confirmed(exact.name, 1.0, None, "failed: OSError")]
    rows += [Confirmed(other.name, 1.0, 0.9), *(Confirmed(way.name, 1.0, 0.5) for way in lossy)]
    assert confirm(diagnosed, rows).advice.name == lossy[0].name


def test_without_the_steps_of_stock_ddp_there_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="failed under stock DDP"):
        confirm(diagnosis(100), [Confirmed(STOCK, 1.0, None, "failed: OSError")])


@pytest.mark.parametrize("factor", [0.35, 0.6, 1.0, 2.0])
def test_parts_of_a_measured_step_add_up_and_contradict_no_measured_way(factor: float) -> None:
    diagnosed = on_any_wire(diagnosis(100, world_size=4))
    for kind in (STOCK, TOP_K, "exact"):
        seen = trained(diagnosed, {kind: factor})
        tried = {row.name: row.measured_step_seconds for row in seen.confirmed}
        parts = (seen.plan.other_seconds, seen.backward_seconds, seen.exposed_seconds)
        assert min(parts) >= -1e-12
        assert sum(parts) == pytest.approx(tried[STOCK])
        assert sum(parts[:2]) <= min(seconds for seconds in tried.values() if seconds is not None) + 1e-12
        data = seen.to_json()
        assert data["stock_step_seconds"] == pytest.approx(tried[STOCK])
        assert data["plan_step_seconds"] == pytest.approx(tried[data["advice"]["name"]])
        assert data["speedup"] == pytest.approx(tried[STOCK] / tried[data["advice"]["name"]])
        assert ", measured: forward and the rest" in describe(seen)
        # Ways that were not tried keep their predicted step.
        untried = {
            way.name: step_seconds(diagnosed.measurement, way) for way in diagnosed.options if way.name not in tried
        }
        for candidate in seen.plan.candidates:
            if candidate.name in untried:
                assert seen.plan.other_seconds + candidate.seconds >= untried[candidate.name] - 1e-12


def test_an_exact_way_is_said_to_pay_by_the_margin_of_the_recommendation() -> None:
    diagnosed = diagnosis(100, world_size=4)
    assert "\nAn exact way pays" in describe(diagnosed)
    by_one_percent = trained(diagnosed, {"exact": diagnosed.stock_step_seconds / diagnosed.best_exact[1] / 1.01})
    assert by_one_percent.plan.choice.startswith(TOP_K)
    text = describe(by_one_percent)
    assert "1.01 times as fast\n" in text
    assert "\nCompression pays" in text
    assert "An exact way pays" not in text


def confirmed(diagnosed: Diagnosis, seconds: dict[str, float | None]) -> Diagnosis:
    """Confirm with seconds by the beginning of the name; None, and ways without any, were not tried."""
    rows = []
    for way in finalists(diagnosed):
        found = next((value for name, value in seconds.items() if way.name.startswith(name)), None)
        predicted = step_seconds(diagnosed.measurement, way)
        rows.append(Confirmed(way.name, predicted, found, "" if found else f"{NOT_TRIED}: 60 s were needed"))
    return confirm(diagnosed, rows)


def test_an_exact_way_that_was_not_tried_keeps_its_prediction_and_nothing_lossy_comes_before_it() -> None:
    diagnosed = with_tables(100)
    name, predicted = diagnosed.best_exact
    assert name == ROWS
    stock = diagnosed.stock_step_seconds
    seen = confirmed(diagnosed, {STOCK: stock, TOP_K: 0.12})
    assert seen.best_exact == (ROWS, pytest.approx(predicted))
    assert seen.plan.choice == ROWS
    text, data = describe(seen), seen.to_json()
    times = f"{stock / predicted:.2f} times as fast; predicted, because it was not tried"
    said = re.escape(f"{ROWS}: {format_seconds(predicted)} a step, {times}")
    assert re.search(rf"\nBest exact way +{said}\n", text)
    assert re.search(rf"\nRecommended +{said}\n", text)
    assert "not tried: 60 s were needed" in text
    assert "Compression pays" not in text, "beside advice that rests on a way that was not tried"
    assert data["best_exact"]["predicted"] is True
    tried = confirmed(diagnosed, {STOCK: stock, ROWS: predicted, TOP_K: 0.12})
    assert tried.plan.choice.startswith(TOP_K)
    assert tried.to_json()["best_exact"] == {"name": ROWS, "step_seconds": predicted, "predicted": False}
    near = confirmed(diagnosed, {STOCK: stock, ROWS: predicted, TOP_K: predicted / 1.2})
    assert near.plan.choice == ROWS, "what loses has to be 1.3 times as fast"


@pytest.mark.parametrize("seconds", [{}, {TOP_K: 0.19}, {"exact": 2.33}], ids=["neither", "lossy", "exact"])
def test_to_do_nothing_is_no_verdict_on_a_lossy_way_that_was_not_compared(seconds: dict[str, float]) -> None:
    diagnosed = diagnosis(20)
    stock, exact, lossy = finalists(diagnosed)
    predicted = step_seconds(diagnosed.measurement, stock)
    assert predicted < 1.03 * step_seconds(diagnosed.measurement, exact), "no exact way is worth it"
    assert predicted > 8 * step_seconds(diagnosed.measurement, lossy)
    seen = confirmed(diagnosed, {STOCK: predicted, **seconds})
    assert seen.plan.does_nothing, "nothing lossy before the best exact way is tried"
    text = describe(seen)
    assert f"and {lossy.name}, which is lossy, or the best exact way was not tried\n" in text
    assert f"Do nothing. But {lossy.name} may be faster: rerun with --compress and its name alone" in text
    assert "no lossy one" not in text
    assert "as good as anything" not in text
    assert f"But {lossy.name} may be faster" in build_report(seen).html()
    assert "and no lossy one by 30 %\n" in describe(diagnosis(10_000))


def test_a_lossy_way_is_not_taken_by_one_slow_trial_of_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first trial of the best exact way is here: other work came and went. Both of them are tried again."""
    diagnosed = diagnosis(1000, world_size=4)
    stock, *_ = diagnosed.options
    lossy = next(option for option in diagnosed.options if not option.is_exact)
    usual = step_seconds(diagnosed.measurement, stock)
    assert usual < 2 * step_seconds(diagnosed.measurement, lossy), "no measured step is too far from its prediction"
    advised, tried = [(option, Advice(option.name)) for option in (stock, lossy)], []

    def run(function: object, script: str, data: object, advice: Advice, *more: object, **settings: Any) -> Any:
        tried.append(advice.name)
        is_slow = advice.name == STOCK and tried.count(STOCK) == 1
        return [[1.4 * usual if is_slow else usual]] * 4

    monkeypatch.setattr(trials, "run_on_ranks", run)
    rows = trials.try_script(Path("train.py"), [], advised, diagnosed.measurement, None)
    assert {row.name: row.measured_step_seconds for row in rows} == {STOCK: usual, lossy.name: usual}


def test_trials_end_in_time_by_trying_less_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed = with_tables(100)
    advised = [(way, Advice(way.name)) for way in finalists(diagnosed)]
    tried, now = [], [0.0]

    def run(function: object, script: str, data: object, advice: Advice, *more: object, **settings: Any) -> Any:
        tried.append(advice.name)
        now[0] += 5.0 + trials.seconds_of_trial(step[advice.name])
        return [[step[advice.name]]] * 4

    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(trials, "run_on_ranks", run)
    step = {way.name: step_seconds(diagnosed.measurement, way) for way, _ in advised}

    def names(deadline: float) -> list[str]:
        tried.clear()
        now[0] = 0.0
        rows = trials.try_script(Path("train.py"), [], advised, diagnosed.measurement, None, deadline=deadline)
        assert [row.name for row in rows] == [way.name for way, _ in advised]
        assert all(row.failure.startswith(NOT_TRIED) for row in rows if row.name not in tried)
        return list(dict.fromkeys(tried))

    in_order = [way.name for way, _ in advised]
    assert names(1000.0) == in_order
    assert names(0.0) == in_order[:2] == [STOCK, ROWS], "the best exact way in any case"
    begun = [5.0 + trials.seconds_of_trial(seconds) for seconds in step.values()]
    assert names(sum(begun[:3]) + 0.1) == in_order[:3], "then what loses least, though the next one is shorter"
    step[ROWS] *= 3.5
    names(1000.0)
    assert tried.count(ROWS) == 2, "what cannot be is measured again"


def test_a_way_of_a_job_that_fails_ends_no_other_and_none_is_begun_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosed = with_tables(100)
    advised = [(way, Advice(way.name)) for way in finalists(diagnosed)]
    names = [way.name for way, _ in advised]
    tried, now = [], [0.0]

    def run(function: object, target: object, data: object, advice: Advice, *more: object, **settings: Any) -> Any:
        tried.append(advice.name)
        now[0] += 60.0
        if advice.name == ROWS:
            raise RanksFailed("ValueError: not so", [])
        return [[step_seconds(diagnosed.measurement, diagnosed.options[0])]] * 4

    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(jobs, "values_of_ranks", run)
    job = jobs.TrainingTarget("digits")
    rows = jobs.try_on_hosts(job, advised, diagnosed.measurement, 1, Link(None), lambda stage: None, 170.0)
    assert list(dict.fromkeys(tried)) == names[:3]
    assert [row.failure.partition(":")[0] for row in rows] == ["", "failed", "", NOT_TRIED]
    assert rows[1].failure == "failed: ValueError: not so"
    assert confirm(diagnosed, rows).plan.does_nothing


def test_what_the_wire_forbids_or_is_far_from_its_prediction_is_no_verdict() -> None:
    diagnosed = diagnosis(100, world_size=4)
    stock = diagnosed.options[0]
    predicted = step_seconds(diagnosed.measurement, stock)
    figures = {STOCK: predicted, "exact": diagnosed.best_exact[1], TOP_K: 0.12}
    assert not confirmed(diagnosed, figures).error
    wire = f"{format_seconds(stock.wire_seconds)} on this link of 100 Mbit/s"
    for name, seconds, other in (
        (STOCK, 0.79 * stock.wire_seconds, f"its bytes alone need {wire}"),
        (STOCK, 3.1 * predicted, f"{format_seconds(predicted)} was predicted"),
        (TOP_K, 0.5, "116.4 ms was predicted"),
    ):
        seen = confirmed(diagnosed, figures | {name: seconds})
        text, data = describe(seen), seen.to_json()
        assert f": a step of {format_seconds(seconds)} was measured, and {other}" in seen.error
        assert f"\nNo verdict: {seen.error}" in text
        assert "import thinwire" not in text
        assert "Compression pays" not in text
        assert data["error"] == seen.error
        verdict = ("do_nothing", "plan_step_seconds", "speedup", "advice", "best_exact", "plan", "outer")
        assert {key: data[key] for key in verdict} == dict.fromkeys(verdict)
        assert "No verdict" in build_report(seen).html()
    assert not confirmed(diagnosed, figures | {STOCK: 0.81 * stock.wire_seconds, "exact": 0.4}).error


def test_computing_that_was_measured_while_the_machine_was_busy_is_no_reason_for_no_verdict() -> None:
    """All steps are shorter than that by the same seconds; what waits for the network is as predicted."""
    diagnosed = diagnosis(100, world_size=4, backward_seconds=0.2)
    computing = diagnosed.measurement.other_seconds + diagnosed.measurement.all_backward_seconds
    predicted = {way.name: step_seconds(diagnosed.measurement, way) for way in finalists(diagnosed)}
    seconds: dict[str, float | None] = {name: step - 0.8 * computing for name, step in predicted.items()}
    assert any(predicted[name] > 3 * (step or 0.0) for name, step in seconds.items())
    seen = confirmed(diagnosed, seconds)
    assert not seen.error
    assert seen.advice.name == min(seconds, key=lambda name: seconds[name] or 0.0)


def test_steps_of_a_few_milliseconds_may_be_far_from_their_prediction() -> None:
    fast = diagnosis(50_000, backward_seconds=0.001, alpha=1e-5)
    predicted = fast.stock_step_seconds
    assert predicted < 0.045
    assert not confirmed(fast, {STOCK: 2.1 * predicted}).error


def test_no_more_hides_behind_backward_than_backward_lasts() -> None:
    fast = diagnosis(2000, backward_seconds=0.1, alpha=1e-5)
    seen = confirmed(fast, {STOCK: 0.5 * fast.stock_step_seconds})
    assert seen.exposed_seconds == 0.0
    busy = replace(seen, communication_seconds=99.0)
    assert busy.hidden_seconds == busy.backward_seconds
    assert f"and {format_seconds(busy.backward_seconds)} of communication hide behind backward" in describe(busy)


def test_a_step_of_several_backwards_has_a_line() -> None:
    once = measurement(100, world_size=4)
    assert "A step  " not in describe(diagnose("", once, [], POLICIES)).replace("A step of", "")
    for passes, synchronizations, says in ((4, 1, "4 backwards, synchronized once"), (4, 4, "synchronized 4 times")):
        several = replace(once, passes=passes, synchronizations=synchronizations)
        diagnosed = diagnose("", several, [], POLICIES)
        assert re.search(rf"\nA step +.*{says}, and the optimizer's step\n", describe(diagnosed))
        assert diagnosed.communication_seconds == pytest.approx(
            synchronizations * diagnose("", once, [], POLICIES).communication_seconds
        )
        assert diagnosed.to_json()["synchronizations"] == synchronizations


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


def test_the_loss_of_our_tables_stands_beside_what_compresses() -> None:
    for optimizer, says in (("AdamW", LOSS), ("SGD", "loss +0.4 to +0.9 % (lstm, SGD, 300 steps), of top_k:")):
        measured = replace(measurement(20, world_size=4), optimizer=optimizer)
        seen = trained(diagnose("", measured, [TOP_K], POLICIES, with_plan=False), {})
        text, data = describe(seen), seen.to_json()
        assert text.count(says) == 2, "in the recommendation and in the table"
        loss = data["advice"]["loss"]
        assert loss["optimizer"] == optimizer
        assert loss["source"] == "docs/guides/compression.md"
        assert [row["loss"] for row in data["confirmed"]] == [None, loss]


def test_what_was_left_out_of_a_script_has_a_line() -> None:
    site = DdpSite(file="train.py", line=7, target="ddp", call="DDP(net)", others=1, left_out=("line 9 of train.py",))
    text = describe(diagnose("", replace(measurement(100), ddp=site), [TOP_K], POLICIES, with_plan=False))
    assert re.search(r"\nTake out +line 9 of train.py, which the doctor left out when it ran the script\n", text)
    assert re.search(r"\nLeft out +another DistributedDataParallel of the script: only the first, in line 7", text)


def test_without_a_file_for_the_plan_no_advice_needs_one() -> None:
    measured = measurement(100, world_size=4, shapes=[(512, 550), (6600, 1000), (64, 64)], alpha=0.05)
    without = diagnose("", measured, [TOP_K], POLICIES, with_plan=False)
    assert without.advice.plan is None
    assert all(way.is_plain for way in finalists(without))
    with_plan = diagnose("", measured, [TOP_K], POLICIES)
    if with_plan.advice.plan is not None:
        assert "To write one: --output plan.json" in describe(without)


def test_buckets_of_ddp_follow_no_plan_where_torch_has_no_caps_for_each_or_a_table_is_among_them() -> None:
    site = DdpSite((measurement().names,), "train.py", 7, "ddp", "DDP(net)", "DDP(net, bucket_cap_mb_list=...)", True)
    for changes in ({"follows_plans": False}, {}):
        tables = [] if changes else [table(ready_seconds=0.01)]
        measured = replace(measurement(100, tables=tables), ddp=replace(site, **changes))
        assert all(way.is_plain for way in diagnose("", measured, [TOP_K], POLICIES).options)
    follows = replace(measurement(100), ddp=site)
    assert not all(way.is_plain for way in diagnose("", follows, [TOP_K], POLICIES).options)


def test_speeds_are_said_in_two_digits() -> None:
    assert [format_mbit(mbit) for mbit in (12.34, 100.0, 996.0, 2512.0, 100_000.0)] == [
        "12 Mbit/s",
        "100 Mbit/s",
        "1 Gbit/s",
        "2.5 Gbit/s",
        "100 Gbit/s",
    ]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_command_reads_a_measurement(tmp_path: Path) -> None:
    measured, plan, figures = tmp_path / "measured.json", tmp_path / "plan.json", tmp_path / "out.json"
    picture, page = tmp_path / "doctor.png", tmp_path / "doctor.html"
    measurement(100).save(measured)
    result = invoke("--from", str(measured), "--compress", TOP_K, "--output", str(plan), "--json", str(figures),
                    "--picture", str(picture), "--report", str(page))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f'plan = thinwire.Plan.load("{plan}")\n    sync = thinwire.attach(model, dense=plan)' in result.output
    data = json.loads(figures.read_text())
    assert data["do_nothing"] is False
    assert data["plan"] == Plan.load(plan).to_json()
    assert {
        "exposed_share",
        "stops_mbit",
        "compression_stops_mbit",
        "speedup",
        "link_mbit",
        "stock_step_seconds",
        "curves",
    } <= set(data)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in page.read_text()
    assert "Step time against the speed of the link" in page.read_text()


def test_the_document_has_the_screen_that_its_command_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    document = (root / "docs" / "guides" / "doctor.md").read_text()
    (example,) = re.findall(r"```\n(thinwire doctor: .*?)```", document, flags=re.DOTALL)
    result = invoke("--from", "docs/lstm-100mbit.json")
    assert result.exit_code == 0, result.output
    assert result.stdout == example


def test_another_link_can_be_asked_for(tmp_path: Path) -> None:
    measured, figures = tmp_path / "measured.json", tmp_path / "out.json"
    measurement(100, alpha=1e-5).save(measured)
    arguments = ("--from", str(measured), "--compress", TOP_K, "--link", "30gbit", "--json", str(figures))
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(figures.read_text())["do_nothing"] is True
    assert "Do nothing." in result.output


def test_a_file_that_is_no_measurement_is_named(tmp_path: Path) -> None:
    for text in ("{}", "[]", '{"version": 1}', '{"version": 0}'):
        (tmp_path / "other.json").write_text(text)
        result = invoke("--from", str(tmp_path / "other.json"))
        assert result.exit_code == 2
        assert "other.json: " in " ".join(result.output.split())


def test_a_measurement_of_an_older_version_of_thinwire_is_read(tmp_path: Path) -> None:
    data = measurement(100).to_json()
    for key in ("passes", "synchronizations", "optimizer"):
        del data[key]
    (tmp_path / "old.json").write_text(json.dumps(data))
    result = invoke("--from", str(tmp_path / "old.json"), "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.json").read_text())["synchronizations"] == 1


def test_a_plan_is_no_measurement(tmp_path: Path) -> None:
    Plan(2, "model", (), 0.1, 0.2, choice=STOCK).save(tmp_path / "plan.json")
    result = invoke("--from", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert "this is a plan, not a measurement" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give a script, a job or module:function"),
        (("lstm", "--from", "x.json"), "give lstm, to be measured, or --from FILE, not both"),
        (("--from", "x.json", "--hosts", "3"), "was measured already: leave out --hosts"),
        (("--from", "x.json", "--steps", "9"), "was measured already: leave out --steps"),
        (("--from", "x.json", "--compress", "top_k:dens=0.1"), "does not take these settings"),
        (("--from", "x.json", "--compress", "top_k:density=7"), "in (0, 1], not 7"),
        (("--ranks-per-host", "2", __file__), "leave out --ranks-per-host"),
        (("lstm", "--ranks", "2"), "leave out --ranks"),
        (("lstm", "--loss", "1%"), "--loss trains a script with ranks simulated here"),
        (("--loss", "little", __file__), "--loss is a percentage of the dense loss, such as 1%, not 'little'"),
        (("--loss", "0%", __file__), "such as 1%, not '0%'"),
        (("nomod:make",), "No module named 'nomod'; run from the directory that holds it"),
        (("nomod.inner:make",), "No module named 'nomod'"),
        (("this:nope",), "this has no function 'nope'"),
        (("--from", "none.json"), "cannot read the measurement none.json"),
        (("none.py",), "there is no script none.py"),
        (("lstn",), "unknown job 'lstn'; legal are lstm, digits, gpt, xlmr"),
        (("lstm", "extra"), "lstm takes no arguments"),
        (("--hosts", "2", "train.py"), "give --ranks, not --hosts"),
        (("lstm", "--hosts", "2", "--link", "fast"), "unknown link 'fast'"),
        (("lstm", "--hosts", "1"), "two ranks are needed"),
        (("lstm", "--hosts", "2", "--compress", "gaussian_k"), "nobody can tell beforehand"),
        (("lstm", "--compress", "top_q"), "unknown compressor 'top_q'"),
        (("lstm", "--json", "none/out.json"), "none is not a directory"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
    assert "Starting ranks" not in result.output or not arguments[0].endswith(".py")


def test_a_function_that_a_file_may_define_is_looked_for_without_running_it(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    for text in ("def make(): ...", "if x:\n  make = 1", "from a import b as make", "from a import *"):
        job.write_text(f"{text}\nraise SystemExit")
        assert OwnJob.parse(f"{job}:make").name == f"{job}:make"
    for text, says in (("def other(): ...", "has no function 'make'"), ("def (", "line 1: invalid syntax")):
        job.write_text(text)
        result = invoke(f"{job}:make")
        assert result.exit_code == 2
        assert says in result.output
        assert "Measuring" not in result.output


def test_a_script_of_few_steps_says_how_many_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])  # what a script is given
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text("print('one step')\n")
    recorder = StepRecorder(How(steps=4))
    recorder.num_models = 1
    with pytest.raises(ScriptFailed, match=r"train.py ended before 7 training steps were timed: let it train longer"):
        run_watched(recorder, script, [])


PLAIN = """
import torch
model = torch.nn.Linear(4, 4)
{sharded}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    model(torch.ones(2, 4)).sum().backward()
    {attach}
    optimizer.step()
"""
SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attach", ["", "__import__('thinwire').attach(model)"])
@pytest.mark.parametrize(
    ("sharded", "says", "says_not"),
    [
        ("", "wrap it in torch.nn.parallel.DistributedDataParallel", "fully_shard"),
        (SHARDED, "`thinwire.attach(model)` works with fully_shard", "DistributedDataParallel"),
    ],
    ids=["plain", "FSDP2"],
)
def test_a_script_that_trains_on_without_ddp_ends(
    sharded: str, says: str, says_not: str, attach: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text(PLAIN.format(sharded=sharded, attach=attach))
    try:
        with pytest.raises((ScriptFailed, ValueError)) as caught:
            run_watched(StepRecorder(How(steps=4)), script, [])
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert says in str(caught.value)
    assert says_not not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["doctor train.py", "doctor digits", "plan --measure --job digits"])
def test_kernels_are_compiled_with_a_line_of_progress_and_before_the_time_that_counts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    now, deadlines = [0.0], []

    def compile_ahead(names: object = None, on_progress: Any = None) -> None:
        if now[0] == 0.0:
            on_progress("Compiling kernels, once a machine, 9 to 21 s", 0, 0)
            now[0] += 70.0

    def measured(*arguments: object) -> Any:
        now[0] += 10.0
        return measurement(100)

    def tried(
        target: object, arguments: object, advised: Any, known: Any, network: object, tell: object, deadline: float
    ) -> list[Confirmed]:
        deadlines.append(deadline)
        return [Confirmed(way.name, step_seconds(known, way), step_seconds(known, way)) for way, _ in advised]

    monkeypatch.setattr("thinwire.lab.cli.doctor.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("thinwire.lab.testbed.kernels.compile_ahead", compile_ahead)
    monkeypatch.setattr("thinwire.lab.analyze.steps.measure_script", measured)
    monkeypatch.setattr("thinwire.lab.bench.measured.measure_on_hosts", measured)
    monkeypatch.setattr(
        "thinwire.lab.bench.measured.try_on_hosts", lambda *arguments: tried(0, 0, *arguments[1:3], 0, 0, arguments[-1])
    )
    monkeypatch.setattr(trials, "try_script", tried)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "Compiling kernels, once a machine, 9 to 21 s ...\n" in result.stderr
    assert "Compiling" not in result.stdout
    assert now[0] == 80.0
    began = {"doctor train.py": [70.0], "doctor digits": [80.0]}.get(command, [])
    assert deadlines == [moment + trials.BUDGET_SECONDS for moment in began]


def test_help_has_examples() -> None:
    output = invoke("--help").output
    assert "thinwire doctor lstm --hosts 8 --link 100mbit" in " ".join(output.split())
