"""Predicted bytes and seconds: near the exact bytes of recorded ids, and sane on the machine that is assumed."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from thinwire.lab.analyze.prediction import AssumedLink, Prediction, fault_of, predict, predict_one
from thinwire.lab.analyze.recording import Recording, Table
from thinwire.lab.analyze.report import build_report
from thinwire.lab.analyze.statistics import densification_curve, table_statistics
from thinwire.lab.analyze.summary import Analysis, explanations, warnings_of
from thinwire.lab.bench.trace import IndexTrace
from thinwire.lab.cli.analyze import parse_network
from thinwire.lab.ledger import sent_bytes
from thinwire.sums.cost import Demand
from thinwire.sums.named import NAMED, name_of
from thinwire.tune.prices import choose

NUM_ROWS, RANKS = 4096, 8
WIDTH = 840  # 2 to 8 ranks divide it, so that columns are dealt evenly
EVEN = ("zen", "column_split", "agsparse", "dense")


def zipf_trace(steps: int = 2) -> IndexTrace:
    """Few rows that all ranks touch and many that few do, the frequent ones first, as words have it."""
    generator = torch.Generator().manual_seed(0)
    share = 1.0 / (1.0 + torch.arange(NUM_ROWS) / 40.0)

    def draw() -> torch.Tensor:
        return (torch.rand(NUM_ROWS, generator=generator) < share).nonzero().flatten()

    return IndexTrace(NUM_ROWS, WIDTH, tuple(tuple(draw() for _ in range(RANKS)) for _ in range(steps)))


@pytest.mark.parametrize("world_size", range(2, RANKS + 1))
def test_expected_bytes_are_near_the_exact_ones(world_size: int) -> None:
    whole = zipf_trace()
    steps = tuple(step[:world_size] for step in whole.steps)
    trace = replace(whole, steps=steps)
    (prediction,) = predict(trace, torch.float32, densification_curve(steps), 0.5, ranks=(world_size,))
    assert not prediction.extrapolated
    for name in EVEN:
        exact = fmean(fmean(sent_bytes(NAMED[name], step, NUM_ROWS, WIDTH, torch.float32)) for step in steps)
        assert prediction.bytes[name] == pytest.approx(exact, rel=0.03), name


def test_the_pick_is_what_auto_chooses_and_seconds_follow_the_link() -> None:
    trace = zipf_trace(steps=1)
    curve = densification_curve(trace.steps)
    held = fmean(ids.numel() for ids in trace.steps[0])
    slow, fast = (predict(trace, torch.float32, curve, 0.5, AssumedLink(mbit), (2, 8)) for mbit in (10.0, 1e6))
    for prediction, other in zip(slow, fast, strict=True):
        world_size = prediction.world_size
        machine = AssumedLink(10.0).machine(world_size)
        auto = choose(Demand(world_size, NUM_ROWS, WIDTH, 4, held, prediction.union), machine)
        assert prediction.pick == name_of(auto)
        assert prediction.pick in prediction.explanation
        assert prediction.bytes == other.bytes, "bytes are no matter of the link"
        assert all(prediction.seconds[name] > other.seconds[name] > 0 for name in NAMED)
        link_seconds = prediction.bytes["dense"] * 8 / 10e6
        assert link_seconds <= prediction.seconds["dense"] <= link_seconds + 4 * world_size * 50e-6


def test_an_assumed_machine_is_the_link_and_this_process() -> None:
    small, large = (AssumedLink(1000, 50e-6).machine(ranks) for ranks in (2, 1024))
    assert small.byte_seconds == small.reduced_byte_seconds == pytest.approx(8e-9)
    assert small.round_seconds == small.message_seconds == 50e-6
    assert large.round_seconds == pytest.approx(10 * 50e-6)
    assert large == replace(small, round_seconds=large.round_seconds), "kernels are the same, whatever the ranks"
    assert 0 < small.part_seconds < 1
    rates = (small.send_id_seconds, small.add_id_seconds, small.join_id_seconds, small.send_byte_seconds)
    assert all(0 <= rate < 1e-3 for rate in rates)


@pytest.mark.parametrize(
    ("link", "latency", "network"),
    [
        ("1gbit", "50us", AssumedLink(1000, 50e-6)),
        ("100mbit", "0.2ms", AssumedLink(100, 0.2e-3)),
        ("10gbit", "50us", AssumedLink()),
    ],
)
def test_network_options(link: str, latency: str, network: AssumedLink) -> None:
    assert parse_network(link, latency) == network


def impossible() -> Prediction:
    demand = Demand(4, NUM_ROWS, WIDTH, 4, held=2.0 * NUM_ROWS, union=1.0 * NUM_ROWS)
    return predict_one(demand, AssumedLink().machine(4), extrapolated=False)


def test_nearly_all_rows_are_dense_and_the_explanation_says_why() -> None:
    demand = Demand(4, NUM_ROWS, WIDTH, 4, held=0.95 * NUM_ROWS, union=1.0 * NUM_ROWS)
    prediction = predict_one(demand, AssumedLink().machine(4), extrapolated=False)
    assert (prediction.pick, prediction.warning) == ("dense", None)
    assert prediction.explanation == "dense: a rank holds 95% of all rows"
    assert set(prediction.seconds) == set(NAMED)


def analysis_of(trace: IndexTrace) -> Analysis:
    table = Table("words", NUM_ROWS, WIDTH, "float32", "sparse")
    densities = {"words": torch.ones(len(trace.steps), trace.world_size)}
    recording = Recording(trace.world_size, 1, (table,), densities, {"words": trace})
    statistics = table_statistics("words", trace, network=AssumedLink(1000.0), ranks=(2, 64))
    return Analysis("train.py", 1, recording, (statistics,), AssumedLink(1000.0))


@pytest.mark.slow
def test_numbers_that_cannot_be_pick_dense_and_say_so() -> None:
    prediction = impossible()
    assert prediction.pick == "dense"
    assert set(prediction.bytes) == set(prediction.seconds) == {"dense"}
    assert prediction.warning is not None
    assert "8192 rows of a tensor that has 4096" in prediction.warning
    assert prediction.warning in prediction.explanation
    analysis = analysis_of(zipf_trace(steps=1))
    table = replace(analysis.sparse[0], predictions=(*analysis.sparse[0].predictions, prediction))
    assert warnings_of(table) == [f"Warning: {prediction.warning}."]
    page = build_report(replace(analysis, sparse=(table,))).html()
    assert "Warning: sparsity statistics that cannot be" in page
    assert "using dense" in page


@pytest.mark.parametrize(
    ("counts", "union"),
    [([], None), ([float("nan")] * 4, None), ([5.0] * 4, float("nan")), ([2000.0] * 4, None), ([5.0] * 4, 3.0)],
)
def test_numbers_that_cannot_be_have_a_fault(counts: list[float], union: float | None) -> None:
    assert fault_of(Demand.of(counts, 1000, 16, 4, union)) is not None
    assert fault_of(Demand.of([5.0] * 4, 1000, 16, 4)) is None


@pytest.mark.slow
def test_json_and_page_say_what_was_assumed_and_what_is_exact() -> None:
    analysis = analysis_of(zipf_trace(steps=1))
    figures = json.loads(json.dumps(analysis.to_json(), allow_nan=False))
    assert figures["machine"]["mbit"] == 1000
    assert figures["machine"]["world_size"] == RANKS
    assert "assumed" in figures["machine"]["assumed"]
    (words,) = figures["parameters"]
    for prediction in words["predictions"]:
        recorded = prediction["world_size"] == RANKS
        assert prediction["exact_bytes"] == (words["sent_bytes"] if recorded else None)
        assert prediction["warning"] is None
    page = build_report(analysis).html()
    assert "words: predicted seconds by number of ranks" in page
    assert "Predicted, not measured: 1000 Mbit/s a rank and 50 us between two, assumed" in page
    lines = explanations(analysis.sparse[0])
    assert lines
    assert all(line in page for line in lines)
