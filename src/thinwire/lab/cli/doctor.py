"""``thinwire doctor``: a diagnosis whether a training should synchronize its gradients in another way at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from thinwire.lab.bench.in_job import is_first_rank, is_in_job
from thinwire.lab.cli import output as shown
from thinwire.lab.cli import plan
from thinwire.lab.cli.bench import check_job
from thinwire.lab.cli.commands import MODULE, ScriptCommand, announce, option
from thinwire.lab.cli.output import FAILURE, clear_errors, open_console, progress, refuse_with, say, write_json

if TYPE_CHECKING:
    from thinwire.lab.doctor.diagnosis import Diagnosis
    from thinwire.lab.doctor.equal_loss import Judgement
    from thinwire.lab.planning.measurement import Measurement
    from thinwire.lab.planning.training import How
    from thinwire.lab.testbed.network import EmulatedNetwork, Link

EXAMPLES = """Examples:

thinwire doctor train.py --lr 0.1

thinwire doctor --ranks 4 --link 1gbit --picture doctor.png --json doctor.json train.py

thinwire doctor --link 100mbit --loss 1% -m package.train --lr 0.1

thinwire doctor lstm --hosts 8 --link 100mbit --output plan.json

torchrun --nproc-per-node 4 --no-python thinwire doctor mytrain:make
"""


app = typer.Typer(add_completion=False)


@app.command(cls=ScriptCommand, epilog=EXAMPLES)
def doctor(
    context: typer.Context,
    command: list[str] = typer.Argument(
        None,
        metavar="SCRIPT.py|JOB|MODULE:FUNCTION [ARGS]...",
        help="A script, or -m MODULE, for torchrun with a DDP model, and its arguments; a job of bench train; or a"
        " function that returns (model, make_batch, loss).",
    ),
    ranks: int = option("--ranks", 4, min=2),
    hosts: int = option("--hosts", None, " of a job; 8 by default", min=1),
    ranks_per_host: int = option("--ranks-per-host", 1, "; for a job", min=1),
    link: str = option("--link", None, "; by default loopback for a script, and 100mbit for a job"),
    compress: str = option("--compress", plan.COMPRESSORS),
    dense: str = option("--dense", "auto", "; lossless sums are tried where they may pay, or if asked for"),
    steps: int = option("--steps", 9, " to time; then a script is ended", min=1),
    loss: str = typer.Option(
        None,
        metavar="PERCENT",
        help="Train shortly with each compressor on simulated ranks; refuse what ends further above dense.",
    ),
    loss_steps: int = typer.Option(300, metavar="N", help="Steps of these trainings, if the script makes as many."),
    no_confirm: bool = typer.Option(False, "--no-confirm", help="Predict only: do not train the best ways."),
    fresh: bool = option("--fresh", False),
    measured: Path = option("--from"),
    output: Path = option("--output"),
    picture: Path = option("--picture"),
    report: Path = option("--report"),
    json_path: Path = option("--json"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Measure the link and a training, and say whether compression or fusion would pay. It may say: do nothing.

    A script runs as under torchrun and is not changed: once to be measured, then once for each of the best ways; it is
    ended when its steps are timed. All that stands behind it is its own: put options of this command before it.
    """
    from thinwire.lab.analyze.failure import ScriptFailed

    console = open_console({"--output": output, "--picture": picture, "--report": report, "--json": json_path})
    with clear_errors(ValueError, ImportError, ScriptFailed):
        if measured is None and not command:
            raise ValueError("give a script, a job or module:function; or a measurement with --from FILE")
        if measured is not None and command:
            raise ValueError(f"give {command[0]}, to be measured, or --from FILE, not both")
        examined = Examined(command or [], ranks, hosts, ranks_per_host, link, quiet)
        if measured is not None:
            refuse_with(context, plan.MEASURED, "--ranks", "--hosts", "--ranks-per-host", "--steps", "--fresh")
        elif examined.is_script:
            refuse_with(context, "all ranks of a script are on this machine", "--ranks-per-host")
        else:
            refuse_with(context, "a job has --hosts and --ranks-per-host", "--ranks")
        compressors, limit = plan.names_of(compress), None if loss is None else examined.limit(loss)
        if limit is not None and compressors is None:
            from thinwire.lab.planning.planner import defaults

            compressors = defaults("SGD")  # all of them: training shows which suit it
        plan.check_value("--dense", dense, plan.DENSE)
        with examined.network(console) as network:
            if measured is not None:
                from thinwire.lab.planning.measurement import Measurement

                title, measurement = str(measured), _at(Measurement.load(measured), examined.speed())
            else:
                from thinwire.lab.planning.training import How

                how = How(compressors, steps, fresh=fresh)
                title, measurement = examined.target, _measure(examined, network, how)
            if not is_first_rank():
                return
            judgement = None if limit is None else _judged(examined, measurement, compressors or (), limit, loss_steps)
            settings = {"compressors": compressors, "with_plan": output is not None, "dense": dense}
            diagnosis = _diagnose(title, measurement, quiet, judgement=judgement, **settings)
            if examined.target and not no_confirm and not is_in_job():
                diagnosis = _confirmed(diagnosis, examined, network)
        _print(diagnosis, console, output)
        _draw(diagnosis, console, picture, report, output)
        write_json(diagnosis.to_json(), json_path)
        if diagnosis.error:
            raise typer.Exit(FAILURE)


@dataclass
class Examined:
    """What is diagnosed, where it runs, and since when; the other fields are the options of the command."""

    command: list[str]
    ranks: int
    hosts: int | None
    ranks_per_host: int
    link: str | None
    quiet: bool
    began: float = 0.0

    def __post_init__(self) -> None:
        if self.is_script and self.hosts is not None:
            raise ValueError("a script runs on this machine, or by torchrun on yours: give --ranks, not --hosts")
        if self.command[1:] and not self.is_script:
            raise ValueError(
                f"{self.target} takes no arguments, such as {self.command[1]!r}; only scripts (SCRIPT.py, -m MODULE) do"
            )
        if self.is_script:
            shown.existing_script(self.target)
        if self.target and not self.is_script:
            check_job(self.target)

    def limit(self, percent: str) -> float:
        """Return the part of the dense loss by which a lossy way may end above it."""
        if not self.is_script or is_in_job():
            raise ValueError("--loss trains a script with ranks simulated here: give one, and leave out torchrun")
        number = percent.removesuffix("%").strip()
        if not number.replace(".", "", 1).isdigit() or not 0.0 < float(number) < 100.0:
            raise ValueError(f"--loss is a percentage of the dense loss, such as 1%, not {percent!r}")
        return float(number) / 100.0

    @property
    def target(self) -> str:
        return self.command[0] if self.command else ""

    @property
    def is_script(self) -> bool:
        return self.target.endswith(".py") or self.target.startswith(MODULE)

    def speed(self, default: str = "none") -> Link:
        """Return the link that was named, or else the default."""
        from thinwire.lab.testbed.network import Link

        return Link.parse(default if self.link is None else self.link)

    @contextmanager
    def network(self, console: Console) -> Iterator[EmulatedNetwork | None]:
        """Open emulated hosts for a script with a link; None means loopback, or that the target opens its own."""
        from thinwire.lab.testbed.network import EmulatedNetwork, NetAdminError, restart_as_root_of_a_user_namespace

        speed = self.speed()
        if not self.is_script or speed.mbit is None or is_in_job():
            yield None
            return
        with ExitStack() as opened:
            try:
                network = opened.enter_context(EmulatedNetwork(self.ranks, speed))
            except NetAdminError as error:
                if shown.is_command:
                    restart_as_root_of_a_user_namespace()
                console.print(f"[yellow]Predicted from loopback for {self.link}:[/] {error}.", soft_wrap=True)
                network = None
            yield network


def _measure(examined: Examined, network: EmulatedNetwork | None, how: How) -> Measurement:
    target, arguments = examined.target, examined.command[1:]
    if not examined.is_script:
        return plan.measure_target(target, examined.hosts, examined.ranks_per_host, examined.link, how, examined.quiet)
    from thinwire.lab.analyze.steps import measure_script

    announce(target)
    ranks = None if is_in_job() else examined.ranks
    with plan.measuring(examined.quiet) as tell:
        examined.began = time.monotonic()
        tell(f"training steps and link of {target} on {ranks or 'all'} ranks")
        measured = measure_script(Path(target), arguments, ranks, how, network, tell)
    return measured if network is not None else _at(measured, examined.speed())


def _judged(
    examined: Examined, measurement: Measurement, compressors: tuple[str, ...], limit: float, steps: int
) -> Judgement:
    """Train the script shortly with each compressor that would be faster."""
    from thinwire.lab.analyze.simulated import MOST_AT_ONCE, train_shortly
    from thinwire.lab.doctor.equal_loss import contenders, judge
    from thinwire.lab.planning.planner import price_options
    from thinwire.plan.policy import default_policies

    codecs = contenders(measurement, price_options(measurement, compressors, default_policies()[-2:-1], "groups"))
    aim, world_size = (Path(examined.target), examined.command[1:]), measurement.world_size
    at_once = 1 if measurement.device == "cuda" else MOST_AT_ONCE
    with progress(f"Training shortly on {world_size} simulated ranks", quiet=examined.quiet) as tell:
        return judge(codecs, world_size, limit, partial(train_shortly, *aim, world_size, steps, at_once, tell))


def _confirmed(diagnosis: Diagnosis, examined: Examined, network: EmulatedNetwork | None) -> Diagnosis:
    """Train the best ways. On a link that could only be predicted nothing is trained."""
    from thinwire.lab.analyze.trials import BUDGET_SECONDS, try_script
    from thinwire.lab.bench.jobs.named import parse_job
    from thinwire.lab.bench.measured import try_on_hosts
    from thinwire.lab.doctor.advice import advice_of
    from thinwire.lab.doctor.diagnosis import confirm, finalists

    measurement = diagnosis.measurement
    if examined.is_script and network is None and examined.speed().mbit is not None:
        return diagnosis
    advised = [(each, advice_of(each, measurement, diagnosis.options)) for each in finalists(diagnosis)]
    with plan.measuring(examined.quiet) as tell:
        is_first = examined.is_script and diagnosis.judgement is None
        deadline = BUDGET_SECONDS + (examined.began if is_first else time.monotonic())
        if examined.is_script:
            script, arguments = Path(examined.target), examined.command[1:]
            rows = try_script(script, arguments, advised, measurement, network, tell, deadline)
        else:
            job, link = parse_job(examined.target), examined.speed(plan.JOB_LINK)
            rows = try_on_hosts(job, advised, measurement, examined.ranks_per_host, link, tell, deadline)
    return confirm(diagnosis, rows)


def _at(measured: Measurement, link: Link) -> Measurement:
    """The measurement on the link that the user named."""
    return measured if link.mbit is None else measured.at(link.mbit)


def _diagnose(title: str, measurement: Measurement, quiet: bool, **settings: Any) -> Diagnosis:
    """Return the diagnosis; settings are those of `thinwire.lab.doctor.diagnosis.diagnose`."""
    from thinwire.lab.doctor.diagnosis import diagnose

    with progress("pricing links", quiet=quiet) as tell:
        return diagnose(title, measurement, on_speed=lambda done, total: tell(done=done, total=total), **settings)


def _print(diagnosis: Diagnosis, console: Console, output: Path | None) -> None:
    from thinwire.lab.doctor.diagnosis import describe

    text = describe(diagnosis, None if output is None else str(output))
    say(console, text, end="")
    plan.print_doubts(diagnosis.measurement, console)
    if output is not None and not diagnosis.error:
        diagnosis.plan.save(output)
        console.print(f"Plan: [bold]{output}[/]", highlight=False, soft_wrap=True)


def _draw(
    diagnosis: Diagnosis, console: Console, picture: Path | None, report: Path | None, output: Path | None
) -> None:
    from thinwire.lab.doctor.report import TITLE, build_report, draw
    from thinwire.lab.plot import save_picture

    if picture is not None:
        save_picture(lambda axes: draw(axes, diagnosis), picture, 4.0, TITLE)
        console.print(f"Picture: [bold]{picture}[/]", highlight=False)
    if report is not None:
        build_report(diagnosis, None if output is None else str(output)).write(report)
        console.print(f"Report: [bold]{report}[/]", highlight=False)
