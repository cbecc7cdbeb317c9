"""Kernels are compiled before ranks start whose time is measured."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

import pytest

from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import Once
from thinwire.lab.testbed.kernels import compile_ahead

NAMES = ("sum_rows", "deal", "mix")


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT", "0") != "0", reason="nothing is compiled")
@pytest.mark.parametrize("ends", ["compiled", "killed"])
def test_compiling_ahead_shares_the_work_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """Here each process compiles nothing but claims that it did, or ends with an error.

    Two that fail at once write two texts, and then the ends of two lines.
    """
    write = f"open({str(tmp_path / 'compiled')!r}, 'a').write(f'\\n{{name}}\\n')"
    code = "import sys\n"
    code += f"for name in sys.argv[2:]: {write}" if ends == "compiled" else "exit('out of memory\\n')"
    monkeypatch.setattr(dispatch, "COMPILE", code)
    monkeypatch.setattr(dispatch, "compilation", lambda: Once(tmp_path, NAMES))
    seen: list[tuple[object, ...]] = []
    with caplog.at_level(logging.WARNING, "thinwire"):
        compile_ahead(("mix", "deal"), lambda *progress: seen.append(progress))
    assert re.fullmatch(r"Compiling kernels, once a machine, (\d+) to (\d+) s", str(seen[0][0]))
    assert seen[1][2] == 2
    assert Once(tmp_path, NAMES).compiled() == (["deal", "mix"] if ends == "compiled" else [])
    assert ("out of memory" in caplog.text) == (ends == "killed")
    seen.clear()
    if ends == "compiled":
        compile_ahead(("mix", "deal"), lambda *progress: seen.append(progress))
        assert not seen, "there is nothing to do"


@pytest.mark.parametrize(("ranks", "compilers"), [("1", 8), ("4", 2), ("32", 1)])
def test_ranks_of_a_torchrun_job_share_the_cores_of_their_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, compilers: int
) -> None:
    started: list[object] = []

    def start(*command: object, **settings: object) -> subprocess.Popen[bytes]:
        started.append(command)
        return subprocess.Popen(["true"])

    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(dispatch, "mode", lambda: "auto")
    monkeypatch.setattr(dispatch, "has_numba", lambda: True)
    monkeypatch.setattr(dispatch, "compilation", lambda: Once(tmp_path, map(str, range(16))))
    monkeypatch.setattr(dispatch, "python", start)
    compile_ahead()
    assert len(started) == compilers
