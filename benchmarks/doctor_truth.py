"""Whether what the doctor says is what a user's clock sees: ten scripts, its figures and advice beside separate runs.

    python benchmarks/doctor_truth.py --links 100mbit 1gbit --json truth.json

Each script of `doctor_scripts.py` runs alone on emulated hosts, then under ``thinwire doctor``, then alone again; the
separate figure is the median whole optimizer step of both runs together, by the script's own log. Then it runs alone
with the lines that the doctor said pasted behind its model, and with those of each exact way, and these runs say
whether the advice was right: an exact way that no other exact one beats by what the doctor asks for, or a lossy one
that is `LOSSY_WORTH` times as fast as the best exact one. No figure of a separate run comes from the doctor.

Where the two runs under stock DDP differ by more than the tolerance, other work came or went, and the row says
nothing. A command that is repeated with the same file measures such rows again, and those that are missing.
Needs CAP_NET_ADMIN. ``hf-trainer`` needs transformers and accelerate, and is left out without them.
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
from collections.abc import Sequence
from functools import wraps
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from torch.nn.parallel import DistributedDataParallel

from doctor_scripts import SCRIPTS
from thinwire.lab.analyze.trials import WARM_STEPS, run_on_ranks, silence, torchrun_environment
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.planning.planner import LOSSY_WORTH
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext
from thinwire.plan.plan import EXACT, STOCK
from thinwire.tune.lossless import TAKEN

SCRIPT = Path(__file__).with_name("doctor_scripts.py")
TOLERANCE = 0.15
SECONDS = 3.0
"""Seconds of timed steps of a run alone, within 5 and 24 steps."""
ATTACH = ["import thinwire", "sync = thinwire.attach(model)"]
LOSSLESS = ["import thinwire", 'sync = thinwire.attach(model, dense="lossless")']


def run_rank(context: RankContext, name: str, steps: int, log: str, lines: list[str], target: str) -> None:
    """Run a script with lines pasted behind its first DDP model, whose name there is ``target``."""
    os.environ.update(torchrun_environment(context), STEPS_LOG=log)
    silence()
    build, names = DistributedDataParallel.__init__, {}

    @wraps(build)
    def init(model: DistributedDataParallel, *args: Any, **settings: Any) -> None:
        build(model, *args, **settings)
        if not names:
            names[target] = model
            exec("\n".join(lines), names)

    with mock.patch.object(DistributedDataParallel, "__init__", init):
        run_as_main(str(SCRIPT), [name, "--steps", str(steps)])
    context.leave(lambda: None)  # a DDP model that is freed behind its group may wait for a thread of Gloo for ever


def alone(
    name: str, link: str, ranks: int, steps: int, lines: Sequence[str] = (), target: str = "model"
) -> list[float]:
    """Return the seconds of so many of a script's optimizer steps, by its own clock, after those that warm up."""
    with tempfile.TemporaryDirectory() as directory, EmulatedNetwork(ranks, Link.parse(link)) as network:
        log, count = Path(directory) / "steps", steps + WARM_STEPS
        where = {"world_size": ranks, "network": network}
        run_on_ranks(run_rank, name, count, str(log), list(lines), target, **where)
        moments = [float(line) for line in log.read_text().split()]
    return [end - start for start, end in pairwise(moments[WARM_STEPS - 1 :])]


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
    before = alone(name, link, ranks, 6)
    status, data, seconds = doctor(name, link, ranks)
    timed = max(5, min(24, round(SECONDS / statistics.median(before))))
    after = alone(name, link, ranks, timed)
    apart = [statistics.median(before), statistics.median(after)]
    separate = {STOCK: statistics.median([*before, *after])}
    exact = {f"{EXACT}, lossless": LOSSLESS, **({f"{EXACT}, tables as rows": ATTACH} if data["tables"] else {})}
    for way, lines in exact.items():
        separate[way] = statistics.median(alone(name, link, ranks, timed, lines))
    best_exact = min(separate, key=lambda way: separate[way])
    advice = data["advice"] or {}
    taken = advice.get("name", "")
    known = next((way for way in separate if taken.startswith(way)), taken)
    if taken and known not in separate:
        target = advice["lines"][-1].partition("attach(")[2].split(",")[0].rstrip(")")
        separate[taken] = statistics.median(alone(name, link, ranks, timed, advice["lines"], target))
    right: bool | None = None
    if taken:
        worth = TAKEN if known == STOCK or known.startswith(EXACT) else 1 / LOSSY_WORTH
        right = separate[known] <= worth * separate[best_exact]
    rows = {row["name"]: row for row in data["confirmed"]}
    return {
        "script": name,
        "link": link,
        "passes": data["passes"],
        "synchronizations": data["synchronizations"],
        "separate_seconds": separate[STOCK],
        "separate_before_seconds": apart[0],
        "separate_after_seconds": apart[1],
        "doctor_stock_seconds": data["stock_step_seconds"],
        "predicted_stock_seconds": rows[STOCK]["predicted_step_seconds"],
        "steady": max(apart) <= (1 + TOLERANCE) * min(apart),
        "off": data["stock_step_seconds"] / separate[STOCK] - 1,
        "advice": taken or None,
        "best_exact": (data["best_exact"] or {}).get("name"),
        "separate_best_exact": best_exact,
        "separate": separate,
        "advice_is_right": right,
        "measured": {way: row["measured_step_seconds"] for way, row in rows.items() if row["measured_step_seconds"]},
        "not_tried": [way for way, row in rows.items() if row["failure"].startswith("not tried")],
        "error": data["error"],
        "exit_status": status,
        "doctor_seconds": seconds,
        "load": os.getloadavg()[0],
    }


def describe(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['script']:20} {row['link']:>8}  FAILED {row['failed']}"
    separate = ", ".join(f"{way} {seconds:.3f}" for way, seconds in row["separate"].items())
    return (
        f"{row['script']:20} {row['link']:>8}  {row['passes']:2}/{row['synchronizations']}  alone"
        f" {row['separate_before_seconds']:.3f} and {row['separate_after_seconds']:.3f} s"
        f"{'' if row['steady'] else ' NOT STEADY'}, doctor {row['doctor_stock_seconds']:.3f} s ({row['off']:+.0%},"
        f" predicted {row['predicted_stock_seconds']:.3f}); separately {separate}; advice {row['advice']}"
        f"{' WRONG' if row['advice_is_right'] is False else ''} {row['error'] or ''}"
        f" {row['doctor_seconds']:.0f} s, load {row['load']:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--links", nargs="*", default=["100mbit"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    rows = {(row["script"], row["link"]): row for row in kept}
    for name, link in [(name, link) for link in options.links for name in options.scripts]:
        if rows.get((name, link), {}).get("steady") or (name == "hf-trainer" and find_spec("transformers") is None):
            continue
        try:
            row = judge(name, link, options.ranks)
        except Exception as error:
            row = {"script": name, "link": link, "failed": str(error)}
        rows[name, link] = row
        print(describe(row), flush=True)
        if options.json is not None:
            report = {"tolerance": TOLERANCE, "rows": list(rows.values())}
            options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
