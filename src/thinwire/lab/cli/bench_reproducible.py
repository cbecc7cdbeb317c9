"""``thinwire bench reproducible``: one job on several numbers of ranks, bit by bit."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from thinwire.lab.cli.bench import JOBS, check_job, compile_kernels
from thinwire.lab.cli.commands import Command, option
from thinwire.lab.cli.output import clear_errors, open_console, progress, say, show_table, write_json

app = typer.Typer(add_completion=False)


@app.command(
    cls=Command, epilog="Example: thinwire bench reproducible --job gpt --world-sizes 1,2,3,8 --micro-batches 24"
)
def reproducible(
    job: str = option("--job", "gpt", f": {JOBS}, with settings behind a colon (gpt:autocast=bfloat16)"),
    world_sizes: str = typer.Option("1,2,4", metavar="N,N,...", help="Numbers of ranks, one run each."),
    micro_batches: int = typer.Option(24, metavar="N", min=1, help="Micro-batches of a step, on all ranks together."),
    steps: int = option("--steps", 10),
    seed: int = option("--seed", 0),
    link: str = option("--link", "none", "; none for loopback"),
    stock: bool = typer.Option(True, help="Train by stock DDP too, whose bits depend on the number of ranks."),
    json_path: Path = option("--json"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Train one job on several numbers of ranks, and say where two runs part first: step and parameter."""
    from thinwire.lab.bench.reproducible import ReproducibleBenchmark, run
    from thinwire.lab.testbed.network import Link

    console = open_console({"--json": json_path})
    with clear_errors(ValueError, ImportError):
        check_job(job)
        if not all(part.strip().isdecimal() for part in world_sizes.split(",")):
            raise ValueError(f"--world-sizes is {world_sizes!r}: give numbers with commas, such as 1,2,4")
        sizes = tuple(int(part) for part in world_sizes.split(","))
        benchmark = ReproducibleBenchmark(job, sizes, micro_batches, steps, seed, Link.parse(link), stock)
        with progress("starting ranks", None, quiet) as tell:
            compile_kernels(tell, None)
            result = run(benchmark)
        _print(result, console)
        write_json(result, json_path)
    if not result["same_bits"]:
        raise typer.Exit(1)


def _print(result: dict[str, Any], console: Console) -> None:
    cells = [
        [
            row["method"], str(row["ranks"]), row["digest"],
            "step {step}, {parameter}".format_map(at) if (at := row["parts_at"]) else "-",
            f"{row['bits_per_value']:.1f}", f"{row['seconds_median']:.3f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    columns = ("method", "ranks", "digest", "parts at", "bits a value", "step s")
    title = f"{result['job']}, {result['micro_batches']} micro-batches"
    show_table(console, columns, cells, title, texts=columns[:4])
    say(console, "The same bits on all numbers of ranks." if result["same_bits"] else "The bits are not the same.")
