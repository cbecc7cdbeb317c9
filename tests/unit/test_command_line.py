"""The command line: what is listed without importing torch is what there is, and whose an option is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli import bench, main
from thinwire.cli.lazy import ScriptCommand, load
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


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--help"], ["holder", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    lines = (
        "import sys",
        "from thinwire.cli.main import app",
        f"sys.argv = ['thinwire', *{arguments!r}]",
        "try: app()",
        "except SystemExit: pass",
        "sys.exit('torch' in sys.modules)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=False).returncode == 0


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
