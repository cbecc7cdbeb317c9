"""Whether what the doctor measures is what a user's clock sees: ten scripts, their stock step beside a separate run.

    python benchmarks/doctor_truth.py --links 100mbit 1gbit --json truth.json

Each script of `doctor_scripts.py` runs alone on emulated hosts, then under ``thinwire doctor``, then alone again; the
separate figure is the median whole optimizer step of both runs together, by the script's own log. Where the two runs
differ by more than the tolerance, other work came or went: the script is measured again, and a row that is not steady
after that says nothing. Needs CAP_NET_ADMIN.
``hf-trainer`` needs transformers and accelerate, and is left out without them.
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
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from doctor_scripts import SCRIPTS
from thinwire.lab.analyze.trials import counts, run_on_ranks
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.planning.planner import LOSSY_WORTH
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

SCRIPT = Path(__file__).with_name("doctor_scripts.py")
WARM_STEPS = 2
TOLERANCE = 0.15


def run_rank(context: RankContext, name: str, steps: int, log: str) -> None:
    from thinwire.lab.analyze.trials import silence, torchrun_environment

    os.environ.update(torchrun_environment(context), STEPS_LOG=log)
    silence()
    run_as_main(str(SCRIPT), [name, "--steps", str(steps)])


def alone(name: str, link: str, ranks: int, steps: int) -> list[float]:
    """Return the seconds of a script's optimizer steps, by its own clock."""
    with tempfile.TemporaryDirectory() as directory, EmulatedNetwork(ranks, Link.parse(link)) as network:
        log = Path(directory) / "steps"
        run_on_ranks(run_rank, name, steps, str(log), world_size=ranks, network=network)
        moments = [float(line) for line in log.read_text().split()]
    return [end - start for start, end in pairwise(moments[WARM_STEPS:])]


def doctor(name: str, link: str, ranks: int) -> tuple[int, dict[str, Any], float]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "doctor.json"
        began = time.monotonic()
        command = [sys.executable, "-m", "thinwire", "doctor", "--quiet", "--ranks", str(ranks), "--link", link]
        done = subprocess.run([*command, "--json", str(path), str(SCRIPT), name], capture_output=True, text=True)
        if not path.exists():
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        return done.returncode, json.loads(path.read_text()), time.monotonic() - began


def judge(name: str, link: str, ranks: int) -> dict[str, Any]:
    before = alone(name, link, ranks, 6 + WARM_STEPS)
    status, data, seconds = doctor(name, link, ranks)
    warm, timed = counts(statistics.median(before))
    after = alone(name, link, ranks, warm + timed + WARM_STEPS)
    separate, apart = statistics.median([*before, *after]), [statistics.median(before), statistics.median(after)]
    rows = {row["name"]: row for row in data["confirmed"]}
    measured = {name: row["measured_step_seconds"] for name, row in rows.items() if row["measured_step_seconds"]}
    taken, best = (data["advice"] or {}).get("name"), (data["best_exact"] or {}).get("name")
    right: bool | None = taken == best or taken == "stock DDP"
    if taken in measured and best in measured and rows[taken]["loss"]:
        right = LOSSY_WORTH * measured[taken] <= measured[best]
    if data["error"]:
        right = None  # there is no advice
    return {
        "script": name,
        "link": link,
        "passes": data["passes"],
        "synchronizations": data["synchronizations"],
        "separate_seconds": separate,
        "separate_before_seconds": apart[0],
        "separate_after_seconds": apart[1],
        "doctor_stock_seconds": data["stock_step_seconds"],
        "predicted_stock_seconds": rows["stock DDP"]["predicted_step_seconds"],
        "steady": max(apart) <= (1 + TOLERANCE) * min(apart),
        "off": data["stock_step_seconds"] / separate - 1,
        "advice": taken,
        "best_exact": best,
        "advice_follows_the_rules": right,
        "measured": measured,
        "not_tried": [name for name, row in rows.items() if row["failure"].startswith("not tried")],
        "error": data["error"],
        "exit_status": status,
        "doctor_seconds": seconds,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--links", nargs="*", default=["100mbit"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for link in options.links:
        for name in options.scripts:
            if name == "hf-trainer" and find_spec("transformers") is None:
                continue
            try:
                row = judge(name, link, options.ranks)
                row = row if row["steady"] else judge(name, link, options.ranks)
            except Exception as error:
                row = {"script": name, "link": link, "failed": str(error)}
                print(f"{name:20} {link:>8}  FAILED {error}", flush=True)
            else:
                print(
                    f"{name:20} {link:>8}  {row['passes']:2}/{row['synchronizations']}  separate"
                    f" {row['separate_seconds']:.3f} s ({row['separate_before_seconds']:.3f},"
                    f" {row['separate_after_seconds']:.3f})  doctor {row['doctor_stock_seconds']:.3f} s"
                    f" ({row['off']:+.0%}, predicted {row['predicted_stock_seconds']:.3f})  {row['advice']}"
                    f"{' AGAINST THE RULES' if row['advice_follows_the_rules'] is False else ''}  {row['error'] or ''}"
                    f"{'' if row['steady'] else ' NOT STEADY'}"
                    f" {row['doctor_seconds']:.0f} s, load {row['load']:.0f}",
                    flush=True,
                )
            rows.append(row)
            if options.json is not None:
                options.json.write_text(json.dumps({"tolerance": TOLERANCE, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
