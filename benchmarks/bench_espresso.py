"""Espresso on the six published models and the paper's two testbeds, as Markdown for docs/internals/espresso.md.

    python benchmarks/bench_espresso.py [--repeat 5]

Steps are simulated: nothing is trained. "As published" are Algorithms 1 and 2 alone. Times to select and to offload are
processor time on this machine, the least of some, and to refine of one; the other figures are the same everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from espresso.espresso import Strategy, espresso
from espresso.job import EspressoJob, job_of
from espresso.options import CPU
from espresso.testbeds import TESTBEDS
from published.models import MODELS

COLUMNS = (
    "model",
    "tensors",
    "link",
    "dense ms",
    "as published ms",
    "Espresso ms",
    "speed-up",
    "upper bound ms",
    "from it",
    "no plan below ms",
    "from that",
    "compressed",
    "on processors",
    "Algorithm 2",
    "select ms",
    "offload ms",
    "refine ms",
)


def table(rows: Iterable[Iterable[object]]) -> None:
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def row(name: str, job: EspressoJob, repeat: int) -> list[object]:
    best = espresso(job)
    published = [best, *(espresso(job, bound=False, refining=False) for _ in range(repeat - 1))]
    assert best.offloaded is not None
    assert best.refined is not None
    proven = best.refined.proven_seconds
    return [
        f"{name}, {job.compression.name}",
        job.num_tensors,
        job.cluster.name,
        _step(best, best.dense_seconds),
        _step(best, best.published_seconds),
        _step(best, best.iteration_seconds),
        f"{best.speedup:.2f}x",
        _step(best, best.upper_bound_seconds),
        f"{100 * best.from_upper_bound:.1f} %",
        _step(best, proven),
        f"{100 * (1 - job.step_seconds(proven) / job.step_seconds(best.iteration_seconds)):z.1f} %",
        len(best.compressed),
        sum(CPU in option.devices for option in best.choices),
        f"{len(best.offloaded.tensors)} ({best.offloaded.method})",
        f"{1e3 * min(strategy.selection_seconds for strategy in published):.0f}",
        f"{1e3 * min(strategy.offload_seconds for strategy in published):.0f}",
        f"{1e3 * best.refine_seconds:.0f}",
    ]


def _step(strategy: Strategy, iteration_seconds: float) -> str:
    return f"{1e3 * strategy.job.step_seconds(iteration_seconds):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=5, help="selections of which the quickest counts")
    arguments = parser.parse_args()
    jobs = ((name, job_of(MODELS[name](), make())) for make in TESTBEDS.values() for name in MODELS)
    table(row(name, job, arguments.repeat) for name, job in jobs)


if __name__ == "__main__":
    main()
