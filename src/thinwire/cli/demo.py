"""``thinwire demo``: the same language model trained by stock DDP and by thinwire."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.cli.commands import Command, option
from thinwire.cli.output import check_directories, clear_errors, console_for, write_json

if TYPE_CHECKING:
    from thinwire.lab.demo.compare import Comparison, Launch, OnStep
    from thinwire.lab.demo.corpus import Corpus
    from thinwire.lab.demo.train import TrainJob

_LINE_EVERY_STEPS = 20
_LINK_TIMEOUT_SECONDS = 3600.0
_LABELS = {"ddp": "stock DDP", "thinwire": "thinwire"}


app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def demo(
    hosts: int = option("--hosts", 4, ", one rank each; on loopback the ranks", min=1),
    steps: int = option("--steps", 120, " of each of the two runs", min=1),
    link: str = option("--link", "none", "; none for loopback"),
    json_path: Path = option("--json"),
    report: Path = option("--report", Path("report.html")),
    seed: int = option("--seed", 0, min=0),
    quiet: bool = option("--quiet", False),
) -> None:
    """Train one language model twice, by stock DDP and by thinwire, and compare losses, bytes and times.

    The text is the source of Python's standard library, the word tables have sparse gradients.

    Example: thinwire demo --link 100mbit --json demo.json
    """
    check_directories({"--report": report, "--json": json_path})
    console = console_for(json_path)
    from thinwire.lab.testbed.network import NetAdminError

    with clear_errors(NetAdminError):
        comparison = _compare(Console(stderr=True, quiet=quiet), hosts, steps, link, seed)
    _print(console, comparison)
    from thinwire.lab.demo.report import write_report

    write_report(comparison, report)
    console.print(f"Pictures and all figures: [bold]{report}[/bold]")
    write_json(comparison.to_json(), json_path)


def _compare(console: Console, hosts: int, steps: int, link: str, seed: int) -> "Comparison":
    from thinwire.lab.demo.compare import compare
    from thinwire.lab.demo.train import TrainConfig

    launch = None if link == "none" else _emulated(link)
    console.print("Reading the source of Python's standard library ...")
    text = _load_corpus(console)
    console.print(f"{len(text.tokens):,} words of text, {text.num_words:,} distinct.")
    console.print(f"Training on {hosts} ranks, {steps} steps by stock DDP and by thinwire ...")
    with _training_progress(console, steps) as on_step:
        return compare(text, TrainConfig(steps=steps, seed=seed), hosts, on_step, launch)


def _emulated(link_text: str) -> "Launch":
    """Start the workers on emulated hosts, one each."""
    from thinwire.lab.demo.train import train_on_host
    from thinwire.lab.testbed.launch import preload, run_ranks
    from thinwire.lab.testbed.network import EmulatedNetwork, Link, require_net_admin

    try:
        link = Link.parse(link_text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--link") from error

    require_net_admin()
    preload("torch._dynamo")

    def launch(job: "TrainJob", workers: int) -> float:
        with EmulatedNetwork(hosts=workers, link=link) as network:
            link_mbit = network.measure()
            run_ranks(train_on_host, job, world_size=workers, network=network, timeout_seconds=_LINK_TIMEOUT_SECONDS)
        return link_mbit

    return launch


def _load_corpus(console: Console) -> "Corpus":
    from thinwire.lab.demo import corpus

    if not console.is_terminal:
        return corpus.load()
    with _progress_bar(console) as bar:
        task = bar.add_task("splitting into words", total=None, visible=False)
        return corpus.load(progress=lambda done, files: bar.update(task, completed=done, total=files, visible=True))


@contextmanager
def _training_progress(console: Console, steps: int) -> Iterator["OnStep"]:
    """A live bar per run on a terminal, else a line every 20 steps."""
    if not console.is_terminal:
        yield _line_printer(console, steps)
        return
    with _progress_bar(console) as bar:
        tasks = {mode: bar.add_task(label, total=steps) for mode, label in _LABELS.items()}

        def on_step(mode: str, done: int, loss: float) -> None:
            bar.update(tasks[mode], completed=done, description=f"{_LABELS[mode]}  loss {loss:.3f}")

        yield on_step


def _line_printer(console: Console, steps: int) -> "OnStep":
    printed = dict.fromkeys(_LABELS, 0)

    def on_step(mode: str, done: int, loss: float) -> None:
        if done >= printed[mode] + _LINE_EVERY_STEPS or done == steps:
            printed[mode] = done - done % _LINE_EVERY_STEPS
            console.print(f"{_LABELS[mode]}: step {done} of {steps}, loss {loss:.3f}")

    return on_step


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _print(console: Console, comparison: "Comparison") -> None:
    from thinwire.lab.demo.summary import conclusion, conditions, summary_rows

    table = Table(title=conditions(comparison), title_justify="left")
    table.add_column()
    for label in _LABELS.values():
        table.add_column(label, justify="right")
    for row in summary_rows(comparison):
        table.add_row(*row)
    console.print(table)
    console.print(conclusion(comparison), highlight=False)
