"""``thinwire doctor``: a diagnosis whether a training should synchronize its gradients in another way at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from thinwire.cli.commands import ScriptCommand, option
from thinwire.cli.output import check_directories, clear_errors, console_for, progress, write_json
from thinwire.cli.plan import COMPRESSORS, in_job, is_first_rank, measure_target, measuring, names_of, print_doubts

if TYPE_CHECKING:
    from thinwire.measure.training import How
    from thinwire.plan.doctor import Diagnosis
    from thinwire.plan.measurement import Measurement

EXAMPLES = """Examples:

thinwire doctor train.py --lr 0.1

thinwire doctor train.py --ranks 4 --link 1gbit --picture doctor.png

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
    ranks: int = option("--ranks", 4, "; for a script", min=2),
    hosts: int = option("--hosts", None, " of a job; 8 by default", min=1),
    ranks_per_host: int = option("--ranks-per-host", 1, "; for a job", min=1),
    link: str = option(
        "--link",
        None,
        ". For a script: the link to predict for, instead of this machine's own. For a job: none for loopback",
    ),
    compress: str = option("--compress", COMPRESSORS),
    steps: int = option("--steps", 9, " to time; then a script is ended", min=1),
    fresh: bool = option("--fresh", False),
    measured: Path = option("--from"),
    output: Path = option("--output"),
    picture: Path = option("--picture"),
    report: Path = option("--report"),
    json_path: Path = option("--json"),
    quiet: bool = option("--quiet", False),
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
            found = _measure(command, ranks, hosts, ranks_per_host, link, how, quiet)
        if not is_first_rank():
            return
        diagnosis = _diagnose(title, found, compressors, quiet)
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
    ranks: int,
    hosts: int | None,
    ranks_per_host: int,
    link: str | None,
    how: How,
    quiet: bool,
) -> Measurement:
    target, arguments = command[0], command[1:]
    if not target.endswith(".py"):
        if arguments:
            raise ValueError(f"{target} takes no arguments, such as {arguments[0]!r}; only scripts do, and end in .py")
        return measure_target(target, hosts, ranks_per_host, link, how, quiet)
    if hosts is not None:
        raise ValueError("a script runs on this machine, or by torchrun on yours: give --ranks, not --hosts")
    from thinwire.lab.analyze.steps import measure_script, measure_script_in_job

    with measuring(quiet) as tell:
        if in_job():
            return _at(measure_script_in_job(Path(target), arguments, how, tell), link)
        tell(f"training steps and link of {target} on {ranks} ranks")
        return _at(measure_script(Path(target), arguments, ranks, how), link)


def _at(measured: Measurement, link: str | None) -> Measurement:
    """The measurement on the link that the user named."""
    from thinwire.lab.testbed.network import Link

    mbit = None if link is None else Link.parse(link).mbit
    return measured if mbit is None else measured.at(mbit)


def _diagnose(title: str, found: Measurement, compressors: tuple[str, ...], quiet: bool) -> Diagnosis:
    from thinwire.plan.doctor import diagnose

    with progress("pricing links", quiet=quiet) as tell:
        return diagnose(title, found, compressors, on_speed=lambda done, total: tell(done=done, total=total))


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
