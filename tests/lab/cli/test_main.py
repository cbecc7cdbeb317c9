"""The command line: what is listed without importing torch is what there is, and whose an option is."""

from __future__ import annotations

import importlib
import json
import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import thinwire
from measured import measurement
from tests.lab.cli.programs import all_commands
from thinwire.lab.cli import main
from thinwire.lab.cli.commands import Command, ScriptCommand, option
from thinwire.lab.cli.main import app
from thinwire.lab.planning.planner import best_plan

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


def error_of(*arguments: str, columns: int = 300) -> str:
    ran = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert ran.exit_code == 2, ran.output
    return ran.output.strip()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["demo", "--links", ""], "--links: unknown link ''"),
        (["demo", "--link", ""], "--link: unknown link ''"),
        (["demo", "--link", "fast"], "--link: unknown link 'fast'"),
        (["demo", "--links", "none,1gbit"], "--links: none cannot be one of several links"),
        (["demo", "--link", "1gbit", "--links", "1gbit"], "give --link or --links, not both"),
        (["bench", "sync", "--hosts", "1"], "one rank has nobody to sum with"),
        (["bench", "sync", "--hosts", "1", "--ranks-per-host", "2"], "the ranks of one host use no link"),
        (["bench", "train", "--hosts", "1"], "one rank has nobody to sum with"),
        (["bench", "train", "--job", "nosuch"], "unknown job 'nosuch'; legal are lstm, digits"),
        (["plan", "--measure", "--job", "nosuch"], "unknown job 'nosuch'; legal are lstm, digits"),
        (["doctor", "train"], "unknown job 'train'; legal are lstm, digits"),
        (["doctor", "-m", "nosuch.train"], "cannot import -m nosuch.train: No module named 'nosuch'"),
        (["analyze", "-m", "nosuch.train"], "cannot import -m nosuch.train: No module named 'nosuch'"),
        (["doctor", "wrong.py"], "wrong.py, line 2: invalid syntax"),
        (["analyze", "wrong.py"], "wrong.py, line 2: invalid syntax"),
        (["doctor", "zeros.py"], "zeros.py: source code string cannot contain null bytes"),
        (["bench", "train", "--job", "nosuch.py:make"], "there is no file nosuch.py"),
        (["bench", "train", "--job", "os:nosuch"], "os has no function 'nosuch'"),
        (["bench", "train", "--job", "os.path:nosuch"], "os.path has no function 'nosuch'"),
        (["plan", "--measure", "--job", "json.decoder:nosuch"], "json.decoder has no function 'nosuch'"),
        (["doctor", "json.nosuch:make"], "cannot import json.nosuch:make: No module named 'json.nosuch'"),
        (["doctor", "-m", "json.nosuch"], "cannot import -m json.nosuch: No module named 'json.nosuch'"),
        (["analyze", "-m", "xml"], "cannot import -m xml: No module named 'xml.__main__'"),
        (["holder", "--status", "--stop"], "give one of --status, --stop"),
        (["holder", "--bind", "no such host"], "--bind no such host: "),
    ],
    ids=" ".join,
)
def test_one_line_names_the_mistake(
    command: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("THINWIRE_SECRET", raising=False)
    monkeypatch.setenv("THINWIRE_HOLDER", str(tmp_path / "holder.sock"))
    monkeypatch.chdir(tmp_path)
    Path("wrong.py").write_text("import torch\ndef train(:\n")
    Path("zeros.py").write_bytes(b"\0")
    said = error_of(*command)
    assert said.startswith(f"error: {says}")
    assert "\n" not in said


def test_an_unknown_job_is_refused_before_torch_is_imported() -> None:
    code = """
import sys
from thinwire.lab.cli.main import app
for command in (["doctor", "train"], ["plan", "--measure", "--job", "nosuch"]):
    try:
        app(command)
    except SystemExit as ended:
        assert ended.code == 2, ended.code
assert "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("content", [{"a": 1}, [], {"groups": []}], ids=["other", "list", "plan"])
def test_a_file_that_is_no_measurement_is_named(content: object, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    assert f"error: {path}: " in error_of("doctor", "--from", str(path))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("command", ["bench checkpoint", "bench train", "plan --measure", "plan show plan.json"])
def test_a_result_that_cannot_be_written_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    best_plan(measurement(100)).save("plan.json")
    for name in ("checkpoint", "train"):
        monkeypatch.setattr(f"thinwire.lab.cli.bench_{name}._run", lambda *arguments: {})
        monkeypatch.setattr(f"thinwire.lab.cli.bench_{name}._print", lambda *arguments: None)
    monkeypatch.setattr("thinwire.lab.cli.plan.measure_target", lambda *arguments: measurement(100))
    result = CliRunner().invoke(app, [*command.split(), "--json", "/dev/full"])
    assert result.exit_code == 1, result.output
    last = result.output.strip().splitlines()[-1]
    assert last == "error: [Errno 28] No space left on device: '/dev/full'"
    assert isinstance(result.exception, SystemExit)


CLOSED = "import os, sys; os.close(1); os.close(int(sys.argv[1])); os.execv(sys.executable, sys.argv[2:])"


@pytest.mark.parametrize("other", [0, 2])
def test_closed_streams_are_no_error(other: int) -> None:
    """As under cron; it was a traceback of 40 lines after the work was done."""
    command = [sys.executable, "-c", CLOSED, str(other), sys.executable, "-m", "thinwire", "--version"]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("command", ["analyze", "doctor"])
def test_the_usage_is_one_line(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    (usage,) = [line.strip() for line in text.splitlines() if "Usage:" in line]
    assert "[ARGS]..." in usage
    assert "[[" not in usage


@pytest.mark.parametrize("command", ["doctor", "analyze", "plan", "bench", "bench sync", "bench train"])
def test_help_has_an_example_with_json(command: str) -> None:
    text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "160"}).output
    example = text[text.index("Example") :]
    assert f"thinwire {command}" in example
    assert "--json" in example


@pytest.mark.parametrize("command", ["", "demo", "doctor", "bench"])
def test_help_in_a_narrow_window_cuts_no_name(command: str) -> None:
    text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "40"}).output
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert ("--ranks-per-host" if command == "doctor" else "--help") in text
