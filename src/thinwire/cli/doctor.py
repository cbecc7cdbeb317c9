"""``thinwire doctor``: a diagnosis whether a training should synchronize its gradients in another way at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from thinwire.cli.lazy import ScriptCommand
from thinwire.cli.output import check_directories, clear_errors, console_for, write_json
from thinwire.cli.plan import COMPRESSORS, in_job, is_first_rank, measure_target, names_of, print_doubts, status

if TYPE_CHECKING:
    from thinwire.measure.training import How
    from thinwire.plan.doctor import Diagnosis
    from thinwire.plan.measurement import Measurement

EXAMPLES = """Examples:

thinwire doctor train.py --lr 0.1

thinwire doctor train.py --workers 4 --link 1gbit --picture doctor.png

thinwire doctor lstm --hosts 8 --link 100mbit --output plan.json

torchrun --nproc-per-node 4 --no-python thinwire doctor mytrain:make
"""


app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, epilog=EXAMPLES)
def doctor(
    command: list[str] = typer.Argument(
        None,
        metavar="SCRIPT.py [ARGS]... | JOB | MODULE:FUNCTION",
        help="A script for torchrun with a DDP model, and its arguments; lstm, digits or gpt; or a function that"
        " returns (model, make_batch, loss).",
    ),
    workers: int = typer.Option(4, min=2, help="Ranks of a script, all on this machine."),
    hosts: int = typer.Option(None, min=1, help="Emulated hosts of a job; 8 by default.", show_default=False),
    ranks_per_host: int = typer.Option(1, min=1, help="Ranks of a job that share the link of a host."),
    link: str = typer.Option(
        None,
        help="Of a script: the link to predict for, such as 1gbit, instead of this machine's own. Of a job: of each"
        " emulated host; none for loopback.",
        show_default=False,
    ),
    compress: str = typer.Option(COMPRESSORS, help="Compressors to consider, comma-separated; none for exact ways."),
    steps: int = typer.Option(9, min=1, help="Training steps that are timed; then a script is ended."),
    fresh: bool = typer.Option(False, "--fresh", help="Measure link and compressors again, and forget what is cached."),
    measured: Path = typer.Option(
        None, "--from", metavar="FILE", help="A --measurement of thinwire plan, instead.", show_default=False
    ),
    output: Path = typer.Option(None, metavar="FILE", help="Write the best plan here.", show_default=False),
    picture: Path = typer.Option(
        None, metavar="FILE", help="Draw step time against link speed; .png, .svg or .pdf.", show_default=False
    ),
    report: Path = typer.Option(None, metavar="FILE", help="Write a page with all of it.", show_default=False),
    json_path: Path = typer.Option(
        None, "--json", metavar="FILE", help="Write the figures here; - for standard output.", show_default=False
    ),
) -> None:
    """Measure the link and a training, and say whether compression or fusion would pay. It may say: do nothing.

    A script runs as under torchrun and is not changed; it is ended when its steps are timed. Options that are not
    listed here go to the script.
    """
    from thinwire.lab.analyze.run import ScriptFailed
    from thinwire.lab.testbed.launch import RanksFailed
    from thinwire.lab.testbed.network import NetAdminError

    check_directories({"--output": output, "--picture": picture, "--report": report, "--json": json_path})
    console = console_for(json_path)
    with clear_errors(ValueError, OSError, ImportError, ScriptFailed, RanksFailed, NetAdminError):
        if (measured is None) == (not command):
            raise ValueError("give a script, a job or module:function; or a measurement with --from FILE")
        compressors = names_of(compress)
        if measured is not None:
            title, found = str(measured), _loaded(measured, link)
        else:
            title = command[0]
            how = _how(compressors, steps, fresh)
            found = _measure(command, workers, hosts, ranks_per_host, link, how, console)
        if not is_first_rank():
            return
        diagnosis = _diagnose(title, found, compressors, console)
        _print(diagnosis, console, output)
        _draw(diagnosis, console, picture, report)
        write_json(diagnosis.to_json(), json_path)


def _how(compressors: tuple[str, ...], steps: int, fresh: bool) -> How:
    from thinwire.measure.training import How

    return How(compressors, steps, fresh=fresh)


def _loaded(path: Path, link: str | None) -> Measurement:
    from thinwire.plan.measurement import Measurement

    return _at(Measurement.load(path), link)


def _measure(
    command: list[str],
    workers: int,
    hosts: int | None,
    ranks_per_host: int,
    link: str | None,
    how: How,
    console: Console,
) -> Measurement:
    target, arguments = command[0], command[1:]
    if not target.endswith(".py"):
        if arguments:
            raise ValueError(f"{target} takes no arguments, such as {arguments[0]!r}; only scripts do, and end in .py")
        return measure_target(target, hosts, ranks_per_host, link, how, console)
    if hosts is not None:
        raise ValueError("a script runs on this machine, or by torchrun on yours: give --workers, not --hosts")
    from thinwire.lab.analyze.steps import measure_script, measure_script_in_job

    with status(console) as tell:
        if in_job():
            return _at(measure_script_in_job(Path(target), arguments, how, tell), link)
        tell(f"training steps and link of {target} on {workers} workers")
        return _at(measure_script(Path(target), arguments, workers, how), link)


def _at(measured: Measurement, link: str | None) -> Measurement:
    """The measurement on the link that the user named."""
    from thinwire.lab.testbed.network import Link

    mbit = None if link is None else Link.parse(link).mbit
    return measured if mbit is None else measured.at(mbit)


def _diagnose(title: str, found: Measurement, compressors: tuple[str, ...], console: Console) -> Diagnosis:
    from thinwire.plan.doctor import diagnose

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("pricing links", total=None)

        def on_speed(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return diagnose(title, found, compressors, on_speed=on_speed)


def _print(diagnosis: Diagnosis, console: Console, output: Path | None) -> None:
    from thinwire.plan.doctor import describe

    text = describe(diagnosis, None if output is None else str(output))
    console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
    print_doubts(diagnosis.measurement, console)
    if output is not None:
        diagnosis.plan.save(output)
        console.print(f"Plan: [bold]{output}[/]", highlight=False, soft_wrap=True)


def _draw(diagnosis: Diagnosis, console: Console, picture: Path | None, report: Path | None) -> None:
    from thinwire.lab.doctor_picture import TITLE, build_report, draw
    from thinwire.lab.plot import save_picture

    if picture is not None:
        save_picture(lambda axes: draw(axes, diagnosis), picture, 4.0, TITLE)
        console.print(f"Picture: [bold]{picture}[/]", highlight=False)
    if report is not None:
        build_report(diagnosis).write(report)
        console.print(f"Report: [bold]{report}[/]", highlight=False)
