"""The jobs, curves, rows and words of `thinwire bench train`, and a whole run without a link."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import thinwire
from thinwire import compress, outer
from thinwire.compress.named import NAMES as COMPRESSORS
from thinwire.compress.named import split
from thinwire.lab.bench.jobs.images import DigitsJob
from thinwire.lab.bench.jobs.job import Data, Job, Samples
from thinwire.lab.bench.jobs.named import JOBS, get_job
from thinwire.lab.bench.jobs.own import JobError, same_random_numbers_after
from thinwire.lab.bench.train.account import Account, covered_seconds
from thinwire.lab.bench.train.benchmark import TrainBenchmark
from thinwire.lab.bench.train.curve import LossCurve, evaluation_steps, reached_at, smoothed, window_of
from thinwire.lab.bench.train.methods import (
    OUTER_METHODS,
    SETTINGS,
    TORCH_METHODS,
    method_of,
    method_of_plan,
    parse,
)
from thinwire.lab.bench.train.outer import Outer, codec_of
from thinwire.lab.bench.train.planned import Planning
from thinwire.lab.bench.train.rank import JobTraining, RankRecord, StepRecord, set_up_optimizer
from thinwire.lab.bench.train.report import build_report
from thinwire.lab.bench.train.rows import against_dense, curve_of, row_of
from thinwire.lab.bench.train.summary import summarize, verdict
from thinwire.lab.cli.main import app
from thinwire.plan.plan import STOCK, Group, Plan
from thinwire.sums.named import NAMED

FUSED = "top_k:fuse=layerwise"
CONTRACT = {
    "job", "method", "hosts", "link_mbit", "seed", "step_seconds_median", "step_seconds_p10", "step_seconds_p90",
    "backward_seconds", "encode_seconds", "wire_seconds", "decode_seconds", "exposed_seconds", "bytes_sent_max",
    "bytes_source", "final_loss", "seconds_to_dense_loss", "loss_curve", "seconds_curve", "curve_steps", "density",
    "parameters",
}  # fmt: skip


@pytest.fixture(params=JOBS.values(), ids=JOBS)
def job(request: pytest.FixtureRequest) -> Job:
    return request.param


@pytest.mark.few(4)
def test_a_model_follows_from_its_seed_alone(job: Job) -> None:
    models = [job.model(seed) for seed in (3, 3, 4)]
    first, same, other = (torch.cat([parameter.flatten() for parameter in model.parameters()]) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert 4e6 < 4 * first.numel() < 24e6, "gradients that a link of 100 Mbit/s feels"
    state = torch.random.get_rng_state()
    job.model(5)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_ranks_share_each_batch_of_one_rank(job: Job) -> None:
    """The batches of 4 ranks together are one of a job that has four times the batch: no sample twice in an epoch."""
    number = max(500, 10 * job.batch_size)
    data = Data(Samples(torch.arange(number), torch.arange(number)), Samples(torch.arange(4), torch.arange(4)))
    ranks = [list(islice(job.batches(data, rank, 4, seed=1), 16)) for rank in range(4)]
    again = list(islice(job.batches(data, 2, 4, seed=1), 16))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(ranks[2], again, strict=True))
    per_epoch = number // (4 * job.batch_size)
    epoch = torch.cat([batch.inputs for batches in ranks for batch in batches[:per_epoch]])
    assert epoch.unique().numel() == epoch.numel() == per_epoch * 4 * job.batch_size
    with pytest.raises(ValueError, match="too few"):
        next(job.batches(data, 0, 1000, seed=0))


def test_the_learning_rate_rises_falls_and_stays() -> None:
    job = get_job("lstm")
    shares = [job.learning_rate_share(step, 300) for step in range(400)]
    assert shares[0] == pytest.approx(1 / job.warm_up_steps)
    assert max(shares) <= 1.0
    assert shares.index(max(shares)) in range(job.warm_up_steps - 1, job.warm_up_steps + 1)
    assert shares[300:] == [pytest.approx(0.05)] * 100


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]' in a checkout"):
        DigitsJob().load()


@pytest.mark.slow
def test_the_digits_are_split() -> None:
    pytest.importorskip("sklearn")
    data = DigitsJob().load()
    assert (len(data.train), len(data.held_out)) == (1437, 360)
    assert data.train.inputs.aminmax() == (0.0, 1.0)
    assert data.held_out.targets.bincount().min() > 20


def test_smoothing_is_as_wide_as_the_end_of_a_run() -> None:
    assert smoothed([3.0, 1.0, 2.0], 2) == [3.0, 2.0, 1.5]
    assert evaluation_steps(300)[-3:] == (280, 290, 300)
    assert window_of(300) == 3
    assert evaluation_steps(4) == (1, 2, 3, 4)
    assert window_of(1) == 1


def test_time_to_a_loss() -> None:
    curve = LossCurve((1, 2, 3, 4), (10.0, 20.0, 30.0, 40.0), (4.0, 3.0, 1.0, 0.5), planned_steps=3)
    assert curve.final_loss == 1.0, "the fourth step is extra"
    assert curve.seconds_to(4.5) == 10.0
    assert curve.seconds_to(2.0) == 25.0
    assert curve.seconds_to(curve.final_loss) == 30.0
    assert curve.seconds_to(0.4) is None
    assert LossCurve((1, 2), (1.0, 2.0), (math.nan, 1.0), 2).seconds_to(1.0) == 2.0


def test_the_dense_run_reaches_its_own_final_loss_at_its_end() -> None:
    losses = tuple(5.0 - 0.1 * i for i in range(30))
    curve = LossCurve(evaluation_steps(300), tuple(range(30)), losses, 300)
    assert curve.seconds_to(curve.final_loss) == 29


@pytest.mark.parametrize(("above", "reached"), [(5e-6, True), (0.0009, True), (0.0011, False)])
def test_a_loss_within_a_thousandth_of_that_of_ddp_counts_as_reached(above: float, reached: bool) -> None:
    """Another seed makes a larger difference: 5e-6 above is not "never"."""
    curve = LossCurve((1, 2, 3), (1.0, 2.0, 3.0), (4.0, 3.0, 2.0 * (1 + above)), planned_steps=3)
    row = against_dense({"final_loss": curve.final_loss}, curve, dense_loss=2.0)
    assert (row["seconds_to_dense_loss"] is not None) is reached
    assert reached_at(-2.0) > -2.0, "also a loss that is a negative number"


def test_the_first_step_is_told_apart() -> None:
    """It counts as a median step in the clock of the curve, and has a field of its own."""
    seconds = [9.0, 1.0, 3.0]
    records = [
        RankRecord(
            parameters=1000,
            steps=[StepRecord(each - late, late, 0.0, 0.1, None, 0.2, 4000.0 + rank) for each in seconds],
            held_out_losses=[(1, 3.0), (2, 2.0), (3, 1.0)],
        )
        for rank, late in enumerate((0.25, 0.75))
    ]
    training = JobTraining(get_job("lstm"), "top_k", seed=0, steps=3)
    assert curve_of(training, records).seconds == (3.0, 4.0, 7.0)
    made = row_of(training, records, link_mbit=None)
    assert (made["first_step_seconds"], made["step_seconds_median"]) == (9.0, 3.0)
    assert (made["exposed_seconds"], made["encode_seconds"], made["wire_seconds"]) == (0.5, 0.1, None)
    assert (made["bytes_sent_max"], made["bytes_source"], made["bytes_link_max"]) == (4001, "counted", None)


def test_a_step_of_an_outer_loop_is_a_mean_over_rounds() -> None:
    """Of 32 steps 31 have no round: a median would be a step that sends nothing."""
    waits = [2.0, 0.0, 0.0, 0.0, 0.4]
    steps = [StepRecord(1.0, wait, 0.5, 0.0, wait, 0.0, 1000.0 * (wait > 0)) for wait in waits]
    training = JobTraining(get_job("lstm"), "diloco", seed=0, steps=5)
    loop = RankRecord(parameters=1000, steps=steps, held_out_losses=[(5, 1.0)], account=Account(rounds=2.0))
    made, plain = row_of(training, [loop], None), row_of(training, [replace(loop, account=Account())], None)
    assert (made["rounds"], made["exposed_seconds"], made["step_seconds"]) == (2.0, pytest.approx(0.1), 1.6)
    assert (plain["rounds"], plain["exposed_seconds"], plain["step_seconds"]) == (None, 0.0, 1.5)
    assert made["bytes_sent_max"] == plain["bytes_sent_max"] == 400


def test_intervals_in_flight_together_count_once() -> None:
    assert covered_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0


def test_settings_are_read_from_the_name_of_a_method() -> None:
    assert parse("top_k:density=0.001:values=x") == ("top_k", {"density": 0.001, "values": "x"})
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse("top_k:0.001")


def test_what_follows_codec_is_the_compressor_of_the_differences() -> None:
    text = "diloco:every=16:lr=0.5:codec=top_k:density=0.0156:values=qsgd(bits=2;bucket=64):decay=0.95"
    name, settings = parse(text)
    assert (name, settings["every"], settings["lr"]) == ("diloco", 16, 0.5)
    made, arguments = split(settings["codec"])
    code = codec_of(made, arguments)
    expected = compress.error_feedback(compress.top_k(0.0156, values=compress.qsgd(2, 64)), decay=0.95)
    assert code == expected
    assert codec_of("qsgd", {"bits": 4}) == compress.qsgd(4)
    assert codec_of("ef_sign_sgd", {"decay": 0.9}) == compress.ef_sign_sgd(0.9), "which has a decay itself"
    assert method_of(text, get_job("gpt"), steps=100, world_size=2).is_plain


def test_outer_loops_have_the_settings_of_their_recipes() -> None:
    streaming = Outer.of("streaming_diloco", {"every": 16, "inner_lr": 2})
    assert streaming == Outer(outer.diloco(every=16, fragments=4, delay=4, mix=0.5), 2.0)
    assert Outer.of("local_sgd", {}).recipe == outer.local_sgd()
    assert Outer.of("shadow_sync", {"algorithm": "bmuf"}).recipe == outer.shadow_sync("bmuf")
    assert not method_of("diloco:codec=top_k", get_job("gpt"), 100, 2).compresses("words.weight", torch.empty(64, 64))


@pytest.mark.parametrize("name", [*TORCH_METHODS, *SETTINGS, *NAMED, *OUTER_METHODS])
def test_every_setting_fits_its_constructor(name: str) -> None:
    method_of(name, get_job("lstm"), steps=100, world_size=2)


def test_names_that_are_left_out_stay_exact() -> None:
    matrix = torch.empty(64, 64)
    method = method_of("top_k:leave=words*", get_job("gpt"), steps=100, world_size=2)
    assert not method.compresses("words.weight", matrix)
    assert method.compresses("blocks.0.attention_in.weight", matrix)


def test_dgc_without_momentum_takes_any_optimizer() -> None:
    """Under AdamW the momentum of DGC would be a second one; the job has none, so DGC has none."""
    layer = nn.Linear(64, 32)
    method = method_of("dgc", get_job("gpt"), 100, 2)
    adam = set_up_optimizer(torch.optim.AdamW(layer.parameters(), lr=0.1), method, layer, "dgc")
    assert [group["lr"] for group in adam.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top_k:warm_up=0.1:density=0", "density"),
        ("zip", "legal are ddp, bf16"),
        ("top_k:densty=1", "densty"),
        ("ddp:rank=4", "no setting 'rank'"),
        ("ddp:fuse=cupcake", "no setting 'fuse'"),
        ("thinwire:fuse=cupcakes", "cupcakes"),
        ("plan:policy=cupcake", "plan has no setting 'policy'"),
        ("plan:file=/nowhere/plan.json", "cannot read the plan /nowhere/plan.json"),
        ("plan:/nowhere/plan.json", "cannot read the plan /nowhere/plan.json"),
        ("plan:compressors=sidco", "sidco"),
        ("diloco:density=0.01", "unexpected keyword argument 'density'.* behind codec=, as in diloco:every=32:codec="),
        ("diloco:every=0", "every is 0: pass"),
        ("diloco:inner_lr=0", "inner_lr of diloco is a factor above 0 for the learning rate of the job"),
        ("diloco:longer=x", "longer of diloco is a factor above 0 for the number of steps"),
        ("plan:fallback=false", "fallback of plan is 'false': pass True or False"),
        ("lossles", "Did you mean 'lossless'"),
        ("zen:rows=auto", "zen has no setting 'rows'"),
        ("zen:dense=losless", "unknown dense 'losless'; legal are native, lossless, auto. Did you mean 'lossless'"),
        ("diloco:codec=zip", "unknown compressor 'zip'; legal are acp_sgd, "),
        ("diloco:codec=dgc", "codec=dgc has momentum, and so has the outer optimizer"),
        ("diloco:codec=momentum_correction:inner=top_k", "has momentum, and so has the outer optimizer"),
        ("diloco:codec=top_k:densty=1", "densty"),
        ("diloco:codec=top_k:values=qsgd(2)", "a setting is NAME=VALUE"),
        ("diloco:codec=top_k:decay=x", "decay of codec=top_k is a number"),
        ("diloco:codec=top_k:warm_up=0.1", "codec=top_k has no warm_up: there are rounds"),
        ("shadow_sync:algorithm=adam", "adam"),
        ("shadow_sync:every=32", "'every'"),
        ("ddp:codec=top_k", "ddp has no codec=, which outer loops have: local_sgd, diloco"),
    ],
)
def test_unknown_methods_and_settings(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        method_of(text, get_job("lstm"), steps=100, world_size=2)


@pytest.mark.parametrize(
    "text",
    [
        "error_feedback:inner=top_k(density=0.01;values=qsgd(bits=4)):decay=0.9",
        "warm_up:inner=top_k:steps=5",
        "ef21:inner=power_sgd(rank=0.1)",
        "threshold:value=0.1",
        "double_exponential",
        "Identity",
    ],
)
def test_every_text_of_a_compressor_is_a_method(text: str) -> None:
    """Plan files and ``--compress`` have the same texts."""
    method = method_of(text, get_job("gpt"), steps=100, world_size=2)
    assert method.compresses("fc.weight", torch.empty(64, 64))
    assert method.optimizer_momentum == (not text.startswith("ef21")), "which has the momentum"
    if method.optimizer_momentum:
        assert method_of(f"diloco:codec={text}", get_job("gpt"), steps=100, world_size=2).is_plain


def test_every_scheme_is_a_method_and_says_how_other_gradients_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(thinwire, "attach", lambda *arguments: given.append(arguments))
    for text in ("zen", "two_level:zen", "zen:dense=lossless", "thinwire:dense=native", "lossless"):
        method_of(text, get_job("lstm"), steps=100, world_size=2).attach(None, None)  # type: ignore[arg-type]
    assert [arguments[1:] for arguments in given] == [
        ("zen", "auto"), ("two_level:zen", "auto"), ("zen", "lossless"), ("auto", "native"), ("auto", "lossless")
    ]  # fmt: skip


def test_each_compressor_without_momentum_is_a_codec() -> None:
    codecs = [name for name in COMPRESSORS if name not in ("dgc", "sign_sgd")]
    assert "bf16" in codecs
    for name in codecs:
        text = f"diloco:codec={name}" + ":value=0.1" * (name == "threshold")
        assert method_of(text, get_job("gpt"), steps=100, world_size=2).is_plain


@pytest.mark.parametrize(
    ("text", "is_plain", "has_plan"),
    [
        ("thinwire", False, False),
        ("exact", False, False),
        ("thinwire:fuse=byte_cap(mb=4;first_mb=1)", True, False),
        ("top_k:density=0.01:fuse=layerwise", True, False),
        ("qsgd:fuse=safusion(adapt=False)", True, False),
        ("plan", False, True),
        ("plan:compressors=bf16+top_k(density=0.01):fallback=True", False, True),
    ],
)
def test_groups_need_a_plain_module_and_a_plan_decides(text: str, is_plain: bool, has_plan: bool) -> None:
    method = method_of(text, get_job("lstm"), steps=100, world_size=2)
    assert (method.is_plain, method.planning is not None) == (is_plain, has_plan)


def test_a_plan_to_do_nothing_is_stock_ddp() -> None:
    groups = (Group(("fc.weight",), 4096),)
    nothing, other = (Plan(2, "", groups, 1.0, 1.0, choice=choice) for choice in (STOCK, "exact, cupcake"))
    assert not method_of_plan(nothing, Planning()).is_plain
    assert method_of_plan(other, Planning()).is_plain


def test_a_plan_for_another_number_of_ranks_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(2, "", (Group(("fc.weight",), 4096),), 1.0, 1.0).save(path)
    method_of(f"plan:{path}", get_job("lstm"), steps=100, world_size=2)
    with pytest.raises(ValueError, match="for 2 ranks, and there are 4: give --hosts 2"):
        method_of(f"plan:{path}", get_job("lstm"), steps=100, world_size=4)


@pytest.mark.parametrize(
    ("name", "scale", "momentum"), [("top_k", 1.0, 0.9), ("dgc", 1.0, 0.0), ("sign_sgd", 0.002, 0.0)]
)
def test_what_a_method_compresses_has_its_optimizer_settings_and_tables_keep_theirs(
    name: str, scale: float, momentum: float
) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(100, 32, sparse=True), "layer": nn.Linear(64, 32)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    set_up_optimizer(optimizer, method_of(name, get_job("lstm"), 100, 2), model, name)
    compressed, rest = optimizer.param_groups
    assert compressed["params"] == [model["layer"].weight]
    assert (compressed["lr"], compressed["momentum"]) == (pytest.approx(0.5 * scale), momentum)
    assert (len(rest["params"]), rest["lr"], rest["momentum"]) == (2, 0.5, 0.9)


def test_a_method_with_momentum_needs_an_optimizer_that_can_leave_it_out() -> None:
    layer = nn.Linear(64, 32)
    with pytest.raises(JobError, match=r"dgc needs torch\.optim\.SGD, and the job has Adam"):
        set_up_optimizer(torch.optim.Adam(layer.parameters()), method_of("dgc", get_job("lstm"), 100, 2), layer, "dgc")


def test_judging_and_planning_leave_the_batches_of_the_training_as_they_are() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = drawn(), drawn()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    first = drawn()
    with same_random_numbers_after():
        drawn()
    assert (first, drawn()) == expected


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


def test_an_outer_loop_may_train_longer() -> None:
    benchmark = TrainBenchmark("digits", ("ddp", "diloco:longer=2.5"), hosts=2, seeds=1, steps=10, extra=0.5)
    assert (benchmark.steps_of("ddp"), benchmark.max_steps_of("ddp")) == (10, 15)
    assert (benchmark.steps_of("diloco:longer=2.5"), benchmark.max_steps_of("diloco:longer=2.5")) == (25, 37)


def test_a_median_over_seeds_counts_runs_that_never_got_there() -> None:
    rows = [row("ddp", 10.0, seed) for seed in range(3)]
    rows += [row("top_k", seconds, seed) for seed, seconds in enumerate((5.0, None, None))]
    rows += [row("dgc", seconds, seed) for seed, seconds in enumerate((5.0, 8.0, None))]
    by_method = {summary.method: summary for summary in summarize(rows)}
    assert by_method["top_k"].seconds_to_dense_loss is None
    assert by_method["dgc"].speedup == 10.0 / 8.0


@pytest.mark.slow
def test_a_run_without_a_link(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    rows_file, page = tmp_path / "out.json", tmp_path / "out.html"
    result = CliRunner().invoke(
        app,
        ["bench", "train", "--job", "digits", "--methods", f"{FUSED},top_k,ddp", "--hosts", "2", "--link", "none",
         "--seeds", "1", "--steps", "4", "--json", str(rows_file), "--report", str(page)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(rows_file.read_text())
    dense, behind, top_k = written["rows"]
    assert [each["method"] for each in written["rows"]] == ["ddp", FUSED, "top_k"], "stock DDP is first"
    assert (dense["groups"], dense["tensor_missing_rate"], top_k["tensor_missing_rate"]) == (None, None, 0.0)
    assert behind["groups"] > 1
    for each in written["rows"]:
        assert each.keys() >= CONTRACT
        assert each["bitwise_equal_across_ranks"]
        assert each["link_mbit"] is None
        parts = each["backward_seconds"] + each["exposed_seconds"] + each["optimizer_seconds"]
        assert parts == pytest.approx(each["step_seconds_median"], rel=0.5)
        assert len(each["loss_curve"]) == len(each["seconds_curve"]) == len(each["curve_steps"])
    assert dense["bytes_sent_max"] == 4 * dense["parameters"], "2 (n - 1) / n of the gradients, of two ranks"
    assert dense["bytes_source"] == "formula"
    assert (top_k["bytes_source"], top_k["density"] < 0.05) == ("counted", True)
    assert 0 < dense["seconds_to_dense_loss"] <= dense["seconds_curve"][-1]
    html = page.read_text()
    assert html.count("<figure") == 4
    assert verdict(written["rows"]).split(":")[0] in html
    again = build_report(written).html().partition("<footer")[0]
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"  # of writing the page
    assert re.sub(date, "", again) == re.sub(date, "", html.partition("<footer")[0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--job", "alexnet"], "legal are lstm, digits, gpt"),
        (["--job", "digits", "--scale", "1"], "digits has one size"),
        (["--job", "nowhere/train.py:make", "--scale", "1"], "has no scale"),
        (["--job", "gpt", "--scale", "2"], "at most 1"),
        (["--job", "gpt:depth=3"], "no setting 'depth'; legal are steps, batch_size"),
        (["--job", "gpt:length=long"], "length of the job gpt is int such as 24, not 'long'"),
        (["--job", "gpt:optimizer=lion"], "legal are sgd, adamw and adagrad"),
        (["--job", "dlrm:sparse=True:optimizer=adamw"], "AdamW takes no sparse gradients"),
        (["--job", "gpt:autocast=int8"], "autocast is bfloat16 or float16"),
        (["--job", "nowhere/train.py:make"], "no file nowhere/train.py"),
        (["--methods", "ddp,zip"], "legal are ddp"),
        (["--methods", "ddp,ddp"], "named twice"),
        (["--hosts", "0"], "at least one"),
        (["--extra", "-1"], "at least 0"),
        (["--link", "fast"], "100mbit"),
        (["--report", "/nowhere/page.html"], "not a directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "train", "--link", "none", *arguments], terminal_width=200)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output
