"""What `make install` and `make demo` download: torch for CPUs where there is no GPU, and only what is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.comm.c10d import TESTED

ROOT = Path(__file__).parents[2]
CPU = ("--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu", "--timeout", "15", "--retries", "1")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import install_torch

    yield install_torch
    del sys.modules["install_torch"]


@pytest.mark.parametrize(
    ("driver", "answers", "statuses", "calls", "says"),
    [
        (False, True, [0], [CPU], "build for CPUs, from https://download.pytorch.org/whl/cpu: about 200 MB"),
        (False, True, [1, 0], [CPU, ()], "has no build for this Python"),
        (False, False, [0], [()], "does not answer within 5 s. Which build that has is not known"),
        (True, True, [0], [()], "with CUDA, since there is an NVIDIA driver"),
    ],
    ids=["CPU", "no build", "no answer", "GPU"],
)
def test_torch_is_that_for_this_machine(
    tool: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    driver: bool,
    answers: bool,
    statuses: list[int],
    calls: list[tuple[str, ...]],
    says: str,
) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    monkeypatch.setattr(tool, "has_driver", lambda: driver)
    monkeypatch.setattr(tool, "answers", lambda index: answers)
    monkeypatch.setattr(tool, "pip", lambda *options: seen.append(options) or statuses.pop(0))
    tool.main()  # type: ignore[attr-defined]
    assert seen == calls
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(("asked", "wanted"), [([], ["-c", "torch"]), (["2.15"], ["torch==2.15.*"])])
def test_another_version_is_not_that_of_the_constraints(
    tool: object, monkeypatch: pytest.MonkeyPatch, asked: list[str], wanted: list[str]
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["install_torch.py", *asked])
    monkeypatch.setattr(subprocess, "call", lambda command: seen.append(command) or 0)
    assert tool.pip() == 0  # type: ignore[attr-defined]
    assert [part for part in seen[0][5:] if not part.endswith(".txt")] == wanted


def test_torch_that_is_there_is_left_alone(
    tool: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "pip", None)
    tool.main()  # type: ignore[attr-defined]
    assert capsys.readouterr().out == ""


def test_an_index_that_does_not_answer_is_no_error(tool: object) -> None:
    assert not tool.answers("http://127.0.0.1:9")  # type: ignore[attr-defined]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def commands(clone: Path, goal: str) -> str:
    """What make would do."""
    return subprocess.run(["make", "-n", goal], cwd=clone, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("order", [("demo", "install"), ("install", "demo")])
def test_both_orders_install_each_thing_once(clone: Path, order: tuple[str, str]) -> None:
    """The demo needs no tools of developers, and all that it needs is among theirs."""
    extras = []
    for goal in order:
        said = commands(clone, goal)
        extras.append(re.findall(r"-e '(\S+)'", said))
        assert ("install_torch.py" in said) == (goal == order[0])
        for stamp in re.findall(r"touch (.*)", said):
            for path in stamp.split():
                (clone / path).parent.mkdir(exist_ok=True)
                (clone / path).touch()
    first = {"demo": [".[cpu,plot,testbed]"], "install": [".[dev]"]}
    assert extras == [first[order[0]], first["install"] if order[1] == "install" else []]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_each_torch_has_its_own_environment(clone: Path) -> None:
    """With other versions than the constraints have only of torch, and what it costs is said first."""
    said = commands(clone, "test-torches")
    torches = re.findall(r"install_torch.py (\S+)", said)
    tested = re.findall(r"\.venv/torch-(\S+)/bin/python tools/suite.py (.*)", said)
    assert [version for version, _ in tested] == torches
    assert " to ".join(torches) == TESTED
    assert all("ranks and not gpu" in arguments for _, arguments in tested)
    assert said.index("GB on disk") < said.index("-m venv")
    declared = re.findall(r'"torch>=(\S+?)"', (clone / "pyproject.toml").read_text())
    assert declared == [torches[0]]
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    assert all(re.search(rf"^\| {re.escape(version)}", page, re.M) for version in torches)
