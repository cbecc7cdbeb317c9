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
from torch import nn
from typer.testing import CliRunner

from loopback import run_ranks
from measured import dense_code, measurement, table
from thinwire import fuse
from thinwire.comm.machine import Machine
from thinwire.compress.base import Parameter
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.cli.main import app
from thinwire.lab.doctor.advice import advice_of, lines_of
from thinwire.lab.doctor.diagnosis import Confirmed, Diagnosis, confirm, describe, diagnose, finalists
from thinwire.lab.doctor.lossless import break_even_mbit, lossless_option
from thinwire.lab.planning.codecs import SAMPLED_VALUES, SAMPLES, GradientSample, mean_bits, measure_codes, pieces_of
from thinwire.lab.planning.measurement import DdpSite, Measurement
from thinwire.lab.planning.planner import SHORT, best_plan, price_options, step_seconds
from thinwire.lab.planning.ready import WARM_STEPS, StepWatch
from thinwire.lab.planning.speeds import DenseCode
from thinwire.plan.plan import LOSSLESS, NATIVE, STOCK, Group, Plan
from thinwire.plan.policy import Policy
from thinwire.tune.lossless import Code, Ranks, lossless_seconds, native_seconds
from threaded import LoopbackLane

POLICIES: tuple[Policy, ...] = (fuse.cupcake(), fuse.one_bucket())
AUTOCAST, PLAIN = dense_code(), dense_code(27.2, 27.6)
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


def test_gradients_without_a_code_stay_native_in_the_price() -> None:
    measured = measurement(100, dense_codes=[AUTOCAST])
    mixed = replace(
        measured,
        parameters=tuple(
            Parameter(entry.name, entry.shape, torch.bfloat16 if place % 2 else torch.float32)
            for place, entry in enumerate(measured.parameters)
        ),
    )
    native, coded = mixed.costs(), mixed.lossless_costs()
    for place, entry in enumerate(mixed.parameters):
        assert (coded.wire_seconds[place] == native.wire_seconds[place]) == (entry.dtype == torch.bfloat16)
    option = lossless_option(mixed)
    assert option is not None
    sizes = {True: 0, False: 0}
    for entry in mixed.parameters:
        sizes[entry.dtype == torch.bfloat16] += entry.numel * entry.dtype.itemsize
    assert option.sent_bytes == pytest.approx(7 / 8 * (2 * sizes[True] + sizes[False] * 29 / 32))
    assert lossless_option(replace(mixed, dense_codes=())) is None


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


# --- the doctor


def diagnosed(mbit: float, code: DenseCode = AUTOCAST, **changes: Any) -> Diagnosis:
    with_plan, dense = changes.pop("with_plan", False), changes.pop("dense", "auto")
    measured = measurement(mbit, dense_codes=[code], **changes)
    return diagnose("a test", measured, ["bf16"], POLICIES, with_plan=with_plan, dense=dense)


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


def test_the_line_is_in_the_form_of_the_script() -> None:
    site = DdpSite((measurement().names,), "train.py", 7, "ddp", "DDP(net)", follows_plans=True)
    measured = replace(measurement(100, dense_codes=[AUTOCAST]), ddp=site)
    found = diagnose("", measured, (), POLICIES, with_plan=False)
    assert lines_of(found.advice, site)[-1] == 'sync = thinwire.attach(ddp, dense="lossless")'
    assert "after line 7 of train.py" in describe(found)


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


def test_break_even_is_where_both_take_equally_long() -> None:
    code = AUTOCAST.code
    for cores in (1, 2):
        mbit = break_even_mbit(1e8, Ranks(8), code, cores)
        link = Machine(0.0, 0.0, 8e-6 / mbit, 8e-6 / mbit, *[0.0] * 7)
        ranks = Ranks(8, 1, cores)
        assert lossless_seconds(1e8, ranks, link, code) == pytest.approx(native_seconds(1e8, 8, link), rel=1e-6)
    # ranks of a host push through one link what a ring sends over it once
    assert break_even_mbit(1e8, Ranks(8, 4), code) < break_even_mbit(1e8, Ranks(8), code)
    assert break_even_mbit(1e8, Ranks(8), replace(code, push_bits=32.0, pull_bits=32.0)) == 0.0
    assert break_even_mbit(1e8, Ranks(8), Code(16.0, 16.0, 0.0, 0.0, 0.0, 0.0)) == pytest.approx(1e7)


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


# --- what is measured


def model(*sizes: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"p{place}": torch.zeros(size, dtype=dtype) for place, size in enumerate(sizes)}


def test_a_small_model_is_sampled_whole_in_the_order_of_backward() -> None:
    trained = model(3, 0, 5)
    sample = GradientSample(trained)
    for name, tensor in trained.items():
        sample.take(name, torch.full_like(tensor, float(name[1:])))
    assert sample.values[torch.float32].tolist() == [2.0] * 5 + [0.0] * 3
    assert sample.taken == 2, "nothing is taken of an empty one"


def test_of_a_large_model_runs_are_taken_at_equal_distances() -> None:
    chunk = SAMPLED_VALUES
    trained = model(300 * chunk + 17, 5, chunk // 2, 3 * chunk)
    sample = GradientSample(trained)
    offset, flat = 0, torch.arange(sum(tensor.numel() for tensor in trained.values()), dtype=torch.float32)
    for name in reversed(trained):
        size = trained[name].numel()
        sample.take(name, flat[offset : offset + size])
        offset += size
    values = sample.values[torch.float32]
    assert values.numel() == SAMPLES * chunk
    starts = values[::chunk]
    assert starts[0] == 0
    assert values[-1] == flat[-1]
    assert (starts.diff() - starts.diff().mean()).abs().max() <= 1
    for start, part in zip(starts.tolist(), values.split(chunk), strict=True):
        assert torch.equal(part, flat[int(start) : int(start) + chunk])


def test_what_has_no_dense_gradient_of_the_dtype_is_left_out() -> None:
    trained = {
        **model(4, 4),
        "half": torch.zeros(6, dtype=torch.float16),
        "whole": torch.zeros(2, dtype=torch.complex64),
    }
    sample = GradientSample(trained, left_out={"p0"})
    sample.take("p0", torch.ones(4))
    sample.take("half", torch.ones(6))  # in float32: not what would be sent
    sample.take("whole", torch.ones(2, dtype=torch.complex64))
    sample.take("p1", None)
    sample.take("p1", torch.ones(4).to_sparse())
    assert sample.taken == 0
    assert {dtype: values.numel() for dtype, values in sample.values.items() if values.numel()} == {
        torch.float16: 6,
        torch.float32: 4,
    }


def test_gradients_are_sampled_while_steps_warm_up() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    watch = StepWatch(module, dict(module.named_parameters()), lambda: None)
    seen = []
    for step in range(WARM_STEPS + 2):
        module.zero_grad()
        module(torch.full((1, 4), float(step + 1))).sum().backward()
        seen.append(
            torch.cat([entry.grad.flatten() for entry in reversed(list(module.parameters())) if entry.grad is not None])
        )
    watch.close()
    assert torch.equal(watch.sample.values[torch.float32], seen[WARM_STEPS - 1])
    assert watch.sample.taken == 4 * WARM_STEPS


def test_gradients_that_are_synchronized_late_are_sampled_when_they_are() -> None:
    """As under DDP with accumulation, where `take` is called in the last of so many passes alone."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    named = dict(module.named_parameters())
    watch = StepWatch(module, named, lambda: None, samples=False)
    seen = torch.empty(0)
    for step in range(2 * WARM_STEPS + 2):
        module(torch.full((1, 4), float(step + 1))).sum().backward()
        if step in (WARM_STEPS, 2 * WARM_STEPS):
            grads = {name: entry.grad.clone() for name, entry in named.items() if entry.grad is not None}
            for name, gradient in grads.items():
                watch.take(name, gradient)
            if step == WARM_STEPS:
                seen = torch.cat([gradient.flatten() for gradient in reversed(grads.values())])
    watch.close()
    assert torch.equal(watch.sample.values[torch.float32], seen), "whole, and once"


def gradients(job: str, ranks: int, steps: int = 2) -> list[dict[str, torch.Tensor]]:
    """The gradients of each rank in a step of a job, by name."""
    found: list[dict[str, torch.Tensor]] = []
    target = get_job(job)
    data = target.load()
    for rank in range(ranks):
        training = replace(target.training(data, rank, ranks, seed=0), after_backward=None)  # which may clip them
        step = training.stepper()
        for _ in range(steps):
            step()
        named = training.model.named_parameters()
        found.append({name: entry.grad.clone() for name, entry in named if entry.grad is not None})
    return found


def sent_bits(ranks: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """The bits of a value in both halves of a sum of all gradients as one bucket, all of them coded."""
    flat = [torch.cat([gradient.flatten() for gradient in reversed(own.values())]) for own in ranks]
    share = -(-flat[0].numel() // len(flat))
    pushed = [mean_bits(own.split(share)) for own in flat]
    return sum(pushed) / len(pushed), mean_bits(sum(flat).split(share))  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        "lstm:autocast=bfloat16",
        "gpt:autocast=bfloat16",
        "gpt",
        pytest.param("digits:autocast=bfloat16", marks=pytest.mark.slow),
        pytest.param("bert:autocast=bfloat16", marks=pytest.mark.slow),
    ],
)
def test_bytes_are_predicted_within_two_percent_on_gradients_of_jobs(job: str) -> None:
    world_size = 2
    recorded = gradients(job, world_size)

    def run(exchange: Any) -> tuple[DenseCode, ...]:
        own = recorded[exchange.rank]
        sample = GradientSample(own)
        for name, gradient in own.items():
            sample.take(name, gradient)
        return measure_codes(LoopbackLane(exchange), sample)  # type: ignore[arg-type]

    (first,), (second,) = (outcome.get() for outcome in run_ranks(world_size, run))
    assert first == second, "all ranks know the same"
    push, pull = sent_bits(recorded)
    values = sum(gradient.numel() for gradient in recorded[0].values())
    sent = (world_size - 1) / world_size * values * (push + pull) / 8
    assert first.code.sent_bytes(4 * values, world_size) == pytest.approx(sent, rel=0.02)
    assert first.code.push_bits == pytest.approx(push, rel=0.02)
    assert 0.0 < first.cores <= 2.1


def test_ranks_of_which_one_took_no_gradient_measure_nothing() -> None:
    def run(exchange: Any) -> tuple[DenseCode, ...]:
        sample = GradientSample(model(100))
        if exchange.rank == 0:
            sample.take("p0", torch.randn(100))
        return measure_codes(LoopbackLane(exchange), sample)  # type: ignore[arg-type]

    assert [outcome.get() for outcome in run_ranks(2, run)] == [(), ()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_has_bits_of_its_own(dtype: torch.dtype) -> None:
    def run(exchange: Any) -> tuple[DenseCode, ...]:
        sample = GradientSample(model(1000, 3, dtype=dtype))
        sample.take("p1", torch.full((3,), math.nan, dtype=dtype))
        sample.take("p0", torch.randn(1000).to(dtype))
        return measure_codes(LoopbackLane(exchange), sample)  # type: ignore[arg-type]

    for outcome in run_ranks(3, run):
        (found,) = outcome.get()
        assert found.dtype == dtype
        assert found.code.value_bits == 8 * dtype.itemsize
        assert 0 < found.code.push_bits <= 8 * dtype.itemsize
        assert 0 < found.code.pull_bits <= 8 * dtype.itemsize


def test_pieces_are_those_of_ranks_or_runs() -> None:
    assert [piece.numel() for piece in pieces_of(torch.zeros(10), 4)] == [3, 3, 3, 1]
    assert [piece.numel() for piece in pieces_of(torch.zeros(0), 4)] == [0]
    assert {piece.numel() for piece in pieces_of(torch.zeros(8 * SAMPLED_VALUES), 2)} == {SAMPLED_VALUES}


def test_the_advice_of_a_way_with_a_plan_follows_the_plan() -> None:
    measured = measurement(100, dense_codes=[AUTOCAST])
    found = price_options(measured, (), POLICIES)
    for way in found:
        if way.is_lossless and not way.is_plain:
            advice = advice_of(way, measured, found)
            assert advice.plan is not None
            assert {group.dense for group in advice.plan.groups} == {LOSSLESS}
