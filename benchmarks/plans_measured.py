"""Is a plan's prediction true, and is the planned training ever slower than stock DDP? See docs/guides/plans.md.

    python benchmarks/plans_measured.py --jobs lstm --hosts 2 4 8 --links 200mbit 100mbit 50mbit
    python benchmarks/plans_measured.py --jobs lstm digits gpt --hosts 4 --links none 1gbit 200mbit 100mbit 50mbit \
        --json benchmarks/results/plans-measured.json

For every job, number of emulated hosts and link: `thinwire plan --measure` prices all ways to synchronize; the best of
each kind (stock DDP, exact, each compressor) is then trained by `thinwire bench train`, one after the other in one run.
A row has what was predicted for a step and what a step took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import DEFAULTS, Option, best_option, plan_of, price_options
from thinwire.plan.plan import STOCK

THINWIRE = Path(sys.executable).with_name("thinwire")


@dataclass(frozen=True)
class Row:
    """One way to synchronize one job. Seconds are of a step; ``chosen``: by the planner."""

    job: str
    hosts: int
    link: str
    way: str
    groups: int
    chosen: bool
    predicted_seconds: float
    measured_seconds: float
    measured_over_ddp: float

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1.0


def best_of_each_kind(found: Sequence[Option], chosen: Option) -> list[Option]:
    """Stock DDP first; then the fastest exact one, the fastest of each compressor, and the one that was chosen."""
    best: dict[str, Option] = {}
    for way in found[1:]:
        kind = next((text for text in way.compressors if text), "exact")
        if kind not in best or way.seconds < best[kind].seconds:
            best[kind] = way
    picked = [found[0], *best.values()]
    return picked if chosen in picked else [*picked, chosen]


def cell(job: str, hosts: int, link: str, steps: int, compressors: Sequence[str], folder: Path) -> Iterator[Row]:
    """Measure one job on so many hosts."""
    where = ["--job", job, "--hosts", str(hosts), "--link", link]
    file, results = folder / "measurement.json", folder / "train.json"
    names = ",".join(compressors) or "none"
    run("plan", "--measure", *where, "--fresh", "--compress", names, "--measurement", str(file))
    measurement = Measurement.load(file)
    found = price_options(measurement, compressors)
    chosen = best_option(measurement, found)
    picked = best_of_each_kind(found, chosen)
    methods = ["ddp"]
    for place, way in enumerate(picked[1:]):
        plan = folder / f"{place}.json"
        plan_of(way, measurement, found).save(plan)
        methods.append(f"plan:file={plan}")
    settings = ["--steps", str(steps), "--seeds", "1", "--extra", "0"]
    run("bench", "train", *where, *settings, "--methods", ",".join(methods), "--json", str(results))
    measured = {row["method"]: row["step_seconds_median"] for row in json.loads(results.read_text())["rows"]}
    for way, method in zip(picked, methods, strict=True):
        yield Row(
            job,
            hosts,
            link,
            way.name,
            len(way.groups),
            way is chosen,
            measurement.other_seconds + way.seconds,
            measured[method],
            measured[method] / measured["ddp"],
        )


def run(*arguments: str) -> None:
    done = subprocess.run([str(THINWIRE), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"thinwire {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def show(row: Row) -> None:
    print(
        f"{row.job:7} {row.hosts} hosts {row.link:8} {'*' if row.chosen else ' '} {row.way:52} {row.groups:3} groups"
        f"  predicted {1e3 * row.predicted_seconds:7.1f} ms  measured {1e3 * row.measured_seconds:7.1f} ms"
        f"  {row.error:+7.1%}  {1 / row.measured_over_ddp:5.2f}x ddp",
        flush=True,
    )


def conclude(rows: Sequence[Row]) -> None:
    """What follows from all rows."""
    cells: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.job, row.hosts, row.link), []).append(row)
    chosen = [next(row for row in group if row.chosen) for group in cells.values()]
    best = [min(group, key=lambda row: row.measured_seconds) for group in cells.values()]
    regrets = [mine.measured_seconds / other.measured_seconds for mine, other in zip(chosen, best, strict=True)]
    print(f"median error {statistics.median(abs(row.error) for row in rows):.1%} of {len(rows)} ways")
    right = sum(mine is other for mine, other in zip(chosen, best, strict=True))
    print(
        f"{right} of {len(cells)} plans are the fastest way that was measured; a plan takes at most {max(regrets):.2f}"
    )
    print(f"times as long as the fastest, in the median {statistics.median(regrets):.2f} times")
    # To do nothing is stock DDP itself: what its two measurements differ by is noise.
    acting = [row.measured_over_ddp for row in chosen if row.way != STOCK] or [1.0]
    print(f"against stock DDP a plan takes {min(acting):.2f} to {max(1.0, *acting):.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["lstm"])
    parser.add_argument("--hosts", type=int, nargs="+", default=[4])
    parser.add_argument("--links", nargs="+", default=["100mbit"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--compress", nargs="*", default=list(DEFAULTS))
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    options = parser.parse_args()
    rows = []
    for job, hosts, link in product(options.jobs, options.hosts, options.links):
        with tempfile.TemporaryDirectory() as folder:
            for row in cell(job, hosts, link, options.steps, options.compress, Path(folder)):
                rows.append(row)
                show(row)
        if options.json:
            Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    conclude(rows)


if __name__ == "__main__":
    main()
