"""``thinwire plan``: measure a training and its link, and write the best plan for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from thinwire.cli.commands import Command, CommandGroup, option
from thinwire.cli.output import (
    check_directories,
    clear_errors,
    console_for,
    plain_table,
    progress,
    refuse_with,
    write_json,
)

if TYPE_CHECKING:
    from thinwire.fuse.profile import Linear
    from thinwire.lab.espresso.collectives import CostRow
    from thinwire.lab.planning.measurement import Measurement
    from thinwire.lab.planning.training import How
    from thinwire.plan.plan import Plan

COMPRESSORS = "bf16,top_k:density=0.01,ef_sign_sgd,power_sgd"
MEASURED = "--from FILE was measured already"
"""Reason for which options of a measurement are refused."""
JOB_LINK = "100mbit"
"""Link of emulated hosts if none is named."""
_EXAMPLES = """Examples:

thinwire plan --measure --hosts 8 --link 100mbit --job lstm --output plan.json

torchrun --nproc-per-node 4 --no-python thinwire plan --measure --job mytrain:make --output plan.json

thinwire plan show plan.json

thinwire plan --model vgg16 --hosts 8 --ranks-per-host 8 --link 25gbit
"""

app = typer.Typer(cls=CommandGroup, invoke_without_command=True, add_completion=False, epilog=_EXAMPLES)


@app.callback()
def make(
    context: typer.Context,
    measure: bool = typer.Option(False, "--measure", help="Measure a training, its ranks and their link."),
    job: str = option(
        "--job", "lstm", ": lstm, digits, gpt, or module:function, which returns (model, make_batch, loss)"
    ),
    hosts: int = option("--hosts", None, "; 8 by default", min=1),
    ranks_per_host: int = option("--ranks-per-host", 1, min=1),
    link: str = option("--link", None, "; none for loopback"),
    compress: str = option("--compress", COMPRESSORS),
    search: str = typer.Option(
        "espresso",
        help="What is compressed: decided for each gradient (espresso), or for all of a job alike (groups).",
    ),
    dense: str = option("--dense", "auto", "; auto takes lossless sums where they pay"),
    steps: int = option("--steps", 9, " to time", min=1),
    fresh: bool = option("--fresh", False),
    model: str = typer.Option(None, help="Plan for a published model instead, without measuring.", show_default=False),
    inside: str = typer.Option("pcie", help="Of a published model: what joins the ranks of a host, pcie or nvlink."),
    measured: Path = option("--from"),
    measurement: Path = typer.Option(None, metavar="FILE", help="Write what was measured here.", show_default=False),
    output: Path = option("--output"),
    json_path: Path = option("--json"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Which gradients travel together, how they are compressed, and whether that pays at all."""
    if context.invoked_subcommand is not None:
        return
    if sum((measure, model is not None, measured is not None)) != 1:
        raise typer.BadParameter("give one of --measure, --from FILE, --model NAME; or: thinwire plan show FILE")
    check_directories({"--output": output, "--json": json_path, "--measurement": measurement})
    console = console_for(json_path)
    from thinwire.lab.testbed.launch import RanksFailed
    from thinwire.lab.testbed.network import NetAdminError

    with clear_errors(ValueError, ImportError, NetAdminError, RanksFailed):
        if measured is not None:
            refuse_with(context, MEASURED, "--job", "--hosts", "--ranks-per-host", "--link", "--steps", "--fresh")
        if model is not None:
            from thinwire.cli.plan_published import show_published

            show_published(model, hosts or 8, ranks_per_host, link or "25gbit", inside, console, output, json_path)
            return
        compressors = names_of(compress)
        check_search(search)
        check_dense(dense)
        if measured is not None:
            from thinwire.lab.planning.measurement import Measurement

            found = Measurement.load(measured)
        else:
            from thinwire.lab.planning.training import How

            how = How(compressors, steps, fresh=fresh)
            found = measure_target(job, hosts, ranks_per_host, link, how, quiet)
        if is_first_rank():
            _finish(found, compressors, search, dense, console, measurement, output, json_path)


@app.command(cls=Command, epilog="Example: thinwire plan show plan.json")
def show(
    path: Path = typer.Argument(..., metavar="FILE", help="A plan."),
    json_path: Path = option("--json"),
) -> None:
    """Say what a plan does, and why."""
    from thinwire.plan.plan import Plan

    check_directories({"--json": json_path})
    with clear_errors(ValueError):
        loaded = Plan.load(path)
    console_for(json_path).print(loaded.explain(), end="", highlight=False, markup=False, soft_wrap=True)
    write_json(loaded.to_json(), json_path)


def measure_target(
    target: str, hosts: int | None, ranks_per_host: int, link: str | None, how: How, quiet: bool = False
) -> Measurement:
    """Measure in the job that torchrun started, if any, else on emulated hosts. Rank 0 reports progress, if not quiet.

    Raises:
        ValueError: options that do not fit; see `thinwire.lab.bench.measured`.
    """
    from thinwire.lab.bench.measured import TrainingTarget, measure_in_job, measure_on_hosts
    from thinwire.lab.testbed.network import Link

    aim = TrainingTarget(target)
    if in_job():
        if hosts is not None or link is not None:
            raise ValueError("a rank of a torchrun job has its own hosts and link: leave out --hosts and --link")
        with measuring(quiet) as tell:
            return measure_in_job(aim, how, tell)
    speed = Link.parse(JOB_LINK if link is None else link)
    with measuring(quiet) as tell:
        return measure_on_hosts(aim, how, hosts or 8, ranks_per_host, speed, tell)


def in_job() -> bool:
    """Return whether torchrun, or a similar launcher, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Return whether this is rank 0, or no rank of a job."""
    return int(os.environ.get("RANK", "0")) == 0


def check_search(search: str) -> None:
    """Check before any measurement that there is such a search."""
    from thinwire.lab.planning.planner import SEARCHES

    if search not in SEARCHES:
        raise typer.BadParameter(f"{search!r} is none of {', '.join(SEARCHES)}", param_hint="--search")


def check_dense(dense: str) -> None:
    """Check before any measurement that dense gradients can be summed so."""
    if dense not in (legal := ("auto", "native", "lossless")):
        raise typer.BadParameter(f"{dense!r} is none of {', '.join(legal)}", param_hint="--dense")


def names_of(text: str) -> tuple[str, ...]:
    """Return the compressors in a comma-separated list; "none" is an empty one.

    Raises:
        ValueError: an unknown compressor or setting, or bytes that cannot be predicted.
    """
    from thinwire.lab.planning.training import check

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names == ("none",):
        return ()
    check(names)
    return names


@contextmanager
def measuring(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being measured, on rank 0 and if not ``quiet``."""
    with progress("Starting ranks", quiet=quiet or not is_first_rank()) as tell:
        yield lambda stage: tell(f"Measuring {stage}")


def _finish(
    measured: Measurement,
    compressors: tuple[str, ...],
    search: str,
    dense: str,
    console: Console,
    measurement: Path | None,
    output: Path | None,
    json_path: Path | None,
) -> None:
    from dataclasses import asdict, replace

    from thinwire.lab.doctor.lossless import lossless_option
    from thinwire.lab.espresso.collectives import cost_table
    from thinwire.lab.planning.outer import outer_option
    from thinwire.lab.planning.planner import best_plan

    best = replace(best_plan(measured, compressors, search=search, dense=dense), created=measured.created)
    lossless = lossless_option(measured)
    rows = cost_table(measured.world_size, sum(measured.size_bytes), measured.link.message)
    print_measurement(measured, console)
    print_costs(rows, measured.link.message, measured.world_size, sum(measured.size_bytes), console)
    if lossless is not None:
        console.print(f"Lossless sums: {lossless.describe()}.\n", highlight=False, soft_wrap=True)
    console.print(best.explain(), end="", highlight=False, markup=False, soft_wrap=True)
    computing = measured.other_seconds + measured.all_backward_seconds
    outer = outer_option(measured, best.step_seconds, computing)
    if outer is not None:
        console.print("\n".join([*outer.describe(), ""]), highlight=False, markup=False, soft_wrap=True)
    if measurement is not None:
        measured.save(measurement)
        console.print(f"Measured: [bold]{measurement}[/]", highlight=False)
    if output is not None:
        save_plan(best, output, console)
    figures = {"plan": best.to_json(), "measurement": measured.to_json(), "costs": [asdict(row) for row in rows]}
    figures |= {"lossless": None if lossless is None else lossless.to_json()}
    write_json(figures | {"outer": None if outer is None else outer.to_json()}, json_path)


def save_plan(best: Plan, output: Path, console: Console) -> None:
    """Save a plan and print how to use it, under DDP too, whose buckets are fixed when it is built."""
    best.save(output)
    console.print(f"Plan: [bold]{output}[/]", highlight=False, soft_wrap=True)
    if best.does_nothing:
        return
    lines = (
        f'plan = thinwire.Plan.load("{output}")',
        "model = DistributedDataParallel(model, bucket_cap_mb_list=plan.bucket_cap_mb_list())  # only under DDP",
        "sync = thinwire.attach(model, plan=plan)",
    )
    console.print("\n".join(f"    {line}" for line in lines), highlight=False, markup=False, soft_wrap=True)


def print_measurement(measured: Measurement, console: Console) -> None:
    """Print the measurement, in a few lines and a table of lines."""
    from thinwire.plan.explain import counted, format_bytes, format_seconds

    console.print(
        f"{measured.world_size} ranks on {counted(measured.hosts, 'host')}, {measured.device}:"
        f" {measured.link.network.describe()}.\n"
        f"{len(measured.parameters)} parameters, {format_bytes(sum(measured.size_bytes))} of gradients"
        f"{_tables(measured)}; forward {format_seconds(measured.forward_seconds)}, backward"
        f" {format_seconds(measured.all_backward_seconds)}, rest"
        f" {format_seconds(measured.rest_seconds)}.",
        highlight=False,
    )
    table = plain_table()
    for column in ("measured", "at least", "a MB", "off by"):
        table.add_column(column, justify="left" if column == "measured" else "right")
    link = measured.link
    fits = {"all_reduce": link.all_reduce, "all_gather": link.all_gather, "all_to_all": link.all_to_all}
    for codec in measured.codecs:
        name = f"{codec.compressor} by {codec.exchange}" if codec.compressor else "copies"
        fits |= {f"{name}: encode": codec.encode, f"{name}: decode": codec.decode}
    for name, fit in fits.items():
        least, per_mb = format_seconds(fit(0.0)), format_seconds(1e6 * fit.line.beta)
        table.add_row(name, least, per_mb, f"{fit.residual:.0%}")
    console.print(table)
    print_doubts(measured, console)


def _tables(measured: Measurement) -> str:
    from thinwire.plan.explain import format_bytes

    if not measured.tables:
        return ""
    size = format_bytes(sum(table.size_bytes for table in measured.tables))
    return f", and {len(measured.tables)} embedding tables of {size}"


def print_doubts(measured: Measurement, console: Console) -> None:
    """Print advice if a measurement is doubtful."""
    doubts = measured.doubts()
    if doubts:
        console.print(
            f"[yellow]Measured badly: {', '.join(doubts)}.[/] Was the machine busy? Measure again with --fresh.",
            highlight=False,
            soft_wrap=True,
        )


def print_costs(rows: Sequence[CostRow], link: Linear, world_size: int, size_bytes: float, console: Console) -> None:
    """Print the textbook's table of costs, with the alpha and beta of a link."""
    from thinwire.plan.explain import format_bytes, format_seconds

    table = plain_table(
        title=f"All-reduce of d = {format_bytes(size_bytes)} on p = {world_size} ranks:"
        f" alpha {format_seconds(link.alpha)}, beta {1e9 * link.beta:.2f} ns a byte"
    )
    for column in ("algorithm", "bandwidth", "latency", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for row in rows:
        table.add_row(row.algorithm, f"beta {row.bandwidth}", f"alpha {row.latency}", format_seconds(row.seconds))
    console.print(table)
