"""What is in `deploy/` runs where two cores are enough: a worker is killed, and training goes on from memory."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a cluster of one small machine, whose holder is stopped at the end."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, code in {
        "thinwire": f'exec {sys.executable} -m thinwire "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
        "scontrol": f'if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> {tmp_path}/scontrol; fi',
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (programs / name).chmod(0o755)
    ours = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "THINWIRE_HOLDER": str(tmp_path / "holder.sock"),
        "HOLDER_PORT": "0",
        "HOLDER_MEMORY": "256MiB",
        "RENDEZVOUS_PORT": str(free_port()),
    }
    yield os.environ | ours
    subprocess.run(
        [sys.executable, "-m", "thinwire", "holder", "--stop"],
        cwd=tmp_path, env=os.environ | ours, capture_output=True, check=False,
    )  # fmt: skip


def run(command: list[str | Path], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=420, check=False
    )


def starts(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"2 ranks start at step (\d+)", output)]


def test_torchrun_goes_on_after_a_worker_was_killed(environment: dict[str, str], tmp_path: Path) -> None:
    script = [DEPLOY / "torchrun/train.sh", DEPLOY / "train.py"]
    ran = run(["bash", *script, "--steps", "16", "--kill-at", "9"], environment, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second = starts(ran.stdout)
    assert first == 0
    assert 0 < second <= 9, "a step that both had"
    assert "step 16: loss" in ran.stdout
    again = run(["bash", *script, "--steps", "20"], environment, tmp_path)
    (third,) = starts(again.stdout)
    assert second <= third <= 16, "the holder stayed, and the same command goes on; a busy machine skips versions"


def test_slurm_runs_a_holder_beside_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    """With stand-ins: `srun` runs a step on this machine, `scontrol` notes what it is asked for."""
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "1"}
    command = ["bash", DEPLOY / "slurm/train.sbatch", DEPLOY / "train.py", "--steps", "12", "--kill-at", "7"]
    ran = run(command, environment | slurm, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second = starts(ran.stdout)
    assert first == 0
    assert 0 < second <= 7
    assert "Stopped the holder" in ran.stdout, "before the job ends"
    assert not (tmp_path / "scontrol").exists()
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(3)\n")
    failed = run(["bash", DEPLOY / "slurm/train.sbatch", broken], environment | slurm, tmp_path)
    assert failed.returncode != 0
    assert (tmp_path / "scontrol").read_text() == f"requeue {os.getpid()}\n"


def test_ray_goes_on_after_a_worker_was_killed(environment: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        DEPLOY / "ray/train.py",
        "--steps",
        "14",
        "--kill-at",
        "8",
        "--storage",
        tmp_path / "ray",
    ]
    ran = run([*command, "--name", "killed"], environment | {"RAY_USAGE_STATS_ENABLED": "0"}, tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    printed = ran.stdout + ran.stderr  # Ray prints what workers print, some of it twice
    (found,) = set(re.findall(r"trained to step (\d+), from step (\d+) on in this start, in ([\d.]+) times", printed))
    last, first, saved = map(float, found)
    assert last == 13
    assert 0 < first <= 8, "restored from the memory of the node, not started again"
    assert saved > 1
