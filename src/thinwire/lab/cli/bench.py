"""`thinwire bench`: measure on emulated hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import typer

from thinwire.lab.bench.in_job import is_in_job, size_of_job
from thinwire.lab.cli.commands import LazyGroup
from thinwire.lab.cli.output import show_table
from thinwire.lab.text import figure

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console

    from thinwire.lab.cli.output import OnProgress

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
    " natural, int8, fp8, mxfp8, mxfp4, fp16, power_sgd, acp_sgd, atomo, ok_topk, hi_top_k, deep_reduce"
)
CHECKPOINT_METHODS = "none,dcp_sync,dcp_async,blocking,thinwire"
"""Names that the help lists, written out since the modules that define them import torch; a test compares them."""


class _Benchmarks(LazyGroup):
    prefix = "thinwire.lab.cli.bench_"
    lazy: ClassVar = {
        "sync": "Sum one workload's gradients by every scheme, and compare bytes, time and exactness.",
        "train": "Train one job by each method in turn: step times, bytes, loss against steps and against time.",
        "reproducible": "Train one job on several numbers of ranks, and say where two runs part first: step and"
        " parameter.",
        "checkpoint": "Train with a checkpoint in every iteration by each method in turn; then kill the trainings, and"
        " a host.",
    }


EXAMPLES = """Examples:

thinwire bench train --job digits --methods ddp,bf16,top_k --json out.json

thinwire bench sync --link 100mbit --workload lstm --json out.json
"""

app = typer.Typer(
    cls=_Benchmarks,
    add_completion=False,
    epilog=EXAMPLES,
    no_args_is_help=True,
    help="Measure thinwire and its rivals on emulated hosts.",
)


@app.callback()
def _bench() -> None:
    """Measure thinwire and its rivals on emulated hosts."""


def where(hosts: int | None, ranks_per_host: int | None, link: str | None) -> dict[str, Any]:
    """Return hosts, ranks of each, and the link to emulate: 8 hosts at 100 Mbit/s, or the hosts of the job we are in.

    Raises:
        ValueError: a link that is none; a single rank, or a single host behind a link; options for emulated hosts in
            a job that torchrun started.
    """
    from thinwire.lab.testbed.network import Link

    if is_in_job():
        if (hosts, ranks_per_host, link) != (None, None, None):
            raise ValueError(
                "the ranks of a torchrun job have their own hosts and network: leave out --hosts and --link"
            )
        hosts, ranks_per_host = size_of_job()
        return {"hosts": hosts, "ranks_per_host": ranks_per_host, "link": Link(None)}
    hosts, ranks_per_host = (8 if hosts is None else hosts), (1 if ranks_per_host is None else ranks_per_host)
    speed = Link.parse("100mbit" if link is None else link)
    if hosts * ranks_per_host == 1:
        raise ValueError("one rank has nobody to sum with: give --hosts 2 or more")
    if hosts == 1 and speed.mbit is not None:
        raise ValueError("the ranks of one host use no link: give --hosts 2 or more, or --link none")
    return {"hosts": hosts, "ranks_per_host": ranks_per_host, "link": speed}


def check_job(job: str) -> None:
    """Raise ValueError for a name that no job has; without importing torch, as `parse_job` does."""
    if ":" not in job and job not in JOBS.split(", "):
        raise ValueError(f"unknown job {job!r}; legal are {JOBS}, or module:function; a script is FILE.py or -m MODULE")


def compile_kernels(tell: OnProgress, total: int | None, names: Iterable[str] | None = None) -> None:
    """Compile kernels, all by default, before ranks start, and show how far it is; then show that ranks start."""
    from thinwire.lab.testbed.kernels import compile_ahead

    compile_ahead(names, tell)
    tell("measuring the link, starting ranks", 0, total)


def show_comparison(
    console: Console,
    rows: list[dict[str, Any]],
    earlier: list[dict[str, Any]],
    same: tuple[str, ...],
    name: str,
    seconds: str,
    path: Path,
) -> None:
    """Print the median seconds of each method before and now, with their ratio.

    Raises:
        ValueError: no row of the earlier run is comparable.
    """
    from thinwire.lab.bench.compare import compare

    compared = [
        [one.name, *(figure(value, ".4g") for value in (one.before, one.now, one.ratio))]
        for one in compare(rows, earlier, same, name, seconds)
    ]
    note = "ratio: seconds now over seconds before, below 1 is faster."
    show_table(console, (name, "before s", "now s", "ratio"), compared, f"Compared with {path}", note, texts=(name,))
