"""Starts the ranks of a training as users do, with torchrun. A framework that is not installed fails its tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]),
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "CUDA_VISIBLE_DEVICES": "",
}


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a script of the repository on ranks of this machine: ``torchrun(script, ranks, *arguments)``.

    Scripts in ``tests`` get a folder as the first argument; keywords are variables of their environment. Returned is
    what rank 0 wrote to ``result.json`` in the folder, and ``stdout`` and ``stderr`` of all ranks.
    """

    def run(script: str, ranks: int = 2, *arguments: str, **environment: str) -> dict[str, Any]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return _run(tmp_path_factory.mktemp("ranks"), launcher, script, arguments, environment)

    return run


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a script in one process, without torchrun."""
    return lambda script, *arguments: _run(tmp_path_factory.mktemp("process"), [], script, arguments)


def _run(
    folder: Path,
    launcher: list[str],
    script: str,
    arguments: tuple[str, ...],
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    given = [str(folder)] if script.startswith("tests") else []
    ran = subprocess.run(
        [sys.executable, *launcher, str(ROOT / script), *given, *arguments],
        cwd=folder, env=ENVIRONMENT | (environment or {}), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{script} failed:\n{ran.stdout[-4000:]}\n{ran.stderr[-8000:]}"
    written = folder / "result.json"
    found = json.loads(written.read_text()) if written.exists() else {}
    return {**found, "stdout": ran.stdout, "stderr": ran.stderr}
