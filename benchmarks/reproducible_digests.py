"""Train five jobs on many numbers of ranks, with uneven shares: one digest a job.

    python benchmarks/reproducible_digests.py --json digests.json

`bert` is a model of Hugging Face's transformers and `recurrent` is torch's GRU with its dropout; `transformer` has
AdamW, clipping and dropout; `tables` sparse and dense tables; `images` convolutions and GroupNorm. Ranks begin with
different parameters, and are slowed down differently, so that they get shares of different sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("common", "reproducible")]

from reproduced import Fate, alone, on_ranks

JOBS = ("images", "recurrent", "bert", "transformer", "tables")


def digests(job: str, steps: int, micro_batches: int, sizes: list[int]) -> dict[str, Any]:
    """Train a job on each number of ranks; return the digests, and the shares of ranks in all steps."""
    one = alone(job, steps, micro_batches)
    found: dict[str, Any] = {"job": job, "steps": steps, "digest": one.digest, "sizes": {1: one.digest}, "shares": {}}
    for size in sizes:
        fates = [Fate(rank, slow=0.003 * (rank % 3), seed=rank) for rank in range(size)]
        began = time.monotonic()
        made = on_ranks(job, fates, steps, micro_batches, seconds=1200)
        found["sizes"][size] = " ".join(sorted({one.digest for one in made}))
        found["shares"][size] = [len(one.calls) for one in made]
        print(f"{job}, {size} ranks: {found['sizes'][size]}, {time.monotonic() - began:.0f} s", flush=True)
    found["one_digest"] = set(found["sizes"].values()) == {one.digest}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--world-sizes", default="2,3,4,5,6,8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batches", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.world_sizes.split(",")]
    rows = []
    for job in options.jobs.split(","):
        rows.append(digests(job, options.steps, options.micro_batches, sizes))
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))
    raise SystemExit(not all(row["one_digest"] for row in rows))


if __name__ == "__main__":
    main()
