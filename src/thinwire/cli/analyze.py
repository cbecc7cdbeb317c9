"""``thinwire analyze``: how sparse the gradients of a training script are, and what each scheme would send."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.cli.output import STDOUT, clear_errors, console_for, write_json

if TYPE_CHECKING:
    from thinwire.analyze.statistics import TableStatistics
    from thinwire.analyze.summary import Analysis

DEFAULT_MODEL = "lstm-lm"

CONTEXT_SETTINGS = {"ignore_unknown_options": True}
"""To register the command with: options that are not ours go to the script."""


def analyze(
    command: list[str] = typer.Argument(
        None, metavar="[SCRIPT.py [ARGS]...]", help="A script for torchrun with a DDP model, and its arguments."
    ),
    model: str = typer.Option(None, help=f"A built-in example instead: {DEFAULT_MODEL} (the default)."),
    workers: int = typer.Option(4, min=2, help="Ranks, all on this machine."),
    steps: int = typer.Option(20, min=1, help="Training steps to record; then the script is ended."),
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
    """Record which gradient rows a training script touches, and predict the bytes of every scheme on 2 to 1024 ranks.

    The script runs as under torchrun and is not changed: every DistributedDataParallel model that it builds is watched.
    Options that are not listed here go to the script; put -- before SCRIPT.py to give it all that follows.

    Example: thinwire analyze train.py --workers 4 --steps 20 --json out.json
    """
    from thinwire.analyze.report import build_report
    from thinwire.analyze.run import ScriptFailed
    from thinwire.bench.trace import save_trace

    _check_directories({"--json": json_path, "--report": report, "--record": record})
    console = console_for(json_path)
    with clear_errors(ValueError, OSError, ScriptFailed):
        analysis = _analyze(console, command or [], model, workers, steps)
        _print(analysis, console)
        write_json(analysis.to_json(), json_path)
        if report is not None:
            build_report(analysis).write(report)
            console.print(f"Pictures and all figures: [bold]{report}[/]")
        if record is not None:
            save_trace(record, analysis.largest_trace())
            console.print(f"Ids of {analysis.sparse[0].name}: [bold]{record}[/]")


def _check_directories(paths: dict[str, Path | None]) -> None:
    for option, path in paths.items():
        if path is not None and path != STDOUT and not path.parent.is_dir():
            raise typer.BadParameter(f"{path.parent} is not a directory", param_hint=option)


def _analyze(console: Console, command: list[str], model: str | None, workers: int, steps: int) -> Analysis:
    from thinwire.analyze.run import MODELS, run_script
    from thinwire.analyze.summary import Analysis

    if command and model is not None:
        raise ValueError("give a script or --model, not both")
    if command:
        name, path = command[0], Path(command[0])
    else:
        name = model or DEFAULT_MODEL
        if name not in MODELS:
            raise ValueError(f"unknown model {name!r}; built in are: {', '.join(MODELS)}")
        path = MODELS[name]
    console.print(f"Recording {steps} steps of {name} on {workers} workers ...", highlight=False)
    recording = run_script(path, command[1:], workers=workers, steps=steps)
    return Analysis.of(recording, name, steps)


def _print(analysis: Analysis, console: Console) -> None:
    from thinwire.analyze.report import overview

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
        console.print(_bytes_table(statistics))


def _bytes_table(statistics: TableStatistics) -> Table:
    from thinwire.demo.summary import format_bytes

    table = _table(
        f"{statistics.name}: bytes that a rank sends in a step", ["ranks", "rows together", "pick", "bytes", "dense"]
    )
    for prediction in statistics.predictions:
        sent = prediction.bytes
        table.add_row(
            f"{prediction.world_size}{'*' if prediction.extrapolated else ''}",
            f"{prediction.union:,.0f}",
            prediction.pick,
            format_bytes(sent[prediction.pick]),
            format_bytes(sent["dense"]),
        )
    table.caption = f"* extrapolated by n^{statistics.densification_exponent:.2f}. All schemes: --json, --report."
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption_justify = "left"
    for column in columns:
        table.add_column(column, justify="left" if column in ("parameter", "pick") else "right", overflow="fold")
    return table
