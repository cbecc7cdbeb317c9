"""`thinwire bench sync` of dense workloads, and `bench train` of lossless methods: bits, bytes and what a row says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.lab.bench.dense.rank import METHODS
from thinwire.lab.bench.dense.workload import DenseWorkload
from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.cli.main import app
from thinwire.lab.testbed.launch import RankContext, run_ranks

JOB = "gpt:num_words=300:length=9:head_dim=16:batch_size=4"
CONTRACT = {
    "workload", "scheme", "world_size", "ranks_per_host", "link_mbit", "dtype", "values", "buckets", "zeros",
    "ideal_bits_push", "ideal_bits_pull", "bits_push", "bits_pull", "encode_seconds", "decode_seconds",
    "bytes_sent_max", "bytes_predicted_max", "bytes_between_hosts_max", "bytes_link_max", "bits_per_value",
    "seconds_median", "seconds_p10", "seconds_p90", "speedup_vs_native", "max_abs_error", "relative_error",
    "bitwise_rank_order", "bitwise_equal_across_ranks",
}  # fmt: skip

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("small_corpus")]


def invoke(file: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", *arguments, "--link", "none", "--json", str(file)])
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text()) | {"output": " ".join(result.output.split())}


def test_every_method_sums_the_recorded_gradients(tmp_path: Path) -> None:
    workload = f"dense:{JOB}:autocast:accumulate=2:after=1"
    result = invoke(tmp_path / "out.json", "sync", "--hosts", "3", "--workload", workload, "--repeat", "2")
    rows = {row["scheme"]: row for row in result["rows"]}
    assert tuple(rows) == METHODS
    assert all(row.keys() == CONTRACT and row["bitwise_equal_across_ranks"] for row in rows.values())
    native, lossless, bf16, rank_order = rows.values()
    assert sum(native["buckets"]) == native["values"]
    assert native["values"] % 3, "pieces of two sizes"
    assert native["bits_per_value"] == pytest.approx(64.0, rel=1e-3)
    assert bf16["bits_per_value"] == pytest.approx(32.0, rel=1e-3)
    assert rank_order["bits_per_value"] == pytest.approx(64.0, rel=1e-3)
    for row in (native, bf16, rank_order):
        assert row["bytes_sent_max"] == row["bytes_predicted_max"]
    assert lossless["bitwise_rank_order"]
    assert rank_order["bitwise_rank_order"]
    assert lossless["max_abs_error"] == rank_order["max_abs_error"]
    assert native["relative_error"] < 1e-6 < 1e-4 < bf16["relative_error"]
    assert lossless["bits_per_value"] < 64.5
    assert lossless["bits_push"] + lossless["bits_pull"] == pytest.approx(lossless["bits_per_value"], rel=1e-3)
    assert lossless["bytes_sent_max"] == pytest.approx(lossless["bytes_predicted_max"], rel=0.03)
    assert native["bits_push"] is None
    assert 8 < native["ideal_bits_push"] < native["ideal_bits_pull"] < 32
    assert "All ranks got the same bits." in result["output"]


def recorded(context: RankContext, text: str, data: Data) -> list[tuple[int, float]]:
    found = DenseWorkload(text).record(context.rank, context.world_size, data)
    return [(bucket.numel(), float(bucket.double().square().sum())) for bucket in found]


def test_gradients_are_those_of_each_rank_and_the_same_in_every_run() -> None:
    first, again, accumulated, later = (
        [outcome.value for outcome in run_ranks(recorded, f"dense:{JOB}:{how}", get_job(JOB).load(), world_size=2)]
        for how in ("after=2", "after=2", "after=2:accumulate=3", "after=3")
    )
    assert first == again
    assert first[0] != first[1], "each rank has batches of its own"
    assert [size for size, _ in first[0]] == [size for size, _ in first[1]]
    assert first != accumulated
    assert first != later


def test_a_lossless_training_has_the_losses_of_the_sum_in_rank_order(tmp_path: Path) -> None:
    result = invoke(
        tmp_path / "out.json", "train", "--job", JOB, "--hosts", "3", "--seeds", "1", "--steps", "3", "--extra", "0",
        "--methods", "ddp,lossless,rank_order,bf16", "--autocast", "--accumulate", "2",
    )  # fmt: skip
    ddp, lossless, rank_order, bf16 = result["rows"]
    assert lossless["bitwise_rank_order"]
    assert not bf16["bitwise_rank_order"]
    assert len({row["parameters_digest"] for row in (ddp, lossless, bf16)}) == 3, "a ring adds in another order"
    assert lossless["loss_curve"] == rank_order["loss_curve"]
    assert all(row["bitwise_equal_across_ranks"] for row in result["rows"])
    assert 20 < lossless["lossless_bits_per_value"] < 64.5
    assert lossless["lossless_bits_per_value"] == pytest.approx(lossless["bits_per_value"], rel=0.02)
    assert ddp["bits_per_value"] == pytest.approx(64.0, rel=1e-4), "pieces of whole values"
    assert bf16["bits_per_value"] == pytest.approx(32.0, rel=1e-4)
    assert (result["environment"]["accumulate"], result["environment"]["autocast"]) == (2, "bfloat16")
    assert "bit for bit the same as of rank_order: lossless." in result["output"]
    assert {row["accumulate"] for row in result["rows"]} == {2}
