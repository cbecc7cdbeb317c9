"""Lossless sums in `thinwire plan` and `thinwire doctor`: what is measured of the code, its price, and the advice."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from measured import AUTOCAST, PLAIN, POLICIES, dense_code, measurement, table
from thinwire.lab.cli.main import app
from thinwire.lab.doctor.diagnosis import Confirmed, Diagnosis, confirm, describe, diagnose, finalists
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import SHORT, best_plan, price_options, step_seconds
from thinwire.lab.planning.speeds import DenseCode
from thinwire.plan.plan import LOSSLESS, NATIVE, STOCK, Group, Plan
from thinwire.tune.lossless import Ranks, lossless_seconds

LARGE = ((1024, 1024), (2048, 1024), (512,), (1024, 2048))
"""18.9 MB."""


def planned(mbit: float, code: DenseCode = AUTOCAST, **changes: Any) -> Plan:
    return best_plan(measurement(mbit, dense_codes=[code], **changes), (), POLICIES)


# --- the planner


def test_lossless_sums_are_planned_where_they_pay_and_nothing_else_is_exact_and_as_fast() -> None:
    plan = planned(100)
    assert plan.choice.startswith(SHORT)
    assert {group.dense for group in plan.groups} == {LOSSLESS}
    assert {group.compressor for group in plan.groups} == {None}
    assert 1.5 < plan.speedup < 64 / 29
    assert plan.explain().count("exact, lossless") >= len(plan.groups)
    assert "It is lossy" not in plan.explain()


def test_without_a_measured_code_there_is_no_such_way() -> None:
    assert not any(way.is_lossless for way in price_options(measurement(100), ()))
    assert all(group.dense == NATIVE for group in best_plan(measurement(100), (), POLICIES).groups)


@pytest.mark.parametrize("mbit", [40_000, 100_000])
def test_on_a_fast_link_coding_costs_more_than_bytes(mbit: float) -> None:
    measured = measurement(mbit, dense_codes=[AUTOCAST], backward_seconds=1e-4, shapes=LARGE, alpha=1e-5)
    stock, *others = price_options(measured, (), POLICIES)
    lossless = [way for way in others if way.is_lossless]
    assert lossless
    assert min(way.seconds for way in lossless) > stock.seconds
    assert not any(group.dense == LOSSLESS for group in best_plan(measured, (), POLICIES).groups)


def test_less_than_ten_percent_of_a_step_is_not_worth_it() -> None:
    """Plain float32 gains at most a sixth of the network's time, and here that is half of a step."""
    shapes, backward = [(1024, 1024)], 0.7
    measured = measurement(100, dense_codes=[PLAIN], shapes=shapes, backward_seconds=backward)
    stock, *others = price_options(measured, (), POLICIES)
    gain = step_seconds(measured, stock) / min(step_seconds(measured, way) for way in others if way.is_lossless)
    assert 1.03 < gain < 1.10
    plan = best_plan(measured, (), POLICIES)
    assert plan.does_nothing
    assert " no lossless sum by 10 %," in plan.explain()


def test_asked_for_it_is_planned_in_any_case_and_refused_in_any_case() -> None:
    fast = measurement(100_000, dense_codes=[AUTOCAST], backward_seconds=0.1)
    forced = best_plan(fast, ("bf16",), POLICIES, dense="lossless")
    assert {group.dense for group in forced.groups} == {LOSSLESS}
    slow = measurement(10, dense_codes=[AUTOCAST])
    assert {group.dense for group in best_plan(slow, (), POLICIES, dense="native").groups} == {NATIVE}
    with pytest.raises(ValueError, match="legal are auto, native and lossless"):
        best_plan(slow, (), POLICIES, dense="losless")
    with pytest.raises(ValueError, match="not measured what a lossless code achieves"):
        best_plan(measurement(10), (), POLICIES, dense="lossless")


def test_a_lossy_way_has_to_beat_the_lossless_one() -> None:
    measured = measurement(100, dense_codes=[AUTOCAST])
    by_name = {way.name: way for way in price_options(measured, ("bf16",), POLICIES)}
    assert any(name.startswith("bf16") for name in by_name)
    plan = best_plan(measured, ("bf16",), POLICIES)  # half of the bytes, but not 15 % faster than 29 bits of 64
    assert plan.choice.startswith(SHORT)
    assert best_plan(measurement(100), ("bf16",), POLICIES).choice.startswith("bf16")


def test_the_price_of_a_bucket_is_that_of_the_decision() -> None:
    """The planner's lines add up to the seconds by which `attach` decides, for a bucket of DDP."""
    measured = measurement(1000, dense_codes=[AUTOCAST], shapes=[(2560, 2560)], alpha=1e-7, world_size=4)
    machine = measured.link.machine
    assert machine is not None
    costs = measured.lossless_costs()
    decided = lossless_seconds(sum(measured.size_bytes), Ranks(4), machine, AUTOCAST.code)
    assert costs.seconds([0]) == pytest.approx(decided, rel=0.01)


def test_ranks_that_crowd_their_processors_code_slower() -> None:
    alone = price_options(measurement(10_000, dense_codes=[AUTOCAST]), (), POLICIES)
    crowded = price_options(measurement(10_000, dense_codes=[dense_code(cores=0.125)]), (), POLICIES)
    fastest = [min(way.seconds for way in found if way.is_lossless) for found in (alone, crowded)]
    assert fastest[1] > fastest[0]


# --- files


def test_a_measurement_with_codes_survives_its_file_and_older_ones_have_none(tmp_path: Path) -> None:
    measured = measurement(dense_codes=[AUTOCAST, replace(PLAIN, dtype=torch.float64)])
    measured.save(tmp_path / "measured.json")
    assert Measurement.load(tmp_path / "measured.json") == measured
    older = measured.to_json()
    del older["dense_codes"]
    assert Measurement.from_json(older).dense_codes == ()
    for name, wrong in (("push_bits", -1.0), ("cores", 0.0), ("encode_byte_seconds", math.inf)):
        damaged = measured.to_json()
        damaged["dense_codes"][0][name] = wrong
        with pytest.raises(ValueError, match="that cannot be"):
            Measurement.from_json(damaged)


def test_a_plan_says_how_it_sums_where_that_is_not_natively() -> None:
    plan = planned(100)
    assert Plan.from_json(plan.to_json()) == plan
    assert all(row["dense"] == LOSSLESS for row in plan.to_json()["groups"])
    assert "dense" not in Group(("a",), 4).to_json(), "so that earlier versions read it"
    with pytest.raises(ValueError, match="dense='fast'; legal are native, lossless"):
        Group(("a",), 4, dense="fast")


def diagnosed(mbit: float, code: DenseCode = AUTOCAST, **changes: Any) -> Diagnosis:
    with_plan, dense = changes.pop("with_plan", False), changes.pop("dense", "auto")
    measured = measurement(mbit, dense_codes=[code], **changes)
    return diagnose("a test", measured, ["bf16"], POLICIES, with_plan=with_plan, dense=dense)


# --- the doctor


def test_the_doctor_names_the_line_and_what_it_gains() -> None:
    found = diagnosed(100)
    assert found.advice.name == f"{SHORT}, buckets of DDP"
    text = describe(found)
    assert '    sync = thinwire.attach(model, dense="lossless")\n' in text
    assert re.search(
        r"\nLossless sums        pays, saves 55% of the bytes: [\d.]+ ms instead of [\d.]+ ms a step;"
        r" worth it below [\d.]+ Gbit/s\n",
        text,
    )
    assert "It is lossy" not in text
    data = json.loads(json.dumps(found.to_json()))
    option = data["lossless"]
    assert option["pays"] is True
    assert option["sent_bytes"] == pytest.approx(29 / 64 * option["native_bytes"], rel=1e-3)
    assert option["seconds"] < option["native_seconds"] / 1.5
    one, two = option["break_even_mbit"]
    assert two == pytest.approx(22 / 14 * one, rel=0.01), "decoding, on a core of its own"
    assert data["advice"]["lines"] == ["import thinwire", 'sync = thinwire.attach(model, dense="lossless")']


def test_with_tables_rows_and_lossless_sums_are_one_line() -> None:
    found = diagnosed(100, world_size=4, tables=[table(world_size=4)])
    assert found.advice.name == f"{SHORT}, buckets of DDP"
    assert 'thinwire.attach(model, dense="lossless")' in describe(found)
    assert found.plan.speedup > 3, "the table travels as rows"


def test_the_truth_where_it_does_not_pay() -> None:
    nothing = diagnosed(100, dense_code(30.0, 30.5))
    text = describe(nothing)
    assert "\nLossless sums        nothing to gain, saves 5% of the bytes: " in text
    assert " a step; worth it below " in text
    assert 'dense="lossless"' not in text
    assert nothing.to_json()["lossless"]["pays"] is False
    assert "worth it on no link" in describe(diagnosed(100, dense_code(32.0, 32.0)))
    fast = diagnosed(60_000, backward_seconds=0.1)
    assert fast.plan.does_nothing
    assert " no lossless sum by 10 %, and no lossy one" in describe(fast)
    assert "nothing to gain, saves 55% of the bytes: " in describe(fast)
    assert "Lossless sums" not in describe(diagnose("", measurement(100), (), POLICIES))


def test_it_is_tried_where_it_may_pay_or_if_asked() -> None:
    def tried(found: Diagnosis) -> list[str]:
        return [way.name for way in finalists(found) if way.is_lossless]

    assert tried(diagnosed(100)) == [f"{SHORT}, buckets of DDP"]
    assert tried(diagnosed(60_000, backward_seconds=0.1)) == []
    assert tried(diagnosed(60_000, backward_seconds=0.1, dense="lossless")) == [f"{SHORT}, buckets of DDP"]
    assert tried(diagnosed(100, dense="native")) == []
    assert "Lossless sums" not in describe(diagnosed(100, dense="native"))


def test_measured_steps_decide() -> None:
    found = diagnosed(100)
    for factor, wins in ((1.0, True), (0.8, True), (4.0, False)):
        rows = [
            Confirmed(
                way.name,
                predicted := step_seconds(found.measurement, way),
                predicted * (factor if way.is_lossless else 1.0),
            )
            for way in finalists(found)
        ]
        assert confirm(found, rows).advice.name.startswith(SHORT) == wins
    slow = [Confirmed(way.name, 1.0, 0.95 if way.is_lossless else 1.0) for way in finalists(found) if way.is_exact]
    assert confirm(found, slow).plan.does_nothing, "5 % are not worth it"


def test_it_has_a_curve_of_its_own_and_stops_paying_somewhere() -> None:
    found = diagnosed(100, alpha=1e-5, with_plan=True)
    curves = {curve.name: curve.step_seconds for curve in found.curves}
    assert SHORT in curves
    assert curves[SHORT][0] < curves["exact, fused"][0] < curves[STOCK][0] * 1.001
    assert list(curves[SHORT]) == sorted(curves[SHORT], reverse=True)
    assert found.stops_mbit is not None


def test_the_commands_say_it_and_take_dense(tmp_path: Path) -> None:
    path, plan, figures = tmp_path / "measured.json", tmp_path / "plan.json", tmp_path / "out.json"
    measurement(100, dense_codes=[AUTOCAST]).save(path)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--from", str(path), "--compress", "none"])
        assert result.exit_code == 0, result.output
        return result.output

    said = run("plan", "--output", str(plan), "--json", str(figures))
    assert "Lossless sums: pays, saves 55% of the bytes: " in " ".join(said.split())
    assert {group.dense for group in Plan.load(plan).groups} == {LOSSLESS}
    assert json.loads(figures.read_text())["lossless"]["pays"] is True
    run("plan", "--output", str(plan), "--dense", "native")
    assert {group.dense for group in Plan.load(plan).groups} == {NATIVE}
    assert 'dense="lossless"' in run("doctor")
    assert "dense=" not in run("doctor", "--dense", "native")
    for command in ("plan", "doctor"):
        wrong = CliRunner().invoke(app, [command, "--from", str(path), "--dense", "losless"])
        assert wrong.exit_code == 2
        assert "'losless' is none of auto, native, lossless" in " ".join(wrong.output.replace("│", " ").split())
