"""``thinwire bench checkpoint``: the costs of checkpoints, and the time that they save after a failure."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from thinwire.lab.cli.bench import CHECKPOINT_METHODS, JOBS
from thinwire.lab.cli.commands import Command, listed, option
from thinwire.lab.cli.output import clear_errors, open_console, progress, say, show_table, write_json

if TYPE_CHECKING:
    from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark

app = typer.Typer(add_completion=False)


@app.command(
    cls=Command,
    epilog="Example: thinwire bench checkpoint --link 100mbit --state-mb 4 --compute-ms 1000 --report out.html",
)
def checkpoint(
    job: str = option("--job", "synthetic", f": a model of --state-mb that mostly waits, or {JOBS}"),
    state_mb: float = typer.Option(4.0, help="State of the synthetic job on each host, with its optimizer's."),
    compute_ms: float = typer.Option(
        1000.0, help="Of a step, asleep: the time of an accelerator, which takes no core of this machine."
    ),
    methods: str = option("--methods", CHECKPOINT_METHODS, "; also lm_resiliency and nvrx, if they are installed"),
    hosts: int = option("--hosts", 8, ", one rank and one holder each"),
    link: str = option("--link", "100mbit", "; none for loopback"),
    replicas: int = typer.Option(2, help="Copies of each host's state, its own one included."),
    steps: int = option("--steps", 20, " of a method in one turn"),
    repeat: int = option("--repeat", 10),
    kills: int = typer.Option(2, help="How often all trainers are killed, before a host is lost too; 0: never."),
    dtype: str = option("--dtype", "float32", " of the synthetic model and its moments: float32 or bfloat16"),
    lossless: bool = typer.Option(
        False, "--lossless", help='Code versions, as CheckpointPolicy(compress="lossless") does.'
    ),
    json_path: Path = option("--json"),
    report: Path = option("--report"),
    picture: Path = option("--picture"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Train with a checkpoint in every iteration by each method in turn; then kill the trainings, and a host."""
    from thinwire.lab.bench.checkpoint.report import build_report, write_picture
    from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark
    from thinwire.lab.bench.checkpoint.work import TrainingWork
    from thinwire.lab.testbed.network import Link

    console = open_console({"--report": report, "--json": json_path, "--picture": picture})
    with clear_errors(ValueError, ImportError):
        benchmark = CheckpointBenchmark(
            work=TrainingWork(job, round(state_mb * 1e6), compute_ms / 1e3, dtype),
            methods=listed(methods),
            hosts=hosts,
            link=Link.parse(link),
            steps=steps,
            repeat=repeat,
            replicas=replicas,
            kills=kills,
            compress="lossless" if lossless else None,
            traced=report is not None or picture is not None,
        )
        result = _run(benchmark, quiet)
        _print(result, console)
        if report is not None:
            build_report(result).write(report)
        if picture is not None:
            write_picture(result, picture)
        write_json(result, json_path)


def _run(benchmark: CheckpointBenchmark, quiet: bool) -> dict[str, Any]:
    from thinwire.lab.bench.checkpoint.benchmark import run

    number = count(1)
    with progress("starting hosts", benchmark.parts, quiet) as tell:
        return run(benchmark, lambda part: tell(part, next(number)))


def _print(result: dict[str, Any], console: Console) -> None:
    from thinwire.lab.bench.checkpoint.summary import CAPTION, COLUMNS, conditions, sentences, table_rows

    rows = table_rows(result["rows"])
    show_table(console, COLUMNS, rows, conditions(result), CAPTION, texts=("method",), centered=True)
    say(console, *sentences(result))
