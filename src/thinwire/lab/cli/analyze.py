"""``thinwire analyze``: the sparsity of a script's gradients, and the bytes and seconds that each scheme would cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from thinwire.lab.cli.commands import ScriptCommand, announce, option
from thinwire.lab.cli.output import clear_errors, existing_script, open_console, progress, say, show_table, write_json

if TYPE_CHECKING:
    from thinwire.lab.analyze.prediction import AssumedLink
    from thinwire.lab.analyze.statistics import TableStatistics
    from thinwire.lab.analyze.summary import Analysis

DEFAULT_MODEL = "lstm-lm"

app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand)
def analyze(
    command: list[str] = typer.Argument(
        None, metavar="[SCRIPT.py|-m MODULE [ARGS]...]", help="A script or module with a DDP model, and its arguments."
    ),
    example: str = typer.Option(None, help=f"A built-in script instead: {DEFAULT_MODEL} (the default)."),
    ranks: int = option("--ranks", 4, min=2),
    steps: int = option("--steps", 20, " to record; then the script is ended", min=1),
    link: str = option("--link", "10gbit", ", to predict seconds for"),
    latency: str = typer.Option("50us", help="Between two ranks, such as 50us or 0.2ms, to predict seconds for."),
    json_path: Path = option("--json"),
    report: Path = option("--report"),
    record: Path = typer.Option(
        None, metavar="FILE.npz", help="Save the ids of the largest sparse table, for thinwire bench sync --trace."
    ),
    quiet: bool = option("--quiet", False),
) -> None:
    """Record which gradient rows a training script touches; predict bytes and seconds of every scheme on 2..1024 ranks.

    The script runs as under torchrun and is not changed: every DistributedDataParallel model that it builds is watched.
    All that stands behind it is its own: put options of this command before it.

    Example: thinwire analyze --ranks 4 --steps 20 --link 1gbit --json out.json train.py --lr 0.1
    """
    from thinwire.lab.analyze.report import build_report
    from thinwire.lab.analyze.run import ScriptFailed, run_script
    from thinwire.lab.analyze.summary import Analysis
    from thinwire.lab.bench.trace import save_trace

    console = open_console({"--json": json_path, "--report": report, "--record": record})
    with clear_errors(ValueError, ScriptFailed):
        network = parse_network(link, latency)
        script, path = _script(command or [], example)
        if command:
            announce(script)
        with progress(f"Recording {steps} steps of {script} on {ranks} ranks", steps, quiet) as tell:
            recording = run_script(
                path, (command or [])[1:], workers=ranks, steps=steps, on_step=lambda done: tell(done=done)
            )
        analysis = Analysis.of(recording, script, steps, network)
        _print(analysis, console)
        write_json(analysis.to_json(), json_path)
        if report is not None:
            build_report(analysis).write(report)
            console.print(f"Pictures and all figures: [bold]{escape(str(report))}[/]", soft_wrap=True)
        if record is not None:
            save_trace(record, analysis.largest_trace())
            name = escape(analysis.sparse[0].name)
            console.print(f"Ids of {name}: [bold]{escape(str(record))}[/]", soft_wrap=True)


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


def _script(command: list[str], example: str | None) -> tuple[str, Path]:
    """Name and path of the script to run."""
    from thinwire.lab.analyze.run import MODELS

    if command and example is not None:
        raise ValueError("give a script or --example, not both")
    if command:
        return command[0], existing_script(command[0])
    name = example or DEFAULT_MODEL
    if name not in MODELS:
        raise ValueError(f"unknown example {name!r}; built in are: {', '.join(MODELS)}")
    return name, MODELS[name]


def _print(analysis: Analysis, console: Console) -> None:
    from thinwire.lab.analyze.report import overview
    from thinwire.lab.analyze.summary import warnings_of

    say(console, analysis.conditions)
    if not analysis.sparse:
        say(console, "No parameter has a sparse gradient: a dense all-reduce is right for all of them.")
        script = analysis.script if analysis.script.endswith(".py") else "train.py"
        say(console, f"Whether compressing or fusing dense gradients pays: thinwire doctor {script}")
        return
    columns, rows, note = overview(analysis)
    _show(console, "Sparse tables", columns, rows, note)
    for statistics in analysis.sparse:
        _show_predictions(console, statistics)
        for warning in warnings_of(statistics):
            console.print(f"[yellow]{escape(warning)}[/]", highlight=False, soft_wrap=True)
        say(console, f"Pick: {statistics.here.explanation}.")
    _show_totals(console, analysis)
    say(console, f"Seconds are predicted: {analysis.network.describe()}.")


def _show_predictions(console: Console, statistics: TableStatistics) -> None:
    from thinwire.lab.demo.summary import format_bytes, format_seconds

    rows = [
        [
            f"{prediction.world_size}{'*' if prediction.extrapolated else ''}",
            f"{prediction.union:,.0f}",
            prediction.pick,
            *(format_bytes(prediction.bytes[name]) for name in (prediction.pick, "dense")),
            *(format_seconds(prediction.seconds[name]) for name in (prediction.pick, "dense")),
        ]
        for prediction in statistics.predictions
    ]
    columns = ["ranks", "rows together", "pick", "bytes", "dense", "time", "dense time"]
    note = (
        f"* extrapolated by n^{statistics.densification_exponent:.2f}. Bytes of a rank with an even load, time of the"
        " busiest. All schemes: --json, --report."
    )
    _show(console, f"{statistics.name}: predicted for a step", columns, rows, note)


def _show_totals(console: Console, analysis: Analysis) -> None:
    from thinwire.lab.demo.summary import format_bytes, format_seconds

    stock = analysis.totals[0]
    rows = [
        [
            total.name,
            format_bytes(total.bytes),
            format_seconds(total.seconds),
            f"{stock.seconds / total.seconds:.2f}x" if total.seconds else "-",
        ]
        for total in analysis.totals
    ]
    title = f"All {len(analysis.recording.tables)} parameters, {analysis.recording.world_size} ranks"
    note = (
        "sparse=True: tables are nn.Embedding(sparse=True), summed by torch's all-gather; it needs an optimizer for"
        " sparse gradients. Communication alone, none of it hidden behind computing."
    )
    _show(console, f"{title}: predicted for a step", ["way", "bytes", "time", "faster"], rows, note)


def _show(console: Console, title: str, columns: list[str], rows: list[list[str]], note: str) -> None:
    show_table(console, columns, rows, title, note, texts=("parameter", "pick", "way"), folds=("rows x width",))
