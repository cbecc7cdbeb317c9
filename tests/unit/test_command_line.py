"""The command line: what is listed without importing torch is what there is, and whose an option is."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli import bench, main
from thinwire.cli.commands import FORMER, OPTIONS, Command, ScriptCommand, load, option
from thinwire.cli.output import clear_errors

GROUPS = {"thinwire": main._Commands.lazy, "thinwire bench": bench._Benchmarks.lazy}


@pytest.mark.parametrize(
    ("module", "name", "description"),
    [(module, name, text) for group in GROUPS.values() for name, (module, text) in group.items()],
)
def test_a_listed_command_is_there_and_described_by_its_own_words(module: str, name: str, description: str) -> None:
    command = load(module, name)
    assert " ".join(command.help.split("\n\n")[0].split()) == description
    assert "xample" in command.help + (command.epilog or "") or name == "bench"


def all_commands() -> dict[str, Any]:
    """Every command by its name, with `thinwire plan show` and the like."""
    listed = {f"{group} {name}": row[0] for group, rows in GROUPS.items() for name, row in rows.items()}
    found = {name: load(module, name) for name, module in listed.items() if name != "thinwire bench"}
    inner = {name: getattr(command, "commands", {}) for name, command in found.items()}
    return found | {f"{name} {sub}": command for name, group in inner.items() for sub, command in group.items()}


@pytest.mark.parametrize(("name", "command"), all_commands().items())
def test_a_command_says_an_example_and_has_json_and_quiet(name: str, command: Any) -> None:
    options = {text for param in command.params for text in param.opts}
    assert f"{name} " in command.help + (command.epilog or ""), "an example"
    assert "--json" in options
    assert ({"--quiet", "-q"} <= options) is (name not in ("thinwire holder", "thinwire plan show")), "shows progress"


def test_options_of_one_name_mean_the_same_in_all_commands() -> None:
    """What two commands have is declared by `option`: one type, one metavar, one beginning of the help."""
    seen: dict[str, list[tuple[type, Any]]] = {}
    for command in all_commands().values():
        types = get_type_hints(command.callback)
        for param in command.params:
            for name in param.opts:
                if name.startswith("--") and name != "--help":
                    seen.setdefault(name, []).append((types[param.name], param))
    for name, params in seen.items():
        assert name not in FORMER or name == "--model", "old names are not in the help"
        assert len(params) == 1 or name in OPTIONS, name
        assert len({kind for kind, _ in params}) == 1, name
        text, metavar = OPTIONS.get(name, ("", params[0][1].metavar))
        assert {(param.help.startswith(text), param.metavar) for _, param in params} == {(True, metavar)}, name
    assert set(OPTIONS) <= set(seen)


formerly_app, scripts_app = typer.Typer(), typer.Typer()


@formerly_app.command(cls=Command)
def _formerly(hosts: int = option("--hosts", 8), report: str = option("--report", "")) -> None:
    typer.echo(f"{hosts} {report}")


@scripts_app.command(cls=ScriptCommand)
def _scripts(command: list[str], ranks: int = option("--ranks", 4)) -> None:
    typer.echo(f"{command[1:]} {ranks}")


@pytest.mark.parametrize(
    ("app", "arguments", "shown"),
    [
        (formerly_app, "--workers 2 --html a.html", "2 a.html"),
        (formerly_app, "--workers=2 --html=--html", "2 --html"),
        (formerly_app, "--hosts 3 --report b.html", "3 b.html"),
        (scripts_app, "--workers 2 {}", "[] 2"),
        (scripts_app, "{} --workers 2", "[] 2"),
        (scripts_app, "--workers 2 {using} --workers 8", "['--workers', '8'] 2"),
        (scripts_app, "--ranks 2 -- {} --workers 8", "['--workers', '8'] 2"),
    ],
)
def test_old_names_of_options_are_accepted(app: typer.Typer, arguments: str, shown: str, tmp_path: Path) -> None:
    script, using = tmp_path / "train.py", tmp_path / "loader.py"
    script.write_text("")
    using.write_text("parser.add_argument('--workers', help='of the DataLoader')")
    result = CliRunner().invoke(app, arguments.format(script, using=using).split())
    assert result.output == shown + "\n"


HEAVY = ("torch", "numpy", "matplotlib", "numba", "pyroute2", "sklearn", "asyncio", "multiprocessing")
"""Modules that no help needs: with none of them it is there in 0.2 s, with torch alone in 1.7 s."""


def imported_by(*lines: str) -> list[str]:
    """The modules of `HEAVY` that lines of Python import in a process of their own."""
    last = f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    code = "\n".join(("import sys", *lines, last))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(ran.stderr.splitlines()[-1])


def test_no_help_imports_what_it_does_not_need() -> None:
    names = [name.removeprefix("thinwire ").split() for name in all_commands()]
    runs = [["--help"], ["--version"], ["bench", "--help"], *([*name, "--help"] for name in names)]
    line = "for arguments in {!r}: app(arguments, standalone_mode=False)"
    assert imported_by("from thinwire.cli.main import app", line.format(runs)) == []


def test_names_in_the_help_of_benchmarks_are_those_there_are() -> None:
    from thinwire.lab.bench.checkpoint import methods as checkpoint
    from thinwire.lab.bench.jobs import named
    from thinwire.lab.bench.methods import METHODS
    from thinwire.lab.bench.recipes import RECIPES
    from thinwire.lab.bench.sync import DTYPES
    from thinwire.lab.bench.train import methods as train

    assert bench.WORKLOADS.split(", ") == sorted(RECIPES)
    assert bench.SCHEMES.split(", ") == [*METHODS]
    assert bench.DTYPES.split(", ") == [*DTYPES]
    assert bench.JOBS.split(", ") == [*named.JOBS]
    assert bench.METHODS.split(", ") == [*train.TORCH_METHODS, train.THINWIRE, train.PLAN, *train.SETTINGS]
    assert bench.CHECKPOINT_METHODS.split(",") == [*checkpoint.METHODS]


script_app = typer.Typer()


@script_app.command(cls=ScriptCommand)
def _show(command: list[str], steps: int = 20, json: str = "", fresh: bool = False) -> None:
    typer.echo(f"{command} {steps} {json} {fresh}")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{} --model resnet50 -v", "['{}', '--model', 'resnet50', '-v'] 20  False"),
        ("--steps 5 {} --steps 100", "['{}', '--steps', '100'] 5  False"),
        ("{} --json out.json --fresh a", "['{}', 'a'] 20 out.json True"),
        ("{} --json=out.json --steps=3 --lr -1", "['{}', '--steps=3', '--lr', '-1'] 20 out.json False"),
        ("--fresh -- {} --json out.json", "['{}', '--json', 'out.json'] 20  True"),
        ("lstm --steps 3", "['lstm'] 3  False"),
    ],
)
def test_options_behind_a_script_are_its_own_unless_only_the_command_knows_them(
    arguments: str, shown: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--steps')")
    result = CliRunner().invoke(script_app, arguments.format(script).split())
    assert result.output == shown.format(script) + "\n"


def test_an_error_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), clear_errors(ValueError):
        raise ValueError("run `pip install thinwire[testbed]`")
    assert "pip install thinwire[testbed]" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    runner = CliRunner()
    for command in (
        "bench sync",
        "bench train",
        "bench checkpoint",
        "demo",
        "doctor lstm",
        "plan --measure",
        "analyze",
    ):
        for path, reason in ((tmp_path / "none" / "x.json", "is not a"), (tmp_path, "is a directory")):
            result = runner.invoke(main.app, [*command.split(), "--json", str(path)], env={"COLUMNS": "300"})
            assert result.exit_code == 2
            assert reason in result.output, (command, result.output)


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "thinwire", "--version"], capture_output=True, text=True, check=True, env=os.environ
    )
    assert ran.stdout.startswith("thinwire ")
