"""``thinwire bench checkpoint``: the costs of checkpoints, and the time that they save after a failure."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from thinwire.cli.bench import CHECKPOINT_METHODS, JOBS
from thinwire.cli.commands import Command, option
from thinwire.cli.output import (
    add_column,
    check_directories,
    clear_errors,
    console_for,
    plain_table,
    print_table,
    progress,
    write_json,
)

if TYPE_CHECKING:
    from thinwire.lab.bench.checkpoint.benchmark import CheckpointBenchmark

app = typer.Typer(add_completion=False)
_ALIASES = {"dcp": "dcp_sync"}


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
        False, "--lossless", help='Code versions, as Checkpointer(compress="lossless") does.'
    ),
    faults: int = typer.Option(
        0, help="Instead of all that: so many random kills of trainers, holders and hosts, each restore compared."
    ),
    seed: int = option("--seed", 0, ", of --faults"),
    json_path: Path = option("--json"),
    report: Path = option("--report"),
    picture: Path = option("--picture"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Train with a checkpoint in every iteration by each method in turn; then kill the trainings, and a host."""
    from thinwire.lab.bench.checkpoint.benchmark import CheckpointBenchmark
    from thinwire.lab.bench.checkpoint.report import write_picture, write_report
    from thinwire.lab.bench.checkpoint.work import TrainingWork
    from thinwire.lab.testbed.launch import RanksFailed
    from thinwire.lab.testbed.network import Link, NetAdminError

    check_directories({"--report": report, "--json": json_path, "--picture": picture})
    console = console_for(json_path)
    if faults:
        with clear_errors(ValueError, RanksFailed):
            result = _faults(faults, seed, console, quiet)
        write_json(result, json_path)
        raise typer.Exit(1 if result["problems"] else 0)
    with clear_errors(ValueError, ImportError, NetAdminError, RanksFailed):
        benchmark = CheckpointBenchmark(
            work=TrainingWork(job, round(state_mb * 1e6), compute_ms / 1e3, dtype),
            methods=tuple(_ALIASES.get(name.strip(), name.strip()) for name in methods.split(",") if name.strip()),
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
            write_report(result, report)
        if picture is not None:
            write_picture(result, picture)
    write_json(result, json_path)


def _run(benchmark: CheckpointBenchmark, quiet: bool) -> dict[str, Any]:
    from thinwire.lab.bench.checkpoint.benchmark import run

    number = count(1)
    with progress("starting hosts", benchmark.parts, quiet) as tell:
        return run(benchmark, lambda part: tell(part, next(number)))


def _faults(faults: int, seed: int, console: Console, quiet: bool) -> dict[str, Any]:
    from thinwire.lab.bench.checkpoint.faults import FaultCampaign

    number = count(1)
    with progress("starting hosts", faults, quiet) as tell:
        result = FaultCampaign(faults, seed, lambda line: tell(line, min(faults, next(number)))).run()
    kinds = ", ".join(f"{times} {kind}" for kind, times in result["faults"].items())
    verdict = ", ".join(f"{times} {name}" for name, times in result["verdict"].items())
    lines = [
        f"{sum(result['faults'].values())} kills (seed {seed}; {kinds}) in {result['trainings']} trainings and"
        f" {result['seconds']:.0f} s; {result['hosts_replaced']} hosts replaced",
        f"restores: {verdict}",
        *result["problems"],
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return result


def _print(result: dict[str, Any], console: Console) -> None:
    from thinwire.lab.bench.checkpoint.summary import CAPTION, COLUMNS, conditions, sentences, table_rows

    table = plain_table(
        title=conditions(result),
        caption=CAPTION,
        title_justify="center",
    )
    for name in COLUMNS:
        add_column(table, name, is_text=name == "method")
    for cells in table_rows(result["rows"]):
        table.add_row(*cells)
    print_table(console, table)
    for sentence in sentences(result):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
