"""The command line: what is listed without importing torch is what there is, and whose an option is."""

from __future__ import annotations

import ast
import importlib
import os
import platform
import secrets
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

import thinwire
from measured import measurement
from thinwire.lab.cli import bench, main
from thinwire.lab.cli.commands import FORMER, OPTIONS, Command, ScriptCommand, load, option
from thinwire.lab.cli.output import clear_errors, open_console, write_json
from thinwire.lab.missing import missing_package
from thinwire.lab.plot import save_picture
from thinwire.lab.report import Report

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


@pytest.mark.parametrize(("name", "command"), all_commands().items())
def test_help_flows_and_flags_have_no_value(name: str, command: Any) -> None:
    """Line breaks of a docstring once cut its sentences, and flags had the value ``<bool>``."""
    assert "\n" not in command.help.replace("\n\n", "")
    ran = CliRunner().invoke(main.app, [*name.split()[1:], "--help"], env={"COLUMNS": "120"})
    assert ran.exit_code == 0
    assert "bool" not in ran.output


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
        (scripts_app, "{} --seed 2", "['--seed', '2'] 4"),
        (scripts_app, "--workers 2 {using} --workers 8", "['--workers', '8'] 2"),
        (scripts_app, "--ranks 2 -- {} --workers 8", "['--workers', '8'] 2"),
    ],
)
def test_old_names_of_options_are_accepted(app: typer.Typer, arguments: str, shown: str, tmp_path: Path) -> None:
    script, using = tmp_path / "train.py", tmp_path / "loader.py"
    script.write_text("")
    using.write_text("parser.add_argument('--workers', help='of the DataLoader')")
    result = CliRunner().invoke(app, arguments.format(script, using=using).split())
    assert result.stdout == shown + "\n"


HEAVY = ("torch", "numpy", "matplotlib", "numba", "pyroute2", "sklearn", "asyncio", "multiprocessing")
"""Modules that no help needs: with none of them it is there in 0.2 s, with torch alone in 1.7 s."""


def imported_by(*lines: str) -> list[str]:
    """The modules of `HEAVY` that lines of Python import in a process of their own."""
    last = f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    code = "\n".join(("import sys", *lines, last))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(ran.stderr.splitlines()[-1])


@pytest.mark.slow
def test_no_help_imports_what_it_does_not_need() -> None:
    names = [name.removeprefix("thinwire ").split() for name in all_commands()]
    runs = [["--help"], ["--version"], ["bench", "--help"], *([*name, "--help"] for name in names)]
    line = "for arguments in {!r}: app(arguments, standalone_mode=False)"
    assert imported_by("from thinwire.lab.cli.main import app", line.format(runs)) == []


@pytest.mark.slow
def test_what_asks_a_holder_imports_no_torch(tmp_path: Path) -> None:
    """`thinwire holder --status` takes 0.2 s."""
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text(secrets.token_hex(16))
    options = ["--socket", str(tmp_path / "socket"), "--secret-file", str(tmp_path / "secret")]
    started = [sys.executable, "-m", "thinwire", "holder", "--detach", "--memory-budget", "16MiB", *options]
    subprocess.run(started, check=True, capture_output=True)
    runs = [["holder", action, *options] for action in ("--status", "--stop")]
    line = f"for arguments in {runs!r}: app(arguments, standalone_mode=False)"
    assert imported_by("from thinwire.lab.cli.main import app", line) == []


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
    assert bench.METHODS.split(", ") == [*train.NAMES, *train.SETTINGS]
    assert bench.CHECKPOINT_METHODS.split(",") == [*checkpoint.METHODS]


script_app = typer.Typer()


@script_app.command(cls=ScriptCommand)
def _show(command: list[str], steps: int = 20, json: str = "", fresh: bool = False) -> None:
    typer.echo(f"{command} {steps} {json} {fresh}")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{} --model resnet50 -v", "['{}', '--model', 'resnet50', '-v'] 20  False"),
        ("--json a.json {} --lr -1 -- --fresh", "['{}', '--lr', '-1', '--', '--fresh'] 20 a.json False"),
        ("--fresh -m package.train --lr 1", "['-m package.train', '--lr', '1'] 20  True"),
        ("--fresh -- -m package.train --steps 1", "['-m package.train', '--steps', '1'] 20  True"),
        ("--fresh -- {} --json out.json", "['{}', '--json', 'out.json'] 20  True"),
        ("lstm --steps 3", "['lstm'] 3  False"),
    ],
)
def test_what_stands_behind_a_script_is_its_own(arguments: str, shown: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    result = CliRunner().invoke(script_app, arguments.format(script).split())
    assert result.stdout == shown.format(script) + "\n"


def test_an_option_of_ours_behind_a_script_is_its_own_too_and_the_screen_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(script_app, ["--steps", "5", "train.py", "--steps=100", "--json", "data.json"])
    assert result.stdout == "['train.py', '--steps=100', '--json', 'data.json'] 5  False\n"
    assert result.stderr == "--steps=100 behind train.py goes to it: put -show's options first.\n"


@pytest.mark.parametrize(
    ("command", "starts"),
    [
        ("doctor train.py", "lab.analyze.steps.measure_script"),
        ("analyze train.py", "lab.analyze.run.run_script"),
        ("doctor train:make", "lab.bench.measured.measure_on_hosts"),
        ("plan --measure --job train:make", "lab.bench.measured.measure_on_hosts"),
        ("bench train --job train:make", "lab.testbed.kernels.compile_ahead"),
    ],
)
def test_what_cannot_be_kept_from_a_script_is_announced_before_it_starts(
    command: str, starts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object, **options: object) -> None:
        raise ValueError("now it would start")

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def make(): ...")
    module, name = f"thinwire.{starts}".rsplit(".", 1)
    monkeypatch.setattr(importlib.import_module(module), name, start)
    said = CliRunner().invoke(main.app, command.split()).stderr
    assert "now it would start" in said
    before = said.split("now it would start")[0]
    assert "runs as it is: what it saves by itself, as by torch.save, is saved" in before
    assert "Checkpoints of thinwire are neither restored nor saved meanwhile." in before


def test_only_what_thinwire_wrote_is_overwritten(tmp_path: Path) -> None:
    plan, foreign = tmp_path / "plan.json", tmp_path / "data.json"
    open_console({"--json": plan})
    write_json({"steps": 1}, plan)
    open_console({"--json": plan, "--output": plan})
    replace(measurement(100), environment={"thinwire": "0.2"}).save(plan)
    open_console({"--measurement": plan})
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    Report("thinwire").write(page)
    save_picture(lambda axes: None, picture, 2.0, "a title")
    open_console({"--report": page, "--picture": picture})
    for content in (
        '"my only copy"',
        '{"my": "only copy"}',
        "import thinwire",
        '{"package": "thinwire", "losses": [0.1]}',
        '{"config": {"written_by": "thinwire", "fingerprint": 1}}',
        '{"fingerprint": "of my own"}',
        '{"environment": "thinwire"}',
        '[{"written_by": "thinwire"}]',
        '{"written_by": "thinwire"',
        "<html>notes on thinwire: it is fast</html>",
    ):
        foreign.write_text(content)
        with pytest.raises(typer.BadParameter, match="exists, and thinwire did not write it: remove it"):
            open_console({"--json": foreign})
        assert foreign.read_text() == content


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("a [link]"), 2), (OSError("no [link]"), 1), (missing_package("matplotlib", "this"), 1)],
)
def test_an_error_is_a_line_with_its_brackets_and_a_status(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, clear_errors(ValueError, OSError):
        raise error
    assert ended.value.exit_code == status
    assert capsys.readouterr().err == f"error: {error}\n"
    assert "[" in str(error)


WRITING = ("--json", "--report", "--picture", "--output", "--measurement", "--record")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name, command in all_commands().items()
        for option in WRITING
        if option in {text for param in command.params for text in param.opts}
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands would fail later too: they have no input, or an unknown link."""
    locked = (Path("locked"), Path("locked.svg"))  # which root may write to
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or Path(path) not in locked)
    is_dir = Path.is_dir

    def is_dir_here(path: Path) -> bool:
        if path.parent == Path("sealed"):  # which may not be entered
            raise PermissionError
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", is_dir_here)
    monkeypatch.chdir(tmp_path)
    Path("locked").mkdir()
    Path("locked.svg").touch()
    wrong = {
        "none/x.svg": "none is not a directory",
        "locked.svg/x.svg": "locked.svg is not a directory",
        ".": ". is a directory",
        "locked/x.svg": "permission denied",
        "locked.svg": "permission denied",
        "sealed/x.svg": "cannot be written: permission denied",
    }
    wrong |= {"x.jpg2000": "x.jpg2000 is none of .png, .svg, .pdf"} if option == "--picture" else {}
    given = {"plan": ["--measure"], "plan show": ["none.json"], "doctor": ["lstm"]}
    words = name.split()[1:]
    for path, reason in wrong.items():
        arguments = [*words, *given.get(" ".join(words), []), option, path]
        result = CliRunner().invoke(main.app, arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert reason in " ".join(result.output.replace("│", " ").split()), (arguments, result.output)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("plan --from x.json --hosts 3", "was measured already: leave out --hosts"),
        ("plan --from x.json --job gpt", "was measured already: leave out --job"),
        ("plan --measure --compress top_q", "unknown compressor 'top_q'"),
        ("analyze none.py", "there is no script none.py"),
        ("demo --hosts 1000", "less than or equal to 250"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(arguments: str, says: str) -> None:
    result = CliRunner().invoke(main.app, arguments.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert says in result.output
    assert "Recording" not in result.output
    assert "Measuring" not in result.output


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.lab.cli.output.find_spec", lambda _: None)
    for command in ("doctor lstm", "bench checkpoint"):
        result = CliRunner().invoke(main.app, [*command.split(), "--picture", str(tmp_path / "x.png")])
        assert result.exit_code == 1
        assert result.output == "error: --picture needs matplotlib: pip install '.[plot]' in a checkout\n"
    result = CliRunner().invoke(main.app, ["bench", "checkpoint", "--report", "x.html", "--link", "fast"])
    assert result.output.startswith("The report will have no plots: --report needs matplotlib: pip install '.[plot]'")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pyroute2", "sklearn"])
def test_a_missing_package_is_a_line_that_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [package, *(loaded for loaded in sys.modules if loaded.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # what another test imported would be found
    monkeypatch.setattr(main.output, "is_command", False)
    extra = {"pyroute2": "testbed", "sklearn": "train"}[package]
    where = ["--link", "1gbit"] if package == "pyroute2" else ["--link", "none", "--job", "digits"]
    commands = ["bench train", "plan --measure", "bench checkpoint"]
    for command in [*commands, "demo", "bench sync", "doctor lstm"] if package == "pyroute2" else commands[:1]:
        result = CliRunner().invoke(main.app, [*command.split(), *where], env={"COLUMNS": "300"})
        assert result.exit_code == 1, (command, result.output)
        assert f"pip install '.[{extra}]' in a checkout\n" in result.output, (command, result.output)


INTERRUPTIBLE = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from thinwire.lab.cli.main import command; command()",
]
"""The command as a terminal starts it. Whatever a shell starts in the background ignores interrupts, tests included."""


@pytest.mark.slow
def test_an_interrupt_ends_with_status_130() -> None:
    """The parent interrupts the command as a terminal does: when it has printed that it measures."""
    with subprocess.Popen(
        [*INTERRUPTIBLE, "bench", "sync", "--link", "none", "--hosts", "2", "--repeat", "9999"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("starting ranks")
            os.killpg(process.pid, signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (process.returncode, rest) == (130, "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--help", "--version", "plan show none.json"])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "thinwire", *arguments.split()]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writer)
    assert ran.returncode == (2 if "none" in arguments else 0)
    assert ("none.json" in ran.stderr) if "none" in arguments else not ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_wrong_options_of_a_holder_are_said_alike_in_the_foreground_and_detached(
    detach: list[str], tmp_path: Path
) -> None:
    arguments = ["holder", "--socket", str(tmp_path / "socket"), "--memory-budget", "lots", *detach]
    ran = subprocess.run(
        [sys.executable, "-m", "thinwire", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "error: unknown size 'lots'; legal forms: '64GiB', '500MB', '1000000'\n"


def test_a_file_to_compare_with_that_is_no_result_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text("{}")
    result = CliRunner().invoke(main.app, ["bench", "sync", "--compare", str(tmp_path / "d.json")])
    assert result.exit_code == 2
    assert "is no result of a benchmark: give a file that --json of one wrote" in result.output


@pytest.mark.slow
def test_the_shell_completes_commands_and_options() -> None:
    for words, completed in {
        "thinwire do": "doctor",
        "thinwire doctor --re": "--report",
        "thinwire bench s": "sync",
        "thinwire bench sync --dt": "--dtype",
        "thinwire plan s": "show",
    }.items():
        asked = {"_THINWIRE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        ran = subprocess.run(
            [sys.executable, "-m", "thinwire"], env=os.environ | asked, capture_output=True, text=True, check=False
        )
        assert ran.stdout.split() == [completed], ran


def test_help_says_the_exit_statuses_and_how_to_complete() -> None:
    output = " ".join(CliRunner().invoke(main.app, ["--help"]).output.split())
    assert "0 success, 1 failure, 2 wrong usage, 130 interrupted" in output
    assert "thinwire --install-completion" in output


def test_the_version_has_all_that_a_report_of_a_bug_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_PACKAGES", ("torch", "no-such-package"))
    first, second, third = CliRunner().invoke(main.app, ["--version"]).output.splitlines()
    assert first == f"thinwire {thinwire.__version__}"
    assert second.startswith(f"python {platform.python_version()}, ")
    assert third == f"torch {version('torch')}, no-such-package is not installed"


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "thinwire", "--version"], capture_output=True, text=True, check=True, env=os.environ
    )
    assert ran.stdout.startswith("thinwire ")
