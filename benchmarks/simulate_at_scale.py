"""Published models on 2 to 4096 simulated ranks, and the papers' results beside it: the tables of
docs/internals/planning-at-scale.md, as Markdown.

    python benchmarks/simulate_at_scale.py [--json rows.json]

Nothing is measured: the timeline of `thinwire.lab.espresso.engine` at published costs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from thinwire.lab.espresso.models import MODELS
from thinwire.lab.espresso.models.published import TESTBEDS
from thinwire.lab.espresso.models.results import RESULTS, SCALING_FACTORS, PublishedResult
from thinwire.lab.espresso.scale import METHODS, ScaleRow, at_scale, compare, simulate

TESTBED_OF = {result.model: result.testbed for result in RESULTS}


def line(cells: Sequence[object]) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def header(cells: Sequence[str]) -> None:
    line(cells)
    print("|" + "---|" * len(cells))


def scale(model: str) -> list[ScaleRow]:
    """Scaling factors, a line for each number of ranks."""
    rows = list(at_scale(model, TESTBED_OF[model]))
    print(f"\n{model}, {rows[0].algorithm}, {TESTBEDS[TESTBED_OF[model]]().name}\n")
    header(["ranks", "hosts x ranks", *METHODS])
    for world_size, group in groupby(rows, key=lambda row: row.world_size):
        found = list(group)
        factors = [f"{row.scaling_factor:.2f}" for row in found]
        line([world_size, f"{found[0].hosts} x {found[0].ranks_per_host}", *factors])
    return rows


def published(results: Sequence[PublishedResult]) -> None:
    """Throughput relative to the first method: as published / as simulated."""
    agreeing = total = 0
    header(["model", "algorithm", "testbed", "published / simulated", "pairs in order", "the other way round"])
    for result in results:
        comparison = compare(result)
        names = [name for name, _ in result.throughput]
        texts = [
            f"{name} {said:.2f} / {found:.2f}"
            for name, said, found in zip(names, comparison.published, comparison.predicted, strict=True)
        ]
        wrong = [f"{fast} > {slow}" for fast, slow, agrees in comparison.pairs if not agrees]
        right = len(comparison.pairs) - len(wrong)
        agreeing, total = agreeing + right, total + len(comparison.pairs)
        cells = [result.model, result.algorithm, result.testbed, ", ".join(texts)]
        line([*cells, f"{right} of {len(comparison.pairs)}", ", ".join(wrong) or "-"])
    print(f"\n{agreeing} of {total} pairs are in the published order.")


def scaling_factors() -> None:
    header(["model", "algorithm", "testbed", "method", "published", "simulated"])
    for result in SCALING_FACTORS:
        names, said = zip(*result.throughput, strict=True)
        rows = simulate(result.model, TESTBEDS[result.testbed](), result.algorithm, names)
        for row, value in zip(rows, said, strict=True):
            cells = [result.model, result.algorithm, result.testbed, row.method]
            line([*cells, f"{value:.2f}", f"{row.scaling_factor:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    print("## Throughput on 64 GPUs, relative to the first method\n")
    published(RESULTS)
    print("\n## Scaling factors on 64 GPUs\n")
    scaling_factors()
    print("\n## Scaling factors from 2 to 4096 ranks")
    rows = [row for model in MODELS for row in scale(model)]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
