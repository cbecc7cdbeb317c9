"""`thinwire holder`: what it imports, shows, refuses and ends."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.lab.cli.programs import imported_by
from thinwire.lab.cli import holder as command


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


@pytest.mark.ranks
def test_an_address_with_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status = {"address": "[fd00::1]:7411", "pid": 1, "used_bytes": 0, "budget_bytes": 0, "shards": []}
    command._print(status, Console())
    assert "Holder at [fd00::1]:7411, process 1" in capsys.readouterr().out
