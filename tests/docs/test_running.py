"""What the documents tell readers to run, run: the notebook, scripts on two ranks, and commands that take seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ROOT, Block, Command, blocks, commands

pytestmark = pytest.mark.docs

NOTEBOOK = ROOT / "docs" / "tutorials" / "two-ranks.ipynb"
ON_RANKS = [block for block in blocks("python") if block.mark == "run on 2 ranks"]
MARKED = [block for block in blocks("sh") if block.mark.startswith("run")]
RUN = [(command, block.mark) for block in MARKED for command in commands(block)]
"""Commands of blocks marked ``<!-- run -->``; after ``<!-- run with: --steps 2 -->`` with these options added."""


def finish(words: list[str], folder: Path, seconds: float) -> str:
    """Run a command in a folder where the repository's examples and documents are; return what it printed."""
    for name in ("examples", "docs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "THINWIRE_HOLDER": str(folder / "holder.sock")}
    done = subprocess.run(
        words, cwd=folder, env=environment, timeout=seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def on_ranks(script: Path, ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), str(script)]


@pytest.mark.parametrize("block", ON_RANKS, ids=str)
def test_a_script_runs_on_two_ranks(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.code)
    finish(on_ranks(script), tmp_path, seconds=100)


@pytest.mark.parametrize(("command", "mark"), RUN, ids=str)
def test_a_command_runs(command: Command, mark: str, tmp_path: Path) -> None:
    program = {"thinwire": [sys.executable, "-m", "thinwire"], "python": [sys.executable]}[command.words[0]]
    more = mark.partition("run with:")[2].split()
    finish([*program, *command.words[1:], *more], tmp_path, seconds=100)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In under 60 s on two ranks, with the outputs that it was saved with."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    saved = [texts(cell) for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [texts(cell) for cell in notebook.cells] == saved


def texts(cell: dict) -> list[str]:
    """What a cell printed, without the numbers: bytes depend on what "auto" chose."""
    outputs = [output for output in cell.get("outputs", []) if output["output_type"] == "stream"]
    return [re.sub(r"\d+(\.\d+)?", "#", output["text"]) for output in outputs if output["name"] == "stdout"]


def test_the_notebook_is_saved_with_its_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell["outputs"] for cell in cells if "print(" in "".join(cell.get("source", "")).split("%%writefile")[0])
