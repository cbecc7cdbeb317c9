"""Wrong commands are one line that names the mistake, before anything heavy is imported or measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from measured import measurement
from thinwire.lab.cli import output
from thinwire.lab.cli.main import app
from thinwire.lab.planning.planner import best_plan


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
def test_a_full_disk_names_the_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        output.write_json({}, Path("/dev/full"))
    from thinwire.lab.report import Report

    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        Report("title", "conditions", []).write("/dev/full")


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


def test_a_reader_that_has_gone_is_left_to_the_command() -> None:
    with pytest.raises(BrokenPipeError), output.clear_errors():
        raise BrokenPipeError


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
def test_a_path_that_cannot_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    assert output._why_not(Path("/proc/page.html"), "--report") is not None
    assert output._why_not(tmp_path / "page.html", "--report") is None
    assert not list(tmp_path.iterdir())


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
