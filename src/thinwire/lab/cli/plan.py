"""``thinwire plan``: measure a training and its link, and write the best plan for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from thinwire.lab.bench.in_job import is_first_rank, is_in_job
from thinwire.lab.cli.bench import check_job
from thinwire.lab.cli.commands import Command, CommandGroup, announce, listed, option
from thinwire.lab.cli.output import clear_errors, open_console, progress, refuse_with, say, show_table, write_json

if TYPE_CHECKING:
    from thinwire.lab.collectives import CostRow
    from thinwire.lab.planning.measurement import Measurement
    from thinwire.lab.planning.training import How
    from thinwire.plan.plan import Plan
    from thinwire.plan.profile import Linear

COMPRESSORS = "auto"
"""Compressors that suit the optimizer, see `thinwire.lab.planning.planner.defaults`."""
MEASURED = "--from FILE was measured already"
"""Reason for which options of a measurement are refused."""
JOB_LINK = "100mbit"
"""Link of emulated hosts if none is named."""
DENSE = ("auto", "native", "lossless")
"""Values of --dense."""
_EXAMPLES = """Examples:

thinwire plan --measure --hosts 8 --link 100mbit --job lstm --output plan.json

torchrun --nproc-per-node 4 --no-python thinwire plan --measure --job mytrain:make --output plan.json

thinwire plan show plan.json --json -
"""

app = typer.Typer(cls=CommandGroup, invoke_without_command=True, add_completion=False, epilog=_EXAMPLES)


@app.callback()
def make(
    context: typer.Context,
    measure: bool = typer.Option(False, "--measure", help="Measure a training, its ranks and their link."),
    job: str = option(
        "--job", "lstm", ": one of bench train, or module:function, which returns (model, make_batch, loss)"
    ),
    hosts: int = option("--hosts", None, "; 8 by default", min=1),
    ranks_per_host: int = option("--ranks-per-host", 1, min=1),
    link: str = option("--link", None, "; none for loopback"),
    compress: str = option("--compress", COMPRESSORS),
    search: str = typer.Option(
        "espresso", help="What is compressed: decided for each gradient (espresso), or for all of a job alike (groups)."
    ),
    dense: str = option("--dense", "auto", "; auto takes lossless sums where they pay"),
    steps: int = option("--steps", 9, " to time", min=1),
    fresh: bool = option("--fresh", False),
    measured: Path = option("--from"),
    measurement: Path = typer.Option(None, metavar="FILE", help="Write what was measured here."),
    output: Path = option("--output"),
    json_path: Path = option("--json"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Which gradients travel together, how they are compressed, and whether that pays at all."""
    if context.invoked_subcommand is not None:
        return
    if measure == (measured is not None):
        raise typer.BadParameter("give --measure or --from FILE; or: thinwire plan show FILE")
    console = open_console({"--output": output, "--json": json_path, "--measurement": measurement})
    with clear_errors(ValueError, ImportError):
        if measured is not None:
            refuse_with(context, MEASURED, "--job", "--hosts", "--ranks-per-host", "--link", "--steps", "--fresh")
        if measured is None:
            check_job(job)
        compressors = names_of(compress)
        from thinwire.lab.planning.planner import SEARCHES, best_plan

        check_value("--search", search, SEARCHES)
        check_value("--dense", dense, DENSE)
        if measured is not None:
            from thinwire.lab.planning.measurement import Measurement

            result = Measurement.load(measured)
        else:
            from thinwire.lab.planning.training import How

            how = How(compressors, steps, fresh=fresh)
            result = measure_target(job, hosts, ranks_per_host, link, how, quiet)
        if is_first_rank():
            best = best_plan(result, compressors, search=search, dense=dense)
            _finish(result, best, console, measurement, output, json_path)


@app.command(cls=Command, epilog="Example: thinwire plan show plan.json")
def show(path: Path = typer.Argument(..., metavar="FILE", help="A plan."), json_path: Path = option("--json")) -> None:
    """Say what a plan does, and why."""
    from thinwire.plan.plan import Plan

    console = open_console({"--json": json_path})
    with clear_errors(ValueError):
        loaded = Plan.load(path)
        say(console, loaded.explain(), end="")
        write_json(loaded.to_json(), json_path)


def measure_target(
    target: str, hosts: int | None, ranks_per_host: int, link: str | None, how: How, quiet: bool = False
) -> Measurement:
    """Measure in the job that torchrun started, if any, else on emulated hosts. Rank 0 reports progress, if not quiet.

    Raises:
        ValueError: options that do not fit; see `thinwire.lab.bench.measured`.
    """
    from thinwire.lab.bench.jobs.named import parse_job
    from thinwire.lab.bench.measured import measure_in_job, measure_on_hosts
    from thinwire.lab.testbed.network import Link

    job = parse_job(target)
    announce(target)
    if is_in_job():
        if hosts is not None or link is not None:
            raise ValueError("a rank of a torchrun job has its own hosts and link: leave out --hosts and --link")
        with measuring(quiet) as tell:
            return measure_in_job(job, how, tell)
    speed = Link.parse(JOB_LINK if link is None else link)
    with measuring(quiet) as tell:
        return measure_on_hosts(job, how, hosts or 8, ranks_per_host, speed, tell)


def check_value(name: str, value: str, legal: Sequence[str]) -> None:
    """Check before any measurement that an option has one of its legal values."""
    if value not in legal:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(legal)}", param_hint=name)


def names_of(text: str) -> tuple[str, ...] | None:
    """Return the compressors in a comma-separated list; "none" is an empty one, and "auto" None.

    Raises:
        ValueError: an unknown compressor or setting, or bytes that cannot be predicted.
    """
    from thinwire.lab.planning.training import check

    names = listed(text)
    if names in (("none",), (COMPRESSORS,)):
        return () if names == ("none",) else None
    check(names)
    return names


@contextmanager
def measuring(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Compile kernels, then show what is being measured, on rank 0 and if not ``quiet``."""
    from thinwire.lab.testbed.kernels import compile_ahead

    with progress("Starting ranks", quiet=quiet or not is_first_rank()) as tell:
        compile_ahead(on_progress=tell)
        yield lambda stage: tell(f"Measuring {stage}", 0, 0)


def _finish(
    measured: Measurement, best: Plan, console: Console, file: Path | None, output: Path | None, json_path: Path | None
) -> None:
    from dataclasses import asdict, replace

    from thinwire.lab.collectives import cost_table
    from thinwire.lab.doctor.losses import describe_loss, loss_json
    from thinwire.lab.doctor.lossless import lossless_option
    from thinwire.lab.planning.outer import outer_option

    best = replace(best, created=measured.created)
    lossless = lossless_option(measured)
    rows = cost_table(measured.world_size, sum(measured.size_bytes), measured.link.message)
    print_measurement(measured, console)
    print_costs(rows, measured.link.message, measured.world_size, sum(measured.size_bytes), console)
    if lossless is not None:
        say(console, f"Lossless sums: {lossless.describe()}.\n")
    say(console, best.explain(), end="")
    taken = [group.compressor for group in best.groups]
    if loss := describe_loss(taken, measured.optimizer):
        say(console, f"\nIn our own trainings: {loss}.")
    computing = measured.other_seconds + measured.all_backward_seconds
    outer = outer_option(measured, best.step_seconds, computing)
    if outer is not None:
        say(console, "\n".join([*outer.describe(), ""]))
    if file is not None:
        measured.save(file)
        console.print(f"Measured: [bold]{file}[/]", highlight=False)
    if output is not None:
        save_plan(best, output, console)
    figures = {"plan": best.to_json(), "measurement": measured.to_json(), "costs": [asdict(row) for row in rows]}
    figures |= {"lossless": None if lossless is None else lossless.to_json()}
    figures |= {"loss": loss_json(taken, measured.optimizer)}
    write_json(figures | {"outer": None if outer is None else outer.to_json()}, json_path)


def print_costs(rows: Sequence[CostRow], link: Linear, world_size: int, size_bytes: float, console: Console) -> None:
    """Print the textbook's table of costs, with the alpha and beta of a link."""
    from thinwire.plan.text import format_bytes, format_seconds

    cells = [
        [row.algorithm, f"beta {row.bandwidth}", f"alpha {row.latency}", format_seconds(row.seconds)] for row in rows
    ]
    title = (
        f"All-reduce of d = {format_bytes(size_bytes)} on p = {world_size} ranks:"
        f" alpha {format_seconds(link.alpha)}, beta {1e9 * link.beta:.2f} ns a byte"
    )
    columns = ("algorithm", "bandwidth", "latency", "seconds")
    show_table(console, columns, cells, title, texts=columns[:3])


def save_plan(best: Plan, output: Path, console: Console) -> None:
    """Save a plan and print how to use it, under DDP too, whose buckets are fixed when it is built."""
    best.save(output)
    console.print(f"Plan: [bold]{output}[/]", highlight=False, soft_wrap=True)
    if best.does_nothing:
        return
    lines = (
        f'plan = thinwire.Plan.load("{output}")',
        "model = DistributedDataParallel(model, bucket_cap_mb_list=plan.bucket_cap_mb_list())  # only under DDP",
        "sync = thinwire.attach(model, dense=plan)",
    )
    say(console, "\n".join(f"    {line}" for line in lines))


def print_measurement(measured: Measurement, console: Console) -> None:
    """Print the measurement, in a few lines and a table of lines."""
    from thinwire.lab.text import counted
    from thinwire.plan.text import format_bytes, format_seconds

    size = format_bytes(sum(table.size_bytes for table in measured.tables))
    tables = f", and {len(measured.tables)} embedding tables of {size}" if measured.tables else ""
    console.print(
        f"{measured.world_size} ranks on {counted(measured.hosts, 'host')}, {measured.device}:"
        f" {measured.link.describe()}.\n"
        f"{len(measured.parameters)} parameters, {format_bytes(sum(measured.size_bytes))} of gradients"
        f"{tables}; forward {format_seconds(measured.forward_seconds)}, backward"
        f" {format_seconds(measured.all_backward_seconds)}, rest"
        f" {format_seconds(measured.rest_seconds)}.",
        highlight=False,
    )
    fits = measured.link.fits
    for codec in measured.codecs:
        name = f"{codec.compressor} by {codec.exchange}" if codec.compressor else "copies"
        fits |= {f"{name}: encode": codec.encode, f"{name}: decode": codec.decode}
    rows = [
        [name, format_seconds(fit(0.0)), format_seconds(1e6 * fit.line.beta), f"{fit.residual:.0%}"]
        for name, fit in fits.items()
    ]
    show_table(console, ("measured", "at least", "a MB", "off by"), rows, texts=("measured",))
    print_doubts(measured, console)


def print_doubts(measured: Measurement, console: Console) -> None:
    """Print advice if a measurement is doubtful."""
    doubts = measured.doubts()
    if doubts:
        console.print(
            f"[yellow]Times scatter by more than 30 %: {', '.join(doubts)}.[/] Is the machine busy?"
            " Rerun with --fresh.",
            highlight=False,
            soft_wrap=True,
        )
