"""`thinwire bench`: measure on emulated hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import typer

from thinwire.cli.commands import LazyGroup

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from thinwire.lab.testbed.network import Link

WORKLOADS = "bert, deepfm, dlrm, llm_dgc, lstm, nmt, word2vec, xlmr"
SCHEMES = (
    "dense, agsparse, agsparse_coded, sparse_ps, balanced_parallelism, zen, column_split, union_split, zen_elements,"
    " omnireduce, omnireduce_contiguous, dense_ps, dense_ring, dense_halving_doubling, agsparse_ring,"
    " agsparse_hierarchy, sparcml, sparcml_dense, sparcml_split, sparcml_split_dense, sparcml_coded,"
    " hierarchical_centralization, auto, agsparse_torch"
)
DENSE_METHODS = "native, lossless, bf16, rank_order"
DTYPES = "float32, float64, bfloat16, float16"
JOBS = "lstm, digits, gpt, xlmr, dlrm, deepfm, nmt, bert, vgg, resnet, word2vec"
METHODS = (
    "ddp, bf16, powersgd_torch, rank_order, thinwire, exact, lossless, plan, local_sgd, diloco, streaming_diloco,"
    " shadow_sync, top_k, dgc, gaussian_k, redsync, sidco, ms_top_k, random_k, sign_sgd, ef_sign_sgd, qsgd, terngrad,"
    " natural, int8, fp8, fp16, power_sgd, acp_sgd, atomo, ok_topk, hi_top_k, deep_reduce"
)
CHECKPOINT_METHODS = "none,dcp_sync,dcp_async,blocking,thinwire"
"""Names that the help lists, written out since the modules that define them import torch; a test compares them."""


class _Benchmarks(LazyGroup):
    lazy: ClassVar = {
        "sync": (
            "thinwire.cli.bench_sync",
            "Sum one workload's gradients by every scheme, and compare bytes, time and exactness.",
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


def where(hosts: int | None, ranks_per_host: int | None, link: str | None) -> tuple[int, int, Link]:
    """Return hosts, ranks of each, and the link to emulate: 8 hosts at 100 Mbit/s, or those of the job we are in.

    Raises:
        ValueError: a link that is none; options for emulated hosts in a job that torchrun started.
    """
    from thinwire.lab.bench.in_job import JobSize, is_in_job
    from thinwire.lab.testbed.network import Link

    if not is_in_job():
        hosts, ranks_per_host = (8 if hosts is None else hosts), (1 if ranks_per_host is None else ranks_per_host)
        return hosts, ranks_per_host, Link.parse("100mbit" if link is None else link)
    if (hosts, ranks_per_host, link) != (None, None, None):
        raise ValueError("the ranks of a torchrun job have their own hosts and network: leave out --hosts and --link")
    size = JobSize.of_environment()
    return size.hosts, size.ranks_per_host, Link(None)


def compared_table(
    rows: list[dict[str, Any]],
    earlier: list[dict[str, Any]],
    same: tuple[str, ...],
    name: str,
    seconds: str,
    path: Path,
) -> Table:
    """Return a table of the median seconds of each method before and now, with their ratio.

    Raises:
        ValueError: no row of the earlier run is comparable.
    """
    from rich.markup import escape

    from thinwire.cli.output import add_column, plain_table
    from thinwire.lab.bench.compare import compare

    table = plain_table(
        f"Compared with {escape(str(path))}", "ratio: seconds now over seconds before, below 1 is faster."
    )
    for column in (name, "before s", "now s", "ratio"):
        add_column(table, column, is_text=column == name)
    for one in compare(rows, earlier, same, name, seconds):
        figures = (one.before, one.now, one.ratio)
        table.add_row(escape(one.name), *("-" if value is None else f"{value:.4g}" for value in figures))
    return table
