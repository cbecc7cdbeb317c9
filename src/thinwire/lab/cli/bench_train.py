"""``thinwire bench train``: a real training under each method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from thinwire.lab.bench.in_job import is_first_rank, is_in_job
from thinwire.lab.cli.bench import JOBS, METHODS, check_job, compile_kernels, show_comparison, where
from thinwire.lab.cli.commands import Command, announce, listed, option
from thinwire.lab.cli.output import clear_errors, open_console, progress, say, show_table, write_json

if TYPE_CHECKING:
    from thinwire.lab.bench.train.benchmark import TrainBenchmark

app = typer.Typer(add_completion=False)


@app.command(
    cls=Command,
    epilog="Example: thinwire bench train --job digits --methods ddp,bf16,top_k --json out.json --report out.html",
)
def train(
    job: str = option(
        "--job",
        "lstm",
        f": {JOBS}, with settings behind a colon (gpt:autocast=bfloat16); or module:function or file.py:function,"
        " which returns (model, make_batch, loss) and, if it has one, the optimizer",
    ),
    methods: str = option(
        "--methods",
        "ddp,bf16,top_k,ef_sign_sgd,power_sgd",
        f", of: {METHODS}; or a scheme of bench sync, such as zen; or another text of a compressor, as in a plan."
        " Settings behind a colon: top_k:density=0.001, error_feedback:inner=top_k(density=0.01):decay=0.9,"
        " zen:dense=lossless, plan:plan.json, diloco:every=32:codec=top_k:density=0.0156",
    ),
    scale: float = option("--scale", None, ", of the parameters of a job; by default it is sized for two cores"),
    hosts: int = option("--hosts", None, ", one rank each; 8 by default"),
    link: str = option("--link", None, "; none for loopback; 100mbit by default"),
    seeds: int = typer.Option(3, help="Runs of each method, from other initial parameters and orders of the data."),
    steps: int = option("--steps", None, "; by default the job's own number"),
    autocast: bool = typer.Option(False, "--autocast", help="Run the forward pass under torch.autocast in bfloat16."),
    accumulate: int = typer.Option(1, metavar="N", min=1, help="Batches whose gradients are added up in a step."),
    extra: float = typer.Option(0.25, help="Share of the steps that a method may need more to reach ddp's loss."),
    compare: Path = option("--compare"),
    json_path: Path = option("--json"),
    report: Path = option("--report"),
    quiet: bool = option("--quiet", False),
) -> None:
    """Train one job by each method in turn: step times, bytes, loss against steps and against time.

    Under torchrun (torchrun --nproc-per-node 4 --no-python thinwire bench train ...) the ranks of the job run one
    benchmark together, on the CPU and over their own network.
    """
    from thinwire.lab.bench.compare import load_rows
    from thinwire.lab.bench.train.benchmark import TrainBenchmark

    console = open_console({"--report": report, "--json": json_path})
    with clear_errors(ValueError, ImportError):
        check_job(job)
        earlier = None if compare is None else load_rows(compare)
        emulated = where(hosts, None, link)
        benchmark = TrainBenchmark(
            job=job,
            methods=listed(methods),
            hosts=emulated["hosts"] * emulated["ranks_per_host"],
            link=emulated["link"],
            seeds=seeds,
            steps=steps,
            scale=scale,
            extra=extra,
            autocast=autocast,
            accumulate=accumulate,
        )
        announce(job)
        result = _run(benchmark, quiet)
        if not is_first_rank():
            return
        _print(result, console)
        if report is not None:
            from thinwire.lab.bench.train.report import build_report

            build_report(result).write(report)
            console.print(f"Report: [bold]{escape(str(report))}[/bold]", soft_wrap=True)
        write_json(result, json_path)
        if earlier is not None:
            same = ("job", "hosts")
            show_comparison(console, result["rows"], earlier, same, "method", "step_seconds_median", compare)


def _run(benchmark: TrainBenchmark, quiet: bool) -> dict[str, Any]:
    from thinwire.lab.bench.train.benchmark import run

    with progress("starting ranks", benchmark.num_steps, quiet or not is_first_rank()) as tell:

        def on_step(method: str, seed: int, step: int, loss: float) -> None:
            planned = benchmark.steps_of(method)
            total = planned if step <= planned else benchmark.max_steps_of(method)
            tell(f"seed {seed}, {method}, loss {loss:.3f}", step, total)

        if not is_in_job():
            compile_kernels(tell, benchmark.num_steps)
        return run(benchmark, on_step)


def _print(result: dict[str, Any], console: Console) -> None:
    from thinwire.lab.bench.train.summary import caption, columns, conditions, exactness, table_rows, verdict

    rows = result["rows"]
    cells = table_rows(rows)
    show_table(console, columns(rows), cells, conditions(result), caption(result), texts=("method",), centered=True)
    say(console, *exactness(rows), verdict(rows))
