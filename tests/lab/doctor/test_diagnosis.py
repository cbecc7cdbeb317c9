"""`thinwire doctor`: its answers from given measurements, its screen, its pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measured import AUTOCAST, codec, measurement, table
from tests.lab.doctor.diagnosed import POLICIES, TOP_K, with_tables
from thinwire.lab.analyze import trials
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
from thinwire.lab.doctor.lossless import format_mbit
from thinwire.lab.doctor.report import build_report
from thinwire.lab.planning.measurement import DdpSite
from thinwire.lab.planning.outer import outer_option
from thinwire.lab.planning.planner import LOSSY_WORTH, ROWS, step_seconds
from thinwire.plan.plan import STOCK
from thinwire.plan.text import format_bytes, format_seconds


def diagnosis(mbit: float, **changes: Any) -> Diagnosis:
    return diagnose("a test", measurement(mbit, **changes), [TOP_K], POLICIES)


def test_a_slow_link_is_exposed_and_compression_pays() -> None:
    slow = diagnosis(20)
    assert slow.exposed_share > 0.9
    assert not slow.plan.does_nothing
    assert slow.plan.speedup > 3
    assert slow.exposed_seconds == pytest.approx(slow.plan.dense_seconds - 8 * 0.01)


def test_a_fast_link_is_not_exposed_and_nothing_is_done() -> None:
    fast = diagnosis(50_000, backward_seconds=0.1, alpha=1e-5)
    assert fast.exposed_share <= 0.03
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


def test_what_is_said_of_lossless_sums_is_left_out_where_measured_steps_contradict_it() -> None:
    pays = diagnosis(100, world_size=4, dense_codes=[AUTOCAST])
    assert pays.lossless is not None
    assert pays.lossless.pays
    for measured, says in ((1.0, True), (2.5, False)):
        assert ("\nLossless sums        pays" in describe(trained(pays, {"exact, lossless": measured}))) is says
    fast = measurement(5_000, world_size=4, dense_codes=[AUTOCAST])
    gains_nothing = diagnose("a test", fast, [TOP_K], POLICIES, dense="lossless")
    assert gains_nothing.lossless is not None
    assert not gains_nothing.lossless.pays
    for measured, says in ((1.0, True), (0.5, False)):
        seen = trained(on_any_wire(gains_nothing), {"exact, lossless": measured})
        assert ("\nLossless sums        nothing to gain" in describe(seen)) is says


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
