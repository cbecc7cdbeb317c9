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
Torchrun = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    """Run a script of the repository on ranks of this machine; return what its rank 0 wrote as JSON to its argument."""

    def run(script: str, ranks: int = 2, *arguments: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(Path(script).stem)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "CUDA_VISIBLE_DEVICES": "",
        }
        ran = subprocess.run(
            [*command, str(ROOT / script), str(folder), *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{script} failed:\n{ran.stdout[-4000:]}\n{ran.stderr[-8000:]}"
        written = folder / "result.json"
        return {
            **(json.loads(written.read_text()) if written.exists() else {}),
            "stdout": ran.stdout,
            "stderr": ran.stderr,
        }

    return run
