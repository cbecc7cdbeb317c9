"""``thinwire analyze``: the sparsity of a script's gradients, and the bytes and seconds that each scheme would cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.cli.lazy import ScriptCommand
from thinwire.cli.output import STDOUT, check_directories, clear_errors, console_for, plain_table, write_json

if TYPE_CHECKING:
    from thinwire.lab.analyze.prediction import AssumedLink
    from thinwire.lab.analyze.recording import Recording
    from thinwire.lab.analyze.statistics import TableStatistics
    from thinwire.lab.analyze.summary import Analysis

DEFAULT_MODEL = "lstm-lm"

app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand)
def analyze(
    command: list[str] = typer.Argument(
        None, metavar="[SCRIPT.py [ARGS]...]", help="A script for torchrun with a DDP model, and its arguments."
    ),
    model: str = typer.Option(None, help=f"A built-in example instead: {DEFAULT_MODEL} (the default)."),
    workers: int = typer.Option(4, min=2, help="Ranks, all on this machine."),
    steps: int = typer.Option(20, min=1, help="Training steps to record; then the script is ended."),
    link: str = typer.Option("10gbit", help="Link of each rank, such as 100mbit or 1gbit, to predict seconds for."),
    latency: str = typer.Option("50us", help="Between two ranks, such as 50us or 0.2ms, to predict seconds for."),
    json_path: Path = typer.Option(
        None, "--json", metavar="FILE", help="Write the figures as JSON; - for standard output.", show_default=False
    ),
    report: Path = typer.Option(None, metavar="FILE", help="Write a page with pictures.", show_default=False),
    record: Path = typer.Option(
        None,
        metavar="FILE.npz",
        help="Save the ids of the largest sparse table, for thinwire bench sync --trace.",
        show_default=False,
    ),
) -> None:
    """Record which gradient rows a training script touches; predict bytes and seconds of every scheme on 2..1024 ranks.

    The script runs as under torchrun and is not changed: every DistributedDataParallel model that it builds is watched.
    Options that are not listed here go to the script; put -- before SCRIPT.py to give it all that follows.

    Example: thinwire analyze train.py --workers 4 --steps 20 --link 1gbit --json out.json
    """
    from thinwire.lab.analyze.report import build_report
    from thinwire.lab.analyze.run import ScriptFailed
    from thinwire.lab.analyze.summary import Analysis
    from thinwire.lab.bench.trace import save_trace

    check_directories({"--json": json_path, "--report": report, "--record": record})
    console = console_for(json_path)
    with clear_errors(ValueError, OSError, ScriptFailed):
        network = parse_network(link, latency)
        script, path = _script(command or [], model)
        console.print(f"Recording {steps} steps of {script} on {workers} workers ...", highlight=False)
        watched = console.is_terminal and json_path != STDOUT
        recording = _record(console, watched, path, (command or [])[1:], workers, steps)
        analysis = Analysis.of(recording, script, steps, network)
        _print(analysis, console)
        write_json(analysis.to_json(), json_path)
        if report is not None:
            build_report(analysis).write(report)
            console.print(f"Pictures and all figures: [bold]{report}[/]")
        if record is not None:
            save_trace(record, analysis.largest_trace())
            console.print(f"Ids of {analysis.sparse[0].name}: [bold]{record}[/]")


def parse_network(link: str, latency: str) -> AssumedLink:
    """Parse ``--link`` and ``--latency``. Raises ValueError for a text that is no rate, or no time above 0."""
    from thinwire.lab.analyze.prediction import AssumedLink
    from thinwire.lab.testbed.network import Link

    mbit = Link.parse(link).mbit
    if mbit is None:
        raise ValueError("seconds are predicted for a link with a rate: give --link such as 100mbit or 10gbit")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms)", latency.strip().lower())
    seconds = float(match[1]) / {"us": 1e6, "ms": 1e3}[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"unknown latency {latency!r}; legal forms: '50us', '0.2ms', above 0")
    return AssumedLink(mbit, seconds)


def _script(command: list[str], model: str | None) -> tuple[str, Path]:
    """Name and path of the script to run."""
    from thinwire.lab.analyze.run import MODELS

    if command and model is not None:
        raise ValueError("give a script or --model, not both")
    if command:
        return command[0], Path(command[0])
    name = model or DEFAULT_MODEL
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; built in are: {', '.join(MODELS)}")
    return name, MODELS[name]


def _record(console: Console, watched: bool, path: Path, arguments: list[str], workers: int, steps: int) -> Recording:
    """Record with a bar of the steps done so far, if ``watched``."""
    from thinwire.lab.analyze.run import run_script

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not watched)
    with progress:
        task = progress.add_task("steps recorded", total=steps)

        def on_step(done: int) -> None:
            progress.update(task, completed=done)

        return run_script(path, arguments, workers=workers, steps=steps, on_step=on_step if watched else None)


def _print(analysis: Analysis, console: Console) -> None:
    from thinwire.lab.analyze.report import overview
    from thinwire.lab.analyze.summary import warnings_of

    console.print(analysis.conditions, highlight=False)
    if not analysis.sparse:
        console.print("No parameter has a sparse gradient: a dense all-reduce is right for all of them.")
        return
    columns, rows, note = overview(analysis)
    table = _table("Sparse tables", columns)
    table.caption = note
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for statistics in analysis.sparse:
        console.print(_predictions_table(statistics))
        for warning in warnings_of(statistics):
            console.print(f"[yellow]{escape(warning)}[/]", highlight=False)
        console.print(f"Pick: {statistics.prediction(statistics.world_size).explanation}.", highlight=False)
    console.print(f"Seconds are predicted: {analysis.network.describe()}.", highlight=False)


def _predictions_table(statistics: TableStatistics) -> Table:
    from thinwire.lab.demo.summary import format_bytes, format_seconds

    table = _table(
        f"{statistics.name}: predicted for a step",
        ["ranks", "rows together", "pick", "bytes", "dense", "time", "dense time"],
    )
    for prediction in statistics.predictions:
        sent, seconds = prediction.bytes, prediction.seconds
        table.add_row(
            f"{prediction.world_size}{'*' if prediction.extrapolated else ''}",
            f"{prediction.union:,.0f}",
            prediction.pick,
            format_bytes(sent[prediction.pick]),
            format_bytes(sent["dense"]),
            format_seconds(seconds[prediction.pick]),
            format_seconds(seconds["dense"]),
        )
    table.caption = (
        f"* extrapolated by n^{statistics.densification_exponent:.2f}. Bytes of a rank with an even load, time of the"
        " busiest. All schemes: --json, --report."
    )
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = plain_table(title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("parameter", "pick") else "right", overflow="fold")
    return table
