"""`thinwire doctor`: what it reads, prints and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from measured import measurement
from tests.lab.doctor.diagnosed import TOP_K
from thinwire.lab.analyze import trials
from thinwire.lab.bench.jobs.own import OwnJob
from thinwire.lab.cli.main import app
from thinwire.lab.doctor.diagnosis import (
    Confirmed,
)
from thinwire.lab.planning.planner import step_seconds
from thinwire.plan.plan import STOCK, Plan


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
