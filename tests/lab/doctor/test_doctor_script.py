"""`thinwire doctor SCRIPT` on real ranks: what it measures, tries and advises, and that the advice runs when pasted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compiled import own_cache
from thinwire.lab.analyze.failure import ScriptFailed
from thinwire.lab.analyze.steps import measure_script
from thinwire.lab.analyze.trials import run_on_ranks, try_script
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.cli.main import app
from thinwire.lab.doctor.advice import Advice, advice_of, lines_of, where_to_paste
from thinwire.lab.doctor.diagnosis import NOT_TRIED
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.outer import OuterOption
from thinwire.lab.planning.planner import ROWS, Option, price_options, usual_groups
from thinwire.lab.planning.training import How
from thinwire.lab.testbed.rank import RankContext
from thinwire.plan.plan import STOCK, Plan

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TOP_K = "top_k:density=0.01"

DENSE = """
    import argparse
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    ddp = DistributedDataParallel(network, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    for step in range(options.steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    print("the last words of the script")
    dist.destroy_process_group()
"""

TABLES = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn import parallel

    class Recommender(nn.Module):
        def __init__(self):
            super().__init__()
            self.users = nn.Embedding(4000, 16)
            self.items = nn.EmbeddingBag(6000, 16, sparse=True)
            self.top = nn.Linear(32, 1)

        def forward(self, users, items):
            return self.top(torch.cat([self.users(users), self.items(items)], 1))

    def main():
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        wrapped = parallel.DistributedDataParallel(Recommender())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(60):
            users = torch.randint(0, 200, (20,), generator=generator)
            items = torch.randint(0, 100, (20, 3), generator=generator)
            optimizer.zero_grad()
            wrapped(users, items).square().mean().backward()
            optimizer.step()

    if __name__ == "__main__":
        main()
"""

HELPER = """
    import thinwire, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def wrapped(module):
        return DistributedDataParallel(module)

    def average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise RuntimeError("the hook of the script")

    dist.init_process_group("gloo")
    trained = wrapped(nn.Sequential(
        nn.Linear(64, 300),
        nn.Linear(300, 10),
    ))
    sync = thinwire.attach(trained)
    other = DistributedDataParallel(
        nn.Linear(2, 2)
    )
    trained.register_comm_hook(None, average)
    for step in range(60):
        with sync.no_sync():
            trained(torch.randn(8, 64)).square().mean().backward()
        trained(torch.randn(8, 64)).square().mean().backward()
        print(sync.stats()["comm/steps"])
"""


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path))


def written(text: str, name: str = "train.py") -> Path:
    path = Path(name)
    path.write_text(textwrap.dedent(text))
    return path


def measured(text: str, arguments: Sequence[str] = (), compressors: Sequence[str] = ()) -> Measurement:
    return measure_script(written(text), arguments, 2, How(compressors, steps=2))


def pasted(script: Path, advice: Advice, measurement: Measurement) -> str:
    """Return the text of the script with the advised lines where the advice says."""
    site = measurement.ddp
    assert site is not None
    lines = script.read_text().splitlines()
    old = lines[site.line - 1 : site.last_line]
    indent = old[0][: len(old[0]) - len(old[0].lstrip())]
    new = [indent + line for line in lines_of(advice, site)]
    kept = [] if where_to_paste(advice, site).startswith("in place of") else old
    return "\n".join([*lines[: site.line - 1], *kept, *new, *lines[site.last_line :]]) + "\n"


def run_rank(context: RankContext, script: str, arguments: list[str]) -> None:
    run_as_main(script, arguments)


@pytest.mark.timeout(120)
def test_the_doctor_tries_what_it_recommends() -> None:
    written(DENSE)
    arguments = ["doctor", "--ranks", "2", "--compress", TOP_K, "--json", "out.json", "train.py", "--steps", "100"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(Path("out.json").read_text())
    tried = {row["name"]: row["measured_step_seconds"] for row in data["confirmed"]}
    assert STOCK in tried
    assert data["stock_step_seconds"] == pytest.approx(tried[STOCK])
    assert data["plan_step_seconds"] == pytest.approx(tried[data["advice"]["name"]])
    assert "Trained for a few steps" in result.output
    measurement = Measurement.from_json(data["measurement"])
    assert measurement.ddp is not None
    assert len(measurement.ddp.buckets) > 1, "the caps of the script are those of stock DDP"
    assert sum(len(names) for names in measurement.ddp.buckets) == 6
    predicted_only = CliRunner().invoke(app, [*arguments[:3], "--no-confirm", *arguments[3:]])
    assert predicted_only.exit_code == 0, predicted_only.output
    assert "Trained for a few steps" not in predicted_only.output


@pytest.mark.timeout(120)
def test_tables_of_a_script_are_measured_with_the_rows_that_its_ranks_touch() -> None:
    measurement = measured(TABLES)
    users, items = sorted(measurement.tables, key=lambda table: table.is_sparse)
    assert (users.name, users.num_rows, users.width, users.is_sparse) == ("users.weight", 4000, 16, False)
    assert (items.name, items.num_rows, items.width, items.is_sparse) == ("items.weight", 6000, 16, True)
    assert all(15 < rows <= 20 for rows in users.held), "20 lookups of 200 rows"
    assert max(users.held) < users.union <= sum(users.held)
    assert all(30 < rows <= 60 for rows in items.held)
    assert {parameter.name for parameter in measurement.parameters} == {"top.weight", "top.bias"}
    assert measurement.ddp is not None
    assert {name for names in measurement.ddp.buckets for name in names} == {
        "users.weight", "items.weight", "top.weight", "top.bias",
    }  # fmt: skip
    assert usual_groups(measurement) == ((0, 1),)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", ["rows", "compressor", "plan", "lossless", pytest.param("lossless plan", marks=pytest.mark.slow)]
)
def test_advice_runs_when_it_is_pasted(kind: str) -> None:
    if kind == "rows":
        measurement, arguments = measured(TABLES), []
        found = price_options(measurement, ())
        (way,) = [way for way in found if way.name == ROWS]
    elif kind.startswith("lossless"):
        measurement, arguments = measured(DENSE, ["--steps", "100"]), ["--steps", "4"]
        (code,) = measurement.dense_codes
        assert 0 < code.code.push_bits <= 32
        assert 0 < code.code.pull_bits <= 32
        found = price_options(measurement, ())
        way = next(way for way in found if way.is_lossless and way.is_plain == (kind == "lossless"))
    else:
        arguments = ["--steps", "4"]
        measurement = measured(DENSE, ["--steps", "100"], [TOP_K])
        found = price_options(measurement, [TOP_K])
        (way,) = (
            [way for way in found if not way.is_exact and way.is_plain] if kind == "compressor" else [layerwise(found)]
        )
    advice = advice_of(way, measurement, found)
    if advice.plan is not None:
        advice.plan.save("plan.json")
        assert Plan.load("plan.json").jobs == advice.plan.jobs
    text = pasted(Path("train.py"), advice, measurement)
    target = "wrapped" if kind == "rows" else "ddp"
    assert f"sync = thinwire.attach({target}" in text
    checked = text + ("" if kind == "rows" else 'assert sync.stats()["comm/steps"] == options.steps\n')
    if kind.startswith("lossless"):
        checked += 'assert sync.stats()["lossless/values"] >= options.steps * 90_000, sync.stats()\n'
    run_on_ranks(run_rank, str(written(checked, "advised.py")), arguments, world_size=2, network=None)


@pytest.mark.timeout(120)
def test_the_other_algorithm_runs_when_it_is_pasted() -> None:
    option = OuterOption(2, 1.0, 1.0, 1.0, 1.0)
    assert option.where.startswith("before the first step, with `model` the plain module on every rank")
    plain = textwrap.dedent(DENSE).replace(
        "ddp = DistributedDataParallel(network, bucket_cap_mb=0.1)", "model = network"
    )
    before, loop, after = plain.replace("ddp(", "model(").partition("for step")
    text = before + "\n".join(option.lines) + f"\n{loop}{after}"
    assert "thinwire.outer.attach(model, optimizer, thinwire.outer.diloco(every=2))" in text
    checked = text + 'assert (loop.stats()["outer/rounds"], loop.stats()["outer/inner_steps"]) == (2, options.steps)\n'
    run_on_ranks(run_rank, str(written(checked, "advised.py")), ["--steps", "4"], world_size=2, network=None)


def layerwise(found: Sequence[Option]) -> Option:
    return next(way for way in found if way.name == f"{TOP_K} by all_gather, layerwise")


@pytest.mark.timeout(120)
def test_where_a_helper_returns_the_model_the_line_of_its_caller_is_named() -> None:
    measurement = measured(HELPER)
    site = measurement.ddp
    assert site is not None
    assert (site.target, site.line, site.last_line, site.inner_line, site.others) == ("trained", 13, 16, 7, 1)
    advice = Advice("any")
    assert lines_of(advice, site) == ["import thinwire", "sync = thinwire.attach(trained)"]
    assert where_to_paste(advice, site).startswith("after line 16 of train.py, `trained = wrapped(nn.Sequential(")
    assert len(site.left_out) == 2
    assert site.left_out[0].startswith("line 17 of train.py, `sync = thinwire.attach(trained)`")
    assert site.left_out[1].startswith("line 21 of train.py, `trained.register_comm_hook(None, ")
    compile(text := pasted(Path("train.py"), advice, measurement), "train.py", "exec")
    assert text.splitlines()[16:18] == lines_of(advice, site)


@pytest.mark.timeout(120)
def test_the_synchronization_of_the_script_is_left_out_of_all_trials() -> None:
    measurement = measured(HELPER)
    found = price_options(measurement, ())
    stock, compressed = found[0], replace(found[0], name="compressed")
    advised = [(stock, Advice(stock.name, None)), (compressed, Advice("compressed", "bf16"))]
    rows = try_script(Path("train.py"), [], advised, measurement, None)
    assert [row.failure for row in rows] == ["", ""]


@pytest.mark.timeout(60)
def test_without_time_only_stock_ddp_and_the_best_exact_way_are_tried() -> None:
    measurement = measured(HELPER)
    stock = price_options(measurement, ())[0]
    advised = [
        (stock, Advice(stock.name, None)),
        (replace(stock, name="exact"), Advice("exact")),
        (replace(stock, name="lossy"), Advice("lossy", "bf16")),
        (replace(stock, name="shorter", seconds=0.0), Advice("shorter", "qsgd")),
    ]
    rows = try_script(Path("train.py"), [], advised, measurement, None, deadline=0.0)
    assert [row.failure.partition(":")[0] for row in rows] == ["", "", NOT_TRIED, NOT_TRIED]
    assert "were left of 150 s" in rows[-1].failure


ACCUMULATED = """
    import contextlib, time, torch, torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(60):
        for micro_batch in range(4):
            with contextlib.nullcontext() if micro_batch == 3 else model.no_sync():
                model(torch.randn(8, 64)).square().mean().backward()
                time.sleep(0.01)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.timeout(120)
def test_a_step_of_accumulated_batches_is_one_step_measured_and_tried() -> None:
    measurement = measured(ACCUMULATED)
    assert (measurement.passes, measurement.synchronizations, measurement.optimizer) == (4, 1, "AdamW")
    assert measurement.rest_seconds > 0.04
    stock = price_options(measurement, ())[0]
    (row,) = try_script(Path("train.py"), [], [(stock, Advice(STOCK, None))], measurement, None)
    assert row.measured_step_seconds is not None
    assert row.measured_step_seconds > 0.04


@pytest.mark.timeout(240)
def test_a_script_that_skips_steps_by_hand_on_one_rank_is_measured_and_tried() -> None:
    """A loss or a norm that is not finite there, without a GradScaler; ranks send buffers before each forward."""
    skipping = """
    import torch, torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 10))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(90):
        model(torch.randn(8, 64)).square().mean().backward()
        if dist.get_rank() != 0:
            optimizer.step()
        optimizer.zero_grad()
    """
    measurement = measured(skipping)
    assert (measurement.passes, measurement.synchronizations) == (1, 1)
    assert measurement.optimizer == "SGD", "of all ranks"
    stock = price_options(measurement, ())[0]
    (row,) = try_script(Path("train.py"), [], [(stock, Advice(STOCK, None))], measurement, None)
    assert row.measured_step_seconds, row.failure


@pytest.mark.timeout(120)
def test_a_way_that_fails_is_reported_and_the_others_are_tried() -> None:
    measurement = measured(DENSE, ["--steps", "100"])
    stock, *_ = found = price_options(measurement, ())
    impossible = replace(stock, name="impossible", is_plain=False)
    advised = [
        (stock, advice_of(stock, measurement, found)),
        (impossible, Advice("impossible", "atomo:rank=0")),
    ]
    rows = try_script(Path("train.py"), ["--steps", "100"], advised, measurement, None)
    assert rows[0].measured_step_seconds is not None
    assert rows[0].measured_step_seconds > 0
    assert rows[1].measured_step_seconds is None
    assert rows[1].failure.startswith("failed: ValueError")


SAVES = """
    import torch, torch.distributed as dist
    from pathlib import Path
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def fail(gradient):
        if step == 1 and model._comm_hooks and dist.get_rank() == 0:
            raise RuntimeError("a way fails")

    dist.init_process_group("gloo")
    network = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))
    try:
        model = DistributedDataParallel(network)
        network[0].weight.register_hook(fail)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        for step in range(100):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
    except BaseException:
        Path(f"except-{dist.get_rank()}").touch()
        raise
    finally:
        Path(f"finally-{dist.get_rank()}").touch()
"""


@pytest.mark.timeout(120)
def test_where_a_way_fails_the_script_is_ended_before_it_saves() -> None:
    measurement = measured(DENSE, ["--steps", "100"])
    stock, *_ = options = price_options(measurement, ())
    written(SAVES)
    advised = [
        (stock, advice_of(stock, measurement, options)),
        (replace(stock, name="cannot begin"), Advice("cannot begin", "atomo:rank=0")),
        (replace(stock, name="fails later"), Advice("fails later", "bf16")),
    ]
    ran, not_begun, failed = try_script(Path("train.py"), [], advised, measurement, None)
    assert not ran.failure
    assert not_begun.failure.startswith("failed: ValueError")
    assert failed.failure == "failed: RuntimeError: a way fails"
    assert not list(Path().glob("except-*")) + list(Path().glob("finally-*"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("destroys", [True, False])
def test_a_script_that_ends_too_early_is_one_line(destroys: bool) -> None:
    text = TABLES.replace("range(60)", "range(3)") + ("    dist.destroy_process_group()\n" if destroys else "")
    with pytest.raises(ScriptFailed, match=r"^train.py ended before 5 training steps were timed") as caught:
        measured(text)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(120)
def test_a_script_without_ddp_is_ended_with_one_sentence_whatever_it_catches() -> None:
    written("""
        import torch
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            try:
                optimizer.step()
            except BaseException:
                pass
    """)
    for command in (["doctor", "--ranks", "2", "train.py"], ["analyze", "--ranks", "2", "train.py"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1, result.output
        last = result.output.strip().splitlines()[-1]
        assert last.startswith("error: train.py trains a model without DistributedDataParallel, so"), last


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import torch\nraise RuntimeError('no data here')\n", "RuntimeError: no data here"),
        ("import torch\ntorch.zeros(2).view(3)\n", "RuntimeError: shape"),
    ],
)
def test_a_script_that_fails_says_why_once_without_frames_of_libraries(text: str, says: str) -> None:
    written(text)
    result = CliRunner().invoke(app, ["doctor", "--ranks", "3", "train.py"])
    assert result.exit_code == 1, result.output
    assert result.output.count(says) == 1, result.output
    (frame,) = [line for line in result.output.splitlines() if line.strip().startswith("File ")]
    assert "train.py" in frame


def test_a_script_that_does_not_compile_is_one_line_before_any_rank_starts() -> None:
    written("model = DDP(net\n")
    result = CliRunner().invoke(app, ["doctor", "--ranks", "3", "train.py"])
    assert result.exit_code == 2, result.output
    assert result.output == "error: train.py, line 1: '(' was never closed\n"


@pytest.mark.timeout(60)
def test_a_job_function_that_raises_is_shown_once_with_its_own_frames() -> None:
    written("def inner():\n    raise KeyError('no such data')\n\ndef make():\n    inner()\n", "job.py")
    result = CliRunner().invoke(
        app, ["doctor", "--hosts", "1", "--ranks-per-host", "2", "--link", "none", "job.py:make"]
    )
    assert result.exit_code == 1, result.output
    assert result.output.count("KeyError: 'no such data'") == 1, result.output
    frames = [line for line in result.output.splitlines() if line.strip().startswith("File ")]
    assert len(frames) == 2, result.output
    assert all("job.py" in line for line in frames), result.output


@pytest.mark.timeout(120)
def test_a_usage_that_all_ranks_print_is_shown_once() -> None:
    written(DENSE)
    command = [sys.executable, "-m", "thinwire", "doctor", "--ranks", "3", "train.py", "--step", "x"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("usage:") == 1, ended.stderr
    assert len(re.findall(r"train.py ended on rank [012]: it called sys.exit\(2\)", ended.stderr)) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
