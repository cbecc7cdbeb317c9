"""The expected time of each way of a table on GPUs, for links and devices, as Markdown: the tables of docs/gpu.md.

    python benchmarks/gpu_roofline.py

Computed by `thinwire.lab.studies.gpu_roofline`; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.lab.bench.recipes import RECIPES
from thinwire.lab.studies.gpu_roofline import A100, FABRICS, H100, collective, native, staged, taken
from thinwire.sync.choose import Demand

RANKS = 8
TABLES = {
    "1M x 64, 5.2 %": Demand(RANKS, 1_000_000, 64, 4, 52_000, 350_000),
    **{
        f"{recipe.name}: {recipe.num_rows / 1e6:.2f}M x {recipe.width}, {recipe.density:.1%}": Demand.of(
            [recipe.density * recipe.num_rows] * RANKS, recipe.num_rows, recipe.width, 4
        )
        for recipe in (RECIPES[name] for name in ("lstm", "nmt", "bert", "deepfm"))
    },
    "20,000 x 16, 5 %": Demand.of([1000] * RANKS, 20_000, 16, 4),
}


def rows(table: Iterable[list[str]]) -> None:
    heads, *lines = table
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")
    print()


def work(demand: Demand) -> Iterable[list[str]]:
    yield ["way", "sent MB", "device memory MB", "to and from the host MB", "launches", "waits", "A100 ms", "H100 ms"]
    for way in (native, collective, staged):
        old, new = (way(demand, gpu, FABRICS[-1]) for gpu in (A100, H100))
        yield [
            new.way,
            f"{new.sent_bytes / 1e6:.1f}",
            f"{new.memory_bytes / 1e6:.0f}",
            f"{new.staged_bytes / 1e6:.0f}",
            str(new.census.launches),
            str(new.census.waits),
            *(f"{1e3 * (each.seconds - each.wire_seconds):.2f}" for each in (old, new)),
        ]


def times() -> Iterable[list[str]]:
    yield ["table, 8 ranks, H100", *(fabric.name for fabric in FABRICS)]
    for name, demand in TABLES.items():
        cells = []
        for fabric in FABRICS:
            route = taken(demand, fabric)
            each = [way(demand, H100, fabric) for way in (native, collective, staged)]
            cells.append(" / ".join(f"**{milliseconds(one.seconds)}**" if one.way == route else milliseconds(one.seconds) for one in each))  # fmt: skip # noqa: E501
        yield [name, *cells]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def main() -> None:
    print("**What a way does besides sending: 1M x 64 float32, 5.2 % of the rows on each of 8 ranks**\n")
    rows(work(next(iter(TABLES.values()))))
    print("**Milliseconds by native / collective / staged; bold is what `auto` takes**\n")
    rows(times())


if __name__ == "__main__":
    main()
