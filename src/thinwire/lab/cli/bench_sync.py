"""`thinwire bench sync`: sum one workload's sparse gradients by every scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from thinwire.lab.bench.in_job import is_first_rank, is_in_job
from thinwire.lab.cli.bench import DENSE_METHODS, DTYPES, SCHEMES, WORKLOADS, compile_kernels, show_comparison, where
from thinwire.lab.cli.commands import Command, announce, listed, option
from thinwire.lab.cli.output import clear_errors, open_console, progress, refuse_with, say, show_table, write_json
from thinwire.lab.text import figure

if TYPE_CHECKING:
    from thinwire.lab.bench.dense.benchmark import DenseBenchmark
    from thinwire.lab.bench.sync import SyncBenchmark

app = typer.Typer(add_completion=False)

_SCHEMES = "auto,zen,agsparse,agsparse_torch,sparse_ps,dense"
_SPARSE_ONLY = ("--trace", "--design-space", "--dtype", "--sizes")
_SAME = ("workload", "world_size", "ranks_per_host", "dtype", "num_rows")
"""Fields in which rows of two runs must agree to be compared."""


@app.command(cls=Command, epilog="Example: thinwire bench sync --link 100mbit --workload lstm --json out.json")
def sync(
    context: typer.Context,
    workload: str = typer.Option(
        "lstm",
        help=f"A published workload: {WORKLOADS}; or dense:JOB[:autocast][:accumulate=N], the dense gradients of a job"
        " of bench train, recorded on the spot.",
    ),
    trace: Path = typer.Option(None, metavar="FILE", help="Use a recorded trace instead of a workload."),
    hosts: int = option("--hosts", None, "; 8 by default"),
    ranks_per_host: int = option("--ranks-per-host", None, "; 1 by default"),
    link: str = option("--link", None, "; none for loopback; 100mbit by default"),
    schemes: str = typer.Option(
        _SCHEMES,
        help=f"Comma-separated, of: {SCHEMES}, two_level:NAME. Of a dense workload: {DENSE_METHODS}, which is also"
        " the default there.",
    ),
    every_point: bool = typer.Option(
        False,
        "--design-space",
        help="Price and run every point of the design space, on a tenth of the table unless --scale is given.",
    ),
    repeat: int = option("--repeat", 5, ", after a small warm-up"),
    warm_up: int = typer.Option(0, metavar="N", min=0, help="Full turns before those that count."),
    seed: int = option("--seed", 0),
    dtype: str = option("--dtype", "float32", f": one of {DTYPES}"),
    scale: float = option("--scale", None, ", of the rows of a table; by default a dense gradient is about 80 MB"),
    sizes: str = typer.Option(
        None,
        metavar="SIZES",
        help="Sweep the size of the dense gradient, such as 1mb,16mb,256mb: seconds, algbw and busbw at each.",
    ),
    compare: Path = option("--compare"),
    json_path: Path = option("--json"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Sum one workload's gradients by every scheme, and compare bytes, time and exactness.

    Under torchrun (torchrun --nproc-per-node 4 --no-python thinwire bench sync ...) the ranks of the job run one
    benchmark together, on the CPU and over their own network.
    """
    from thinwire.lab.bench.compare import load_rows
    from thinwire.lab.bench.dense.benchmark import DenseBenchmark
    from thinwire.lab.bench.dense.workload import DenseWorkload
    from thinwire.lab.bench.methods import design_space
    from thinwire.lab.bench.sync import SyncBenchmark, parse_size

    console = open_console({"--json": json_path})
    with clear_errors(ValueError, ImportError):
        earlier = None if compare is None else load_rows(compare)
        if workload.startswith("dense:"):
            refuse_with(context, "a dense workload is recorded from its job", *_SPARSE_ONLY)
            dense = DenseBenchmark(
                DenseWorkload(workload, scale, seed),
                methods=listed(DENSE_METHODS if schemes == _SCHEMES else schemes),
                **where(hosts, ranks_per_host, link),
                repeat=repeat,
                warm_up=warm_up,
            )
            announce(dense.workload.job.name)
            result, show = _run_dense(dense, quiet or not is_first_rank()), _print_dense
        else:
            swept = [parse_size(size) for size in listed(sizes)] if sizes else []
            benchmark = SyncBenchmark(
                workload=str(trace) if trace else workload,
                is_trace=trace is not None,
                **where(hosts, ranks_per_host, link),
                methods=tuple(design_space()) if every_point else listed(schemes),
                repeat=repeat,
                warm_up=warm_up,
                seed=seed,
                dtype=dtype,
                scale=_small(workload) if every_point and scale is None and trace is None else scale,
            )
            result = _run(benchmark, swept, quiet or not is_first_rank())
            show = _print_sizes if swept else _print
        if not is_first_rank():
            return
        show(result, console)
        write_json(result, json_path)
        if earlier is not None:
            same = tuple(name for name in _SAME if name in result["rows"][0])
            show_comparison(console, result["rows"], earlier, same, "scheme", "seconds_median", compare)


def _small(workload: str) -> float:
    """A tenth of the default scale: some of the two hundred points send fifty times the bytes of the best one."""
    from thinwire.lab.bench.recipes import get_recipe

    return get_recipe(workload).default_scale / 10


def _run(benchmark: SyncBenchmark, sizes: list[int], quiet: bool) -> dict[str, Any]:
    from thinwire.lab.bench.sync import KERNELS, run, run_sizes

    with _progress("starting ranks", benchmark.num_runs * max(1, len(sizes)), quiet, KERNELS) as on_progress:
        if sizes:
            return run_sizes(benchmark, sizes, lambda sized: run(sized, on_progress))
        return run(benchmark, on_progress)


def _run_dense(benchmark: DenseBenchmark, quiet: bool) -> dict[str, Any]:
    from thinwire.lab.bench.dense.benchmark import run

    with _progress("recording gradients", benchmark.num_runs, quiet) as on_progress:
        return run(benchmark, on_progress)


@contextmanager
def _progress(
    description: str, runs: int, quiet: bool, kernels: Iterable[str] | None = None
) -> Iterator[Callable[[str], None]]:
    """Compile what ranks will call, and count the runs that rank 0 reports."""
    done = count(1)
    with progress(description, runs, quiet) as tell:
        if not is_in_job():
            compile_kernels(tell, runs, kernels)
        yield lambda method: tell(method, min(runs, next(done)))


def _print_dense(result: dict[str, Any], console: Console) -> None:
    rows = sorted(result["rows"], key=lambda row: row["seconds_median"])
    first = rows[0]
    cells = [
        [
            row["scheme"],
            f"{row['bytes_sent_max'] / 1e6:.2f}",
            figure(row["bits_per_value"], ".2f"),
            f"{row['seconds_median']:.3f}",
            f"{row['seconds_p10']:.3f} .. {row['seconds_p90']:.3f}",
            "-" if row["speedup_vs_native"] is None else f"{row['speedup_vs_native']:.2f}x",
            f"{row['relative_error']:.0e}",
            "same bits" if row["bitwise_rank_order"] else "-",
        ]
        for row in rows
    ]
    show_table(
        console,
        ("scheme", "MB sent", "bits", "seconds", "p10..p90", "native", "error", "rank order"),
        cells,
        f"{first['workload']}: {first['values']:,} values of {first['dtype']} in {len(first['buckets'])} buckets,"
        f" {first['world_size']} ranks, {_link(result)}",
        "MB sent: of the busiest rank; bits: of a value, push plus pull, without the factor (n-1)/n, so that an"
        " all-reduce of float32 has 64; error: length of the error over that of the mean; rank order: whether the bits"
        " equal the sum in rank order.",
        texts=("scheme", "rank order"),
        centered=True,
    )
    push, pull = first["ideal_bits_push"], first["ideal_bits_pull"]
    console.print(f"An ideal code needs {push:.2f} + {pull:.2f} = {push + pull:.2f} bits a value.", soft_wrap=True)
    _print_same_bits(rows, console)


def _print_sizes(result: dict[str, Any], console: Console) -> None:
    rows = result["rows"]
    cells = [
        [
            f"{row['size_bytes'] / 1e6:.3g}" if before is None or before["size_bytes"] != row["size_bytes"] else "",
            row["scheme"],
            f"{row['bytes_sent_max'] / 1e6:.3g}",
            f"{row['seconds_median']:.4f}",
            f"{row['algbw'] / 1e6:.1f}",
            f"{row['busbw'] / 1e6:.1f}",
        ]
        for before, row in zip([None, *rows], rows, strict=False)
    ]
    show_table(
        console,
        ("size MB", "scheme", "MB sent", "seconds", "algbw MB/s", "busbw MB/s"),
        cells,
        f"{rows[0]['workload']} {rows[0]['dtype']}, {rows[0]['world_size']} ranks, {_link(result)}",
        "size: of the dense gradient; algbw: size over seconds; busbw: algbw times 2 (n - 1) / n, as nccl-tests has it"
        " for an all-reduce. A scheme that sends less than the dense gradient may exceed the link.",
        texts=("scheme",),
    )
    _print_exactness(rows, console)


def _link(result: dict[str, Any]) -> str:
    if result["environment"].get("in_job"):
        return "their own network"
    mbit = result["rows"][0]["link_mbit"]
    return f"{mbit:.1f} Mbit/s measured" if mbit else "loopback"


def _print(result: dict[str, Any], console: Console) -> None:
    rows = sorted(result["rows"], key=lambda row: row["seconds_median"])
    first = rows[0]
    spread = "p10..p90" if first["ranks_per_host"] == 1 else "off host"  # 80 columns do not hold both
    show_table(
        console,
        ("scheme", "MB sent", "seconds", spread, "own wire", "dense", "error"),
        map(_cells, rows),
        f"{first['workload']}: {first['num_rows']:,} x {first['width']} {first['dtype']}, density"
        f" {first['density']:.2%}, {first['world_size']} ranks, {_link(result)}",
        "MB sent: of the busiest rank; off host: of the ranks of the busiest host, to others; own wire: seconds over"
        " what the bytes off host need on the link; dense: speed-up over dense. agsparse_torch is torch's own sparse"
        " all-reduce, bytes by formula.",
        texts=("scheme",),
        centered=True,
    )
    bound = f", {first['seconds_wire_bound']:.3f} s" if first["seconds_wire_bound"] is not None else ""
    console.print(
        f"No scheme can send less than {first['bytes_lower_bound'] / 1e6:.2f} MB of values a rank{bound}.",
        soft_wrap=True,
    )
    _print_exactness(rows, console)


def _print_exactness(rows: list[dict[str, Any]], console: Console) -> None:
    wrong = [row["scheme"] for row in rows if row["bytes_sent_max"] != row["bytes_predicted_max"]]
    bad = f"Bytes sent are not the bytes predicted: {', '.join(wrong)}"
    say(console, bad if wrong else "All sent the predicted bytes.")
    _print_same_bits(rows, console)


def _print_same_bits(rows: list[dict[str, Any]], console: Console) -> None:
    unequal = [row["scheme"] for row in rows if not row["bitwise_equal_across_ranks"]]
    bad = f"Not the same bits on all ranks: {', '.join(unequal)}"
    say(console, bad if unequal else "All ranks got the same bits.")


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
