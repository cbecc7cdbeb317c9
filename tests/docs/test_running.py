"""What the documents tell readers to run, run: the notebook, scripts on two ranks, and commands that take seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from compiled import own_cache
from documents import ROOT, Block, Command, blocks, commands
from thinwire.plan import Measurement, best_plan

pytestmark = [pytest.mark.docs, pytest.mark.timeout(300)]

MEASURED = ROOT / "docs" / "lstm-100mbit.json"
NOTEBOOK = ROOT / "docs" / "tutorials" / "two-ranks.ipynb"
ON_RANKS = [block for block in blocks("python") if block.mark == "run on 2 ranks"]

SMALLER = {
    "demo": "--link none --hosts 2 --steps 2 --report report.html",
    "analyze": "--ranks 2 --steps 2",
    "bench sync": "--link none --hosts 2 --repeat 1 --scale 0.01",
    "bench train": "--link none --hosts 2 --steps 2 --seeds 1 --extra 0",
    "bench reproducible": "--world-sizes 1,2 --micro-batches 2 --steps 2",
    "bench checkpoint": "--link none --hosts 2 --steps 2 --repeat 1 --kills 0 --compute-ms 20",
    "doctor": "--compress none --steps 3 --no-confirm",
    "plan show": "",
    "plan": "--compress none",
}
"""Options that make a command small; of an option that is given twice the last one counts."""

ON_LOOPBACK = "--link none --hosts 2"
"""For `doctor` and `plan` where they make ranks of their own: not where they watch a script or read a file."""

INSTEAD = {"train.py": "examples/ddp_sparse.py", "train.py:make": "examples/mytrain.py:make"}
"""Files of a reader, and ours that are like them."""

NOT_RUN = {
    "thinwire holder": "it outlives the command; tests/checkpoint/holder/test_server.py runs each of its forms",
    "torchrun": "tests/house/test_examples.py and test_checkpointer.py run the examples",
    "--no-python": "in a job of torchrun: tests/lab/cli/test_plan.py",
    "--design-space": "minutes, also when small: tests/lab/bench/test_sync.py runs it nightly",
    "--links": "only emulated links, which need namespaces: tests/lab/cli/test_demo.py has several",
    "--version": "tests/house/test_examples.py",
    "--help": "tests/house/test_examples.py",
}
"""Commands that no test here runs, by words in them, and why. All of them are parsed in test_commands.py."""


def kind(command: Command) -> tuple[str, ...]:
    """What two commands have in common that need not both be run: the subcommand, and the names of options."""
    return tuple(word for word in command.words if word.startswith("--") or re.fullmatch(r"[a-z]+", word))


def said(command: Command) -> set[tuple[str, ...]]:
    """What a command says as it is run: for the subcommand each option with each of its values, and other words."""
    words = small(command)
    depth = 1 + (words[0] == "bench")
    values: dict[str, str] = {}
    option = ""
    for word in words[depth:]:
        if word.startswith("--"):
            option, values[word] = word, ""
        else:  # of an option that is given twice the last one counts
            values, option = values | {option or word: word}, ""
    own = (" ".join(words[:depth]),)
    return {own, *((*own, name, value) for name, each in values.items() for value in each.split(","))}


def runnable() -> list[Command]:
    """A command of each kind, without those that say nothing but what others say."""
    found = [command for block in blocks("sh") for command in commands(block) if command.words[0] == "thinwire"]
    found = [command for command in found if not any(words in " ".join(command.words) for words in NOT_RUN)]
    found = list({kind(command): command for command in found}.values())
    missing = {word for command in found for word in said(command)}
    kept = []
    for command in sorted(found, key=lambda command: -len(said(command))):
        if said(command) & missing:
            missing -= said(command)
            kept.append(command)
    return sorted(kept, key=found.index)


def small(command: Command) -> list[str]:
    words = [INSTEAD.get(word, word) for word in command.words[1:]]
    if words[0] == "doctor" and "--link" in words and "--hosts" not in words:  # of a script: loopback is the default
        del words[words.index("--link") : words.index("--link") + 2]
    name = next(name for name in SMALLER if words[: name.count(" ") + 1] == name.split())
    options = [] if "--from" in words else SMALLER[name].split()  # what was measured is small already
    makes_ranks = name == "plan" and "--measure" in words
    if makes_ranks or (name == "doctor" and not any(word.endswith((".py", ".json")) for word in words)):
        options += ON_LOOPBACK.split()
    depth = name.count(" ") + 1
    return [*words[:depth], *_before_script(words[depth:], options)]


def _before_script(words: list[str], options: list[str]) -> list[str]:
    """Options stand before a script, whose own options follow it; the later ones of an option count."""
    place = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    return [*words[:place], *options, *words[place:]]


@pytest.fixture(autouse=True)
def variables_of_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers have not set what conftest.py sets for tests: their rows travel once that is known to pay."""
    monkeypatch.delenv("THINWIRE_ROUTE", raising=False)


def finish(words: list[str], folder: Path, seconds: float, variables: Sequence[str] = ()) -> str:
    """Run a command in a folder where the repository's examples and documents are; return what it printed."""
    for name in ("examples", "docs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_CACHE_HOME": own_cache(folder), "THINWIRE_HOLDER": str(folder / "holder.sock")}
    environment |= dict(variable.split("=", 1) for variable in variables)
    done = subprocess.run(
        words, cwd=folder, env=environment, timeout=seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("block", ON_RANKS, ids=str)
def test_a_script_runs_on_two_ranks(block: Block, tmp_path: Path) -> None:
    """By the command that the page gives for it, with its variables and no others."""
    page = (command for other in blocks("sh") if other.path == block.path for command in commands(other))
    start = next(command for command in page if command.words[0] == "torchrun")
    (tmp_path / "train.py").write_text(block.code)
    words = [sys.executable, "-m", "torch.distributed.run", *start.words[1:]]
    finish(words, tmp_path, seconds=280, variables=start.variables)


@pytest.mark.parametrize("command", runnable(), ids=str)
def test_a_command_runs(command: Command, tmp_path: Path) -> None:
    """Commands of the documents, made small, on loopback: each option, with each of its values."""
    shutil.copy(MEASURED, tmp_path / "measured.json")
    best_plan(Measurement.load(MEASURED), []).save(tmp_path / "plan.json")
    finish([sys.executable, "-m", "thinwire", *small(command)], tmp_path, seconds=280)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, with the outputs that it was saved with; 13 s on two idle cores."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    saved = [texts(cell) for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [texts(cell) for cell in notebook.cells] == saved


def texts(cell: dict) -> list[str]:
    """What a cell printed, without the numbers: bytes depend on what "auto" chose."""
    outputs = [output for output in cell.get("outputs", []) if output["output_type"] == "stream"]
    return [re.sub(r"\d+(\.\d+)?", "#", output["text"]) for output in outputs if output["name"] == "stdout"]


def test_the_notebook_is_saved_with_its_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell["outputs"] for cell in cells if "print(" in "".join(cell.get("source", "")).split("%%writefile")[0])
