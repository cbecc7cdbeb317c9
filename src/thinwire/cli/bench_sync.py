"""`thinwire bench sync`: sum one workload's sparse gradients by every scheme."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from thinwire.cli.bench import DTYPES, SCHEMES, WORKLOADS
from thinwire.cli.commands import Command, option
from thinwire.cli.output import check_directories, clear_errors, console_for, plain_table, progress, write_json

if TYPE_CHECKING:
    from thinwire.lab.bench.sync import SyncBenchmark

app = typer.Typer(add_completion=False)


@app.command(cls=Command, epilog="Example: thinwire bench sync --link 100mbit --workload lstm --json out.json")
def sync(
    workload: str = typer.Option("lstm", help=f"A published workload: {WORKLOADS}."),
    trace: Path = typer.Option(
        None, metavar="FILE", help="Use a recorded trace instead of a workload.", show_default=False
    ),
    hosts: int = option("--hosts", 8),
    ranks_per_host: int = option("--ranks-per-host", 1),
    link: str = option("--link", "100mbit", "; none for loopback"),
    schemes: str = typer.Option(
        "zen,agsparse,agsparse_torch,sparse_ps,dense",
        help=f"Comma-separated, of: {SCHEMES}, two_level:NAME.",
    ),
    every_point: bool = typer.Option(
        False,
        "--design-space",
        help="Price and run every point of the design space, on a tenth of the table unless --scale is given.",
    ),
    repeat: int = option("--repeat", 5, ", after a small warm-up"),
    seed: int = option("--seed", 0),
    dtype: str = typer.Option("float32", help=f"One of {DTYPES}."),
    scale: float = typer.Option(
        None,
        help="Shrink the workload's table to this share; by default a dense gradient is about 80 MB.",
        show_default=False,
    ),
    json_path: Path = option("--json"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Sum one workload's sparse gradients by every scheme, and compare bytes, time and exactness."""  # fmt: skip
    from thinwire.lab.bench.methods import design_space
    from thinwire.lab.bench.sync import SyncBenchmark
    from thinwire.lab.testbed.launch import RanksFailed
    from thinwire.lab.testbed.network import Link, NetAdminError

    check_directories({"--json": json_path})
    console = console_for(json_path)
    with clear_errors(ValueError, FileNotFoundError, NetAdminError, RanksFailed):
        benchmark = SyncBenchmark(
            workload=str(trace) if trace else workload,
            is_trace=trace is not None,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            link=Link.parse(link),
            methods=tuple(design_space()) if every_point else _names(schemes),
            repeat=repeat,
            seed=seed,
            dtype=dtype,
            scale=_small(workload) if every_point and scale is None and trace is None else scale,
        )
        result = _run(benchmark, quiet)
    _print(result, console)
    write_json(result, json_path)


def _names(schemes: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in schemes.split(",") if name.strip())


def _small(workload: str) -> float:
    """A tenth of the default scale: some of the two hundred points send fifty times the bytes of the best one."""
    from thinwire.lab.bench.recipes import get_recipe

    return get_recipe(workload).default_scale / 10


def _run(benchmark: SyncBenchmark, quiet: bool) -> dict[str, Any]:
    from thinwire.lab.bench.sync import run

    done = count(1)
    with progress("starting hosts", len(benchmark.methods) * benchmark.repeat, quiet) as tell:
        return run(benchmark, lambda method: tell(method, next(done)))


def _print(result: dict[str, Any], console: Console) -> None:
    rows = sorted(result["rows"], key=lambda row: row["seconds_median"])
    first = rows[0]
    link = f"{first['link_mbit']:.1f} Mbit/s measured" if first["link_mbit"] else "loopback"
    table = plain_table(
        title=f"{first['workload']}: {first['num_rows']:,} x {first['width']} {first['dtype']}, density"
        f" {first['density']:.2%}, {first['world_size']} ranks, {link}",
        caption="MB sent: of the busiest rank; off host: of the ranks of the busiest host, to others; "
        "own wire: seconds over what the bytes off host need on the link; dense: speed-up "
        "over dense. agsparse_torch is torch's own sparse all-reduce, bytes by formula.",
        title_justify="center",
    )
    spread = "p10 .. p90" if first["ranks_per_host"] == 1 else "off host"  # 80 columns do not hold both
    for name in ("scheme", "MB sent", "seconds", spread, "own wire", "dense", "error"):
        table.add_column(name, justify="left" if name == "scheme" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    _print_checks(rows, console)


def _print_checks(rows: list[dict[str, Any]], console: Console) -> None:
    first = rows[0]
    bound = f", {first['seconds_wire_bound']:.3f} s" if first["seconds_wire_bound"] is not None else ""
    console.print(f"No scheme can send less than {first['bytes_lower_bound'] / 1e6:.2f} MB of values a rank{bound}.")
    wrong = [row["scheme"] for row in rows if row["bytes_sent_max"] != row["bytes_predicted_max"]]
    console.print(
        f"Bytes sent are not the bytes predicted: {', '.join(wrong)}" if wrong else "All sent the predicted bytes."
    )
    unequal = [row["scheme"] for row in rows if not row["bitwise_equal_across_ranks"]]
    console.print(
        f"Not the same bits on all ranks: {', '.join(unequal)}" if unequal else "All ranks got the same bits."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    own, speedup = row["seconds_own_wire"], row["speedup_vs_dense"]
    spread = f"{row['seconds_p10']:.3f} .. {row['seconds_p90']:.3f}"
    chosen = f" ({row['chosen']})" if row["chosen"] != row["scheme"] else ""
    return [
        row["scheme"] + chosen,
        f"{row['bytes_sent_max'] / 1e6:.2f}",
        f"{row['seconds_median']:.3f}",
        spread if row["ranks_per_host"] == 1 else f"{row['bytes_between_hosts_max'] / 1e6:.2f} MB",
        f"{row['seconds_median'] / own:.2f}x" if own else "-",
        f"{speedup:.1f}x" if speedup is not None else "-",
        f"{row['max_abs_error']:.0e}",
    ]
