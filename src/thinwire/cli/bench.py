"""`thinwire bench`: measure on emulated hosts."""

from __future__ import annotations

from typing import ClassVar

import typer

from thinwire.cli.commands import LazyGroup

WORKLOADS = "bert, deepfm, llm_dgc, lstm, nmt"
SCHEMES = (
    "dense, agsparse, agsparse_coded, sparse_ps, balanced_parallelism, zen, column_split, union_split, zen_elements,"
    " omnireduce, omnireduce_contiguous, dense_ps, dense_ring, dense_halving_doubling, agsparse_ring,"
    " agsparse_hierarchy, sparcml, sparcml_dense, sparcml_split, sparcml_split_dense, sparcml_coded,"
    " hierarchical_centralization, auto, agsparse_torch"
)
DTYPES = "float32, float64, bfloat16, float16"
JOBS = "lstm, digits, gpt"
METHODS = (
    "ddp, bf16, powersgd_torch, thinwire, plan, top_k, dgc, gaussian_k, redsync, sidco, ms_top_k, random_k, sign_sgd,"
    " ef_sign_sgd, qsgd, terngrad, natural, int8, fp8, fp16, power_sgd, acp_sgd, atomo, ok_topk, hi_top_k"
)
CHECKPOINT_METHODS = "none,dcp_sync,dcp_async,blocking,thinwire"
"""Names that the help lists, written out since the modules that define them import torch; a test compares them."""


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
