"""Lines, tables, files and progress on a screen."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console

from measured import measurement
from thinwire.lab.cli import output
from thinwire.lab.cli.output import clear_errors, open_console, write_json
from thinwire.lab.missing import missing_package
from thinwire.lab.plot import save_picture
from thinwire.lab.report import Report


def test_progress_is_reported_also_while_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step may last for minutes; without a terminal somebody waits for a line."""
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.01)
    lines = ""
    with output.progress("dense [1]", total=4) as tell:
        tell(done=2)
        while lines.count("dense [1]: 2 of 4") < 3:
            lines += capsys.readouterr().err
            time.sleep(0.01)
    with output.progress("nothing", quiet=True):
        time.sleep(0.05)
    assert "nothing" not in capsys.readouterr().err


def test_a_terminal_has_a_bar_of_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(output, "Console", lambda **how: Console(file=terminal, force_terminal=True, width=80))
    with output.progress("Recording", total=7) as tell:
        tell(done=7)
    assert "7/7" in terminal.getvalue()


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_names_the_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        output.write_json({}, Path("/dev/full"))
    from thinwire.lab.report import Report

    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        Report("title", "conditions", []).write("/dev/full")


def test_a_reader_that_has_gone_is_left_to_the_command() -> None:
    with pytest.raises(BrokenPipeError), output.clear_errors():
        raise BrokenPipeError


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
def test_a_path_that_cannot_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    assert output._why_not(Path("/proc/page.html"), "--report") is not None
    assert output._why_not(tmp_path / "page.html", "--report") is None
    assert not list(tmp_path.iterdir())
