"""Kill ranks of a reproducible training at random, from 8 to 3 and back: each run must end with the digest of one rank.

    python benchmarks/reproducible_kills.py --runs 50 --json kills.json

Pauses are the seconds for which ranks that are left met; the redone micro-batches are not in them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("common", "reproducible")]

from reproduced import Fate, Made, alone, with_fates

RANKS, LEAST, STEPS, MICRO_BATCHES = 8, 3, 120, 24


def fates(draw: random.Random) -> list[Fate]:
    """Each rank with its successors, whose parameters differ; at most five are away at the same time.

    All of them die after the first step has begun: before it, the parameters of a successor of rank 0 would count.
    """
    found = [Fate(rank, is_timed=True) for rank in range(RANKS)]
    last = list(found)
    now, away = 0.0, list[float]()
    for _ in range(draw.randrange(5, 9)):
        now += draw.expovariate(0.6)
        away = [until for until in away if until > now]
        rank = draw.randrange(RANKS)
        if len(away) < RANKS - LEAST and last[rank].waits < now - 3.0:
            last[rank].dies_after = now - last[rank].waits
            back = now + draw.uniform(1.0, 5.0)
            away.append(back)
            last[rank] = Fate(rank, waits=back, seed=9, is_timed=True)
            found.append(last[rank])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    expected = {job: alone(job, STEPS, MICRO_BATCHES).digest for job in ("images", "recurrent", "transformer")}
    kills, right, wrong, pauses, began = 0, 0, list[str](), list[float](), time.monotonic()
    for number in range(options.runs):
        if time.monotonic() - began > options.seconds:
            break
        draw = random.Random(options.seed * 1000 + number)
        plan, job = fates(draw), draw.choice(list(expected))
        outcomes = with_fates(job, plan, STEPS, MICRO_BATCHES, seconds=240.0)
        made = [one for one in outcomes if isinstance(one, Made)]
        killed = sum(not isinstance(one, Made) and one.exit_code == -9 for one in outcomes)
        kills += killed
        late = [one for one in outcomes if not isinstance(one, Made) and one.exit_code != -9]
        unexpected = [str(one.error)[-600:] for one in late if "have ended" not in str(one.error)]
        if made and {one.digest for one in made} == {expected[job]} and not unexpected:
            right += killed
        else:
            digests = sorted({one.digest for one in made})
            wrong.append(f"seed {options.seed}, run {number}, {job}: {digests}, {unexpected}")
        for one in made:
            if one.stats["reproducible/losses"]:
                pauses.append(one.stats["reproducible/pause_seconds"] / one.stats["reproducible/losses"])
        result = {
            "runs": number + 1, "kills": kills, "right": right, "wrong": wrong,
            "pause_median": statistics.median(pauses) if pauses else None, "pause_max": max(pauses, default=None),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
