"""Lose hosts and freeze workers of a training under torchrun, again and again, and say how soon it goes on.

    python benchmarks/elastic_losses.py --losses 100 --frozen 20 --out losses.jsonl      # as root, for emulated hosts

Three emulated hosts train, and one stands by (`examples/elastic_cluster.py`). Five faults make a training; at its end
the parameters must be, to the bit, those of an undisturbed one. Each fault is a line of the file, written when its
training has ended well, so an interrupted campaign goes on where it was. It takes 2 minutes for 5 faults on two cores.
A loss takes every process of a host and its link; a frozen worker is stopped (SIGSTOP), and its agent lives. ``--cold``
starts workers without the warm process, to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from elastic_cluster import run_elastic

PER_TRAINING = 5
STEP_TIMEOUT = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--frozen", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="without the warm process")
    parser.add_argument("--width", type=int, default=64, help="of the model's hidden layers, by which the state grows")
    parser.add_argument("--out", type=Path, default=Path("losses.jsonl"))
    options = parser.parse_args()
    for fault, count in (("lose", options.losses), ("hang", options.frozen)):
        while (done := len(rows_of(options.out, fault))) < count:
            faults = [fault] * min(PER_TRAINING, count - done)
            warm = not options.cold
            rows = run_elastic(faults=faults, seed=done, width=options.width, warm=warm, step_timeout=STEP_TIMEOUT)
            with options.out.open("a") as file:
                file.writelines(json.dumps({**row, "load": round(os.getloadavg()[0], 1)}) + "\n" for row in rows)
            print(summary(fault, rows_of(options.out, fault)), flush=True)


def rows_of(path: Path, fault: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["fault"] == fault]


def summary(fault: str, rows: list[dict[str, Any]]) -> str:
    """Return the median and the extremes of the seconds to the next step, and of the phases on the way to it."""
    seconds = sorted(row["step_seconds"] for row in rows)
    phases = {
        phase: statistics.median(row[f"{phase}_seconds"] for row in rows)
        for phase in ("started", "imported", "joined", "restored")
    }
    load = statistics.median(row["load"] for row in rows)
    return (
        f"{len(rows)} x {fault}: next step after {statistics.median(seconds):.2f} s (median; {seconds[0]:.2f} to"
        f" {seconds[-1]:.2f}), {' '.join(f'{phase} {value:.2f}' for phase, value in phases.items())}; lost steps"
        f" {sum(row['lost_steps'] for row in rows)}, at most {max(row['lost_steps'] for row in rows)}; load {load};"
        " digests of the undisturbed training"
    )


if __name__ == "__main__":
    main()
