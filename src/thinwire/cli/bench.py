"""`thinwire bench`: measure on emulated hosts."""

from __future__ import annotations

from typing import ClassVar

import typer

from thinwire.cli.commands import LazyGroup


class _Benchmarks(LazyGroup):
    lazy: ClassVar = {
        "sync": (
            "thinwire.cli.bench_sync",
            "Sum one workload's sparse gradients by every scheme, and compare bytes, time and exactness.",
        ),
        "train": (
            "thinwire.cli.bench_train",
            "Train one job by each method in turn: step times, bytes, loss against steps and against time.",
        ),
        "checkpoint": (
            "thinwire.cli.bench_checkpoint",
            "Train with a checkpoint in every iteration by each method in turn; then kill the trainings, and a host.",
        ),
    }


app = typer.Typer(
    cls=_Benchmarks,
    add_completion=False,
    no_args_is_help=True,
    help="Measure thinwire and its rivals on emulated hosts.",
)


@app.callback()
def _bench() -> None:
    """Measure thinwire and its rivals on emulated hosts."""
