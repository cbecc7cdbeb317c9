"""``thinwire bench checkpoint``: the costs of checkpoints, and the time that they save after a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.cli.output import check_directories, clear_errors, console_for, plain_table, write_json
from thinwire.lab.bench.checkpoint.benchmark import CheckpointBenchmark, run
from thinwire.lab.bench.checkpoint.methods import METHODS
from thinwire.lab.bench.checkpoint.report import write_picture, write_report
from thinwire.lab.bench.checkpoint.summary import CAPTION, COLUMNS, conditions, sentences, table_rows
from thinwire.lab.bench.checkpoint.work import SYNTHETIC, TrainingWork
from thinwire.lab.bench.jobs.named import JOBS
from thinwire.lab.testbed.launch import RanksFailed
from thinwire.lab.testbed.network import Link, NetAdminError

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: thinwire bench checkpoint --hosts 8 --link 100mbit --state-mb 4 --compute-ms 1000 --html out.html"
)
def checkpoint(
    job: str = typer.Option(
        SYNTHETIC, help=f"What to train: a model of --state-mb that mostly waits, or {', '.join(JOBS)}."
    ),
    state_mb: float = typer.Option(4.0, help="State of the synthetic job on each host, with its optimizer's."),
    compute_ms: float = typer.Option(
        1000.0, help="Of a step, asleep: the time of an accelerator, which takes no core of this machine."
    ),
    methods: str = typer.Option(",".join(METHODS), help="Comma-separated; a checkpoint in every iteration."),
    hosts: int = typer.Option(8, help="Emulated hosts, one rank and one holder each."),
    link: str = typer.Option("100mbit", help="Speed of each host's link, such as 100mbit or 1gbit; none for loopback."),
    replicas: int = typer.Option(2, help="Copies of each host's state, its own one included."),
    steps: int = typer.Option(20, help="Iterations of a block; the methods take turns, block by block."),
    repeat: int = typer.Option(10, help="Turns: each method makes so many blocks."),
    kills: int = typer.Option(2, help="How often all trainers are killed, before a host is lost too; 0: never."),
    json_path: Path = typer.Option(
        None, "--json", help="Write the rows here; - for standard output.", show_default=False
    ),
    html: Path = typer.Option(None, help="Write a page with a picture of the links here.", show_default=False),
    picture: Path = typer.Option(
        None, help="Write the picture of the links here: .png, .svg or .pdf.", show_default=False
    ),
) -> None:
    """Train with a checkpoint in every iteration by each method in turn; then kill the trainings, and a host."""
    check_directories({"--html": html, "--json": json_path, "--picture": picture})
    console = console_for(json_path)
    with clear_errors(ValueError, ImportError, NetAdminError, RanksFailed):
        benchmark = CheckpointBenchmark(
            work=TrainingWork(job, round(state_mb * 1e6), compute_ms / 1e3),
            methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
            hosts=hosts,
            link=Link.parse(link),
            steps=steps,
            repeat=repeat,
            replicas=replicas,
            kills=kills,
            traced=html is not None or picture is not None,
        )
        result = _run(benchmark, console)
        _print(result, console)
        if html is not None:
            write_report(result, html)
        if picture is not None:
            write_picture(result, picture)
    write_json(result, json_path)


def _run(benchmark: CheckpointBenchmark, console: Console) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting hosts", total=benchmark.parts)
        return run(benchmark, lambda done: progress.update(task, advance=1, description=done))


def _print(result: dict[str, Any], console: Console) -> None:
    table = plain_table(
        title=conditions(result),
        caption=CAPTION,
        title_justify="center",
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for cells in table_rows(result["rows"]):
        table.add_row(*cells)
    console.print(table)
    for sentence in sentences(result):
        console.print(sentence, highlight=False, soft_wrap=True)
