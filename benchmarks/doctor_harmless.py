"""Whether a real run is the same before and after its script is measured: eleven scripts that keep checkpoints.

    python benchmarks/doctor_harmless.py --json harmless.json

Each script of `checkpoint_scripts.py` trains 12 steps under torchrun; then ``thinwire doctor``, ``analyze`` and
``bench train`` run it; then it goes on to step 20. Right: files are the same bit for bit after each command; the run
goes on from its own step 12; and it ends with the parameters of a run of 20 steps that nothing measured. A script that
saves in mid-training by itself is announced before it starts. ``--interrupt`` sends SIGINT and SIGTERM to the ranks
that a command runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from checkpoint_scripts import ANNOUNCED, SCRIPTS

SCRIPT = Path(__file__).with_name("checkpoint_scripts.py")
THINWIRE = [sys.executable, "-m", "thinwire"]
ANNOUNCEMENT = "what it saves by itself, as by torch.save, is saved"


@contextmanager
def directory() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make an empty directory, and an environment in which the holder of this run is its own."""
    with tempfile.TemporaryDirectory(prefix="tw", dir="/tmp") as made:
        path = Path(made)
        (path / "run").mkdir()
        dropped = ("THINWIRE_", "XDG_RUNTIME", "TORCHELASTIC")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment |= {"THINWIRE_HOLDER": f"{made}/holder", "OMP_NUM_THREADS": "1"}
        try:
            yield path / "run", environment
        finally:
            subprocess.run([*THINWIRE, "holder", "--stop"], env=environment, capture_output=True, check=False)


def run(command: list[str], where: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=400)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout + done.stderr


def interrupted(command: list[str], where: Path, environment: dict[str, str]) -> str:
    """Run a command; when its script trains, send signals to all its processes, as a terminal and a scheduler do."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=where, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        while process.poll() is None:
            said.seek(0)
            if "BEGAN" in said.read():
                time.sleep(0.5)
                for number in (signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                break
            time.sleep(0.05)
        process.wait(60)
        said.seek(0)
        return said.read()


def torchrun(name: str, steps: int, where: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Train on two ranks; return where they began and where they ended, which all print alike."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    said = run([*command, name, "--steps", str(steps)], where, environment)
    # two ranks may write one line, one behind the other
    began, ended = (set(re.findall(rf"{word} (\d+ [0-9a-f]{{12}})", said)) for word in ("BEGAN", "ENDED"))
    if len(began) != 1 or len(ended) != 1:
        raise RuntimeError(f"ranks differ: {began}, {ended}")
    return began.pop(), ended.pop()


def files(where: Path) -> dict[str, str]:
    return {
        str(path.relative_to(where)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in where.rglob("*")
        if path.is_file()
    }


def judge(name: str, interrupt: bool) -> dict[str, Any]:
    with directory() as (where, environment):
        _, expected = torchrun(name, 20, where, environment)
    tools = {
        "doctor": [*THINWIRE, "doctor", "--ranks", "2", "--compress", "bf16", "--steps", "2", str(SCRIPT), name],
        "analyze": [*THINWIRE, "analyze", "--ranks", "2", str(SCRIPT), name],
        "bench": f"bench train --job {SCRIPT}:make --hosts 2 --link none --seeds 1 --steps 8 --methods ddp".split(),
    }
    tools["bench"] = [*THINWIRE, *tools["bench"]]
    row: dict[str, Any] = {"script": name, "interrupt": interrupt, "changed": {}, "announced": True}
    with directory() as (where, environment):
        environment["KEPT_AS"] = name
        _, at_twelve = torchrun(name, 12, where, environment)
        for tool, command in tools.items():
            before = files(where)
            text = (interrupted if interrupt and tool != "bench" else run)(command, where, environment)
            row["announced"] &= ANNOUNCEMENT in text
            after = files(where)
            row["changed"][tool] = sorted(path for path in before | after if before.get(path) != after.get(path))
        began, ended = torchrun(name, 20, where, environment)
    row |= {"kept": at_twelve, "goes_on_from": began, "same_end": ended == expected}
    row["same"] = began == at_twelve and row["same_end"] and not any(row["changed"].values())
    row["right"] = row["announced"] and (row["same"] or name in ANNOUNCED)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--interrupt", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.scripts:
        try:
            row = judge(name, options.interrupt)
        except Exception as error:
            row = {"script": name, "interrupt": options.interrupt, "failed": str(error), "right": False}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
