"""Whether ``thinwire doctor --loss 1%`` advises what holds the loss: five scripts, and full trainings as advised.

    python benchmarks/doctor_losses.py --link 20mbit --json benchmarks/results/doctor-losses-4x20mbit.json

Each script of `loss_scripts.py` goes to the doctor. Then it trains in full on real ranks without a link: exactly, and
by what the doctor accepts, each at the rate that it says, and with other seeds than its own; with --refused
by what it refuses, too. Emulated links need CAP_NET_ADMIN.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loss_scripts import LEARNING_RATES, SCRIPTS
from thinwire.lab.analyze.trials import StepClock, _advised, run_on_ranks, silence, torchrun_environment
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.doctor.advice import Advice
from thinwire.lab.planning.ready import slowest
from thinwire.lab.testbed.rank import RankContext

SCRIPT = Path(__file__).with_name("loss_scripts.py")
RANKS, SEEDS = 4, (11, 12, 13, 14)


def train_rank(context: RankContext, name: str, steps: int, rate: float, seed: int, advice: Advice, log: str) -> None:
    os.environ.update(torchrun_environment(context), LOSS_LOG=log)
    silence()
    clock = StepClock(slowest, on_enough=lambda: None)
    with _advised(advice, clock, lambda function: function):
        arguments = ["--steps", str(steps), "--seed", str(seed), "--lr", str(rate * LEARNING_RATES[name])]
        run_as_main(str(SCRIPT), [name, *arguments])
    clock.close()


def held_out(name: str, steps: int, rate: float, codec: str | None) -> list[float]:
    """Return the held-out losses of full trainings, one for each seed."""
    advice = Advice("dense", None) if codec is None else Advice("lossy", codec)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "losses"
        for seed in SEEDS:
            run_on_ranks(train_rank, name, steps, rate, seed, advice, str(log), world_size=RANKS, network=None)
        return [float(line) for line in log.read_text().split()]


def doctor(name: str, link: str, steps: int) -> tuple[dict[str, Any], str, float]:
    with tempfile.TemporaryDirectory() as directory:
        path, began = Path(directory) / "doctor.json", time.monotonic()
        options = ["--quiet", "--loss", "1%", "--ranks", str(RANKS), "--link", link, "--json", str(path)]
        script = [str(SCRIPT), name, "--steps", str(RANKS * steps)]
        command = [sys.executable, "-m", "thinwire", "doctor", *options, *script]
        done = subprocess.run(command, capture_output=True, text=True)
        if not path.exists():
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        return json.loads(path.read_text()), done.stdout, time.monotonic() - began


def judged(name: str, link: str, steps: int, with_refused: bool) -> dict[str, Any]:
    data, screen, seconds = doctor(name, link, steps)
    print(screen, flush=True)
    losses = data["losses"]
    dense, *rows = losses["rows"]
    taken = (data["advice"] or {}).get("name", "")
    dense_losses = held_out(name, steps, dense["rate"], None)
    trained = []
    for row in rows:
        is_taken = taken.startswith(row["method"])
        if is_taken or not row["refused"] or with_refused:
            try:
                ends = held_out(name, steps, row["rate"], row["method"])
                full = statistics.fmean(end / base - 1.0 for end, base in zip(ends, dense_losses, strict=True))
            except RuntimeError as error:
                ends, full = [], None
                print(str(error)[-500:], flush=True)
            trained.append({**row, "is_advice": is_taken, "held_out": ends, "full_excess": full})
            print(
                f"{name} {row['method']}: doctor {row['excess']:+.2%} ± {row['error']:.2%}, in full {full}", flush=True
            )
    figures = {
        "script": name,
        "seconds": seconds,
        "advice": data["advice"],
        "speedup": data["speedup"],
        "losses": losses,
    }
    return {**figures, "confirmed": data["confirmed"], "dense": dense_losses, "trained": trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", default="20mbit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--refused", action="store_true", help="train in full with what was refused, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.scripts:
        rows.append(judged(name, options.link, options.steps, options.refused))
        if options.json is not None:
            options.json.write_text(
                json.dumps({"link": options.link, "steps": options.steps, "scripts": rows}, indent=1)
            )


if __name__ == "__main__":
    main()
