"""Pages of all reports, from round numbers and from results that were kept, for tests of how they look."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measured import measurement, table
from thinwire import fuse
from thinwire.lab.analyze.prediction import AssumedLink
from thinwire.lab.analyze.recording import Recording, Table
from thinwire.lab.analyze.report import build_report as analyze_report
from thinwire.lab.analyze.statistics import table_statistics
from thinwire.lab.analyze.summary import Analysis
from thinwire.lab.bench.checkpoint.report import build_report as checkpoint_report
from thinwire.lab.bench.trace import IndexTrace
from thinwire.lab.bench.train.report import build_report as train_report
from thinwire.lab.demo.compare import Comparison, VariantResult
from thinwire.lab.demo.report import build_report as demo_report
from thinwire.lab.demo.train import VARIANTS, TrainConfig
from thinwire.lab.doctor.diagnosis import Confirmed, confirm, diagnose, finalists
from thinwire.lab.doctor.report import build_report as doctor_report
from thinwire.lab.planning.planner import step_seconds
from thinwire.lab.report import Report

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
POLICIES = (fuse.cupcake(), fuse.one_bucket())
NUM_ROWS, WIDTH, RANKS = 4096, 840, 8


def doctor(mbit: float) -> Report:
    return doctor_report(diagnose("train.py", measurement(mbit), ["bf16", "top_k:density=0.01"], POLICIES))


def doctor_of_tables() -> Report:
    """A model with embedding tables, whose best ways were trained; the last of them failed."""
    tables = (table("encoder.embeddings.word_embeddings.weight"), table("decoder.weight", num_rows=30_000))
    model = measurement(100, tables=tables)
    diagnosis = diagnose("train.py", model, ["bf16", "top_k:density=0.01"], POLICIES)
    *succeeding, failing = finalists(diagnosis)
    trained = [Confirmed(way.name, step_seconds(model, way), 1.1 * step_seconds(model, way)) for way in succeeding]
    failed = Confirmed(failing.name, step_seconds(model, failing), None, "ValueError: loss is not a number")
    return doctor_report(confirm(diagnosis, [*trained, failed]), "plan.json")


def analysis() -> Report:
    """A table of words and a dense layer; the frequent words come first."""
    generator = torch.Generator().manual_seed(0)
    share = 1.0 / (1.0 + torch.arange(NUM_ROWS) / 40.0)

    def draw() -> torch.Tensor:
        return (torch.rand(NUM_ROWS, generator=generator) < share).nonzero().flatten()

    trace = IndexTrace(NUM_ROWS, WIDTH, tuple(tuple(draw() for _ in range(RANKS)) for _ in range(2)))
    words = "encoder.embeddings.word_embeddings.weight"
    tables = (Table(words, NUM_ROWS, WIDTH, "float32", "sparse"), Table("lstm.bias", 2048, 1, "float32", "dense"))
    densities = {table.name: torch.ones(2, RANKS) for table in tables}
    recording = Recording(RANKS, 2, tables, densities, {words: trace})
    network = AssumedLink(1000.0)
    statistics = table_statistics(words, trace, network=network)
    return analyze_report(Analysis("train.py", 2, recording, (statistics,), network))


def measured(name: str) -> dict[str, Any]:
    """Results of a benchmark that were kept."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def demo(*links_mbit: float | None) -> Report:
    """Four variants on each link; what they wait for gets shorter on a faster one."""
    return demo_report([_comparison(mbit) for mbit in links_mbit])


def _comparison(link_mbit: float | None) -> Comparison:
    results = {}
    waits = {"ddp": 2.0, "thinwire": 0.5, "ddp_sparse": 0.2, "thinwire_sparse": 0.1}
    for variant in VARIANTS:
        seconds = 0.12 + waits[variant.name] * 1000 / (link_mbit or 40_000)
        steps = np.linspace(0.9 * seconds, 1.1 * seconds, 12)
        sent = 500_000.0 if variant.attached else 60_000_000.0
        columns = {
            "loss": np.linspace(9.0, 6.0, 12),
            "step_seconds": steps,
            "comm_seconds": steps / 2,
            "bytes_sent": np.full(12, sent),
        }
        table = [{"name": "words_in.weight", "scheme": "zen"}] if variant.attached else []
        results[variant.name] = VariantResult(variant, columns, True, table)
    return Comparison(TrainConfig(), 4, 7_000_000, 30_000, link_mbit, results)


def nothing_pays() -> dict[str, Any]:
    """Results in which no method reached the loss of stock DDP."""
    result = measured("train-lstm-8x100mbit")
    for row in result["rows"]:
        if row["method"] != "ddp":
            row["seconds_to_dense_loss"] = None
    return result


PAGES: dict[str, Callable[[], Report]] = {
    "demo": lambda: demo(955.0),
    "demo, loopback": lambda: demo(None),
    "demo, three links": lambda: demo(95.5, 955.0, 9418.0),
    "doctor": lambda: doctor(20),
    "doctor, tables": doctor_of_tables,
    "doctor, do nothing": lambda: doctor(100_000),
    "analyze": analysis,
    "bench train, nothing pays": lambda: train_report(nothing_pays()),
    "bench train": lambda: train_report(measured("train-lstm-8x100mbit")),
    "bench train, eight methods": lambda: train_report(measured("train-digits-4xloopback")),
    "bench checkpoint": lambda: checkpoint_report(measured("checkpoint-8x100mbit")),
}
