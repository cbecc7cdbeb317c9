"""Weighted means of differences: weights, rows, compression with memories, accounts; ranks are threads."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopback import LoopbackExchange, run_ranks
from thinwire import compress
from thinwire.comm.channel import Channel, Subject
from thinwire.compress.assign import Dense
from thinwire.errors import MismatchError
from thinwire.gradients.buckets import OTHERS
from thinwire.observe.step import ParameterRecord, ParameterRecords
from thinwire.outer.average import OPENINGS, Averager, Entry, RoundReport
from threaded import LoopbackLane

SHAPES = {"table": (400, 8), "first": (40, 30), "second": (64, 33), "bias": (64,), "empty": (0, 5)}


@dataclass
class Rank:
    """One rank's averager, with drawn differences of which the table changes some rows."""

    network: LoopbackExchange
    compress: Dense = "native"
    exchange: str = "auto"
    scheme: str = "auto"
    dtype: torch.dtype = torch.float32
    shapes: Mapping[str, Sequence[int]] = field(default_factory=lambda: SHAPES)
    records: dict[str, ParameterRecord] = field(default_factory=ParameterRecords)

    def __post_init__(self) -> None:
        self.lane: Any = LoopbackLane(self.network)
        self.entries = [
            Entry(name, nn.Parameter(torch.zeros(*shape, dtype=self.dtype)), name.startswith("table"))
            for name, shape in self.shapes.items()
        ]
        dense = self.compress.by(self.exchange) if isinstance(self.compress, compress.Compressor) else self.compress
        self.averager = Averager(self.lane, self.entries, dense, self.scheme, self.records)

    def differences(self, number: int, rows: int = 20, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Those of a round; the ranks change as many rows of a table each, drawn anew."""
        seeded = torch.Generator().manual_seed(1000 * number + self.network.rank)
        found = {}
        for entry in self.entries:
            drawn = torch.randn(entry.parameter.shape, generator=seeded).to(entry.dtype)
            if entry.is_table:
                kept = torch.randperm(len(drawn), generator=seeded)[:rows]
                drawn = torch.zeros_like(drawn).index_copy(0, kept, drawn[kept])
            found[entry.name] = drawn
        return {name: found[name] for name in names or found}

    def round(self, differences: dict[str, Tensor], steps: float = 1, **settings: Any) -> RoundReport:
        report = self.averager.mean(self.lane, differences, steps, **settings)
        self.averager.finish_round()
        return report


def on_ranks(world_size: int, function: Callable[[LoopbackExchange], Any]) -> list[Any]:
    return [outcome.get() for outcome in run_ranks(world_size, lambda network: (function(network),))]


def results(world_size: int, function: Callable[[LoopbackExchange], Any]) -> list[Any]:
    return [found for (found,) in on_ranks(world_size, function)]


def all_equal(ranks: Sequence[Mapping[str, Tensor]]) -> bool:
    return all(torch.equal(ranks[0][name], other[name]) for other in ranks[1:] for name in ranks[0])


def drawn(world_size: int, number: int, **settings: Any) -> list[dict[str, Tensor]]:
    """The differences of all ranks."""
    return results(world_size, lambda network: Rank(network, **settings).differences(number))


def weighted(ranks: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The mean in float64."""
    return {
        name: sum(weight * one[name].double() for weight, one in zip(weights, ranks, strict=True)) / sum(weights)
        for name in ranks[0]
    }  # type: ignore[return-value]


# --- weights


@pytest.mark.parametrize("steps", [(8, 8, 8, 8), (5, 1, 7, 3), (4, 0, 4, 9), (0, 0, 3, 0), (0.5, 2.5, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mean_is_weighted_by_steps(steps: tuple[float, ...], dtype: torch.dtype) -> None:
    def train(network: LoopbackExchange) -> tuple[dict[str, Tensor], RoundReport]:
        rank = Rank(network, dtype=dtype)
        differences = rank.differences(0)
        return differences, rank.round(differences, steps[network.rank])

    ranks = results(4, train)
    assert all_equal([means for means, _ in ranks])
    report = ranks[0][1]
    assert all(other == report for _, other in ranks)
    assert (report.steps, report.total, report.ranks) == (steps, sum(steps), sum(one > 0 for one in steps))
    for name, mean in weighted(drawn(4, 0, dtype=dtype), steps).items():
        found = ranks[0][0][name]
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), mean, rtol=0, atol=1e-15 if dtype == torch.float64 else 5e-7)


@pytest.mark.parametrize("codec", ["native", compress.top_k(0.1)])
def test_equal_steps_have_the_bits_of_the_plain_mean(codec: Dense) -> None:
    def train(steps: float) -> list[dict[str, Tensor]]:
        def one(network: LoopbackExchange) -> dict[str, Tensor]:
            rank = Rank(network, codec)
            differences = rank.differences(0)
            rank.round(differences, steps)
            return differences

        return results(3, one)

    once = train(1)
    assert all_equal([*once, *train(7), *train(30)])
    if codec == "native":
        ranks = drawn(3, 0)
        third = 1.0 / 3
        plain = [one["first"] * third for one in ranks]
        assert torch.equal(once[0]["first"], plain[0] + plain[1] + plain[2])


@pytest.mark.few(4)
@pytest.mark.parametrize("bad", [(1,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("codec", ["native", compress.top_k(0.1), compress.qsgd()])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_rank_that_overflowed_counts_nothing(
    bad: tuple[int, ...], codec: Dense, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    def train(network: LoopbackExchange) -> tuple[Any, ...]:
        rank = Rank(network, codec)
        differences = rank.differences(0)
        buffers = [torch.full((3,), float(network.rank))]
        if network.rank in bad:
            differences["table" if network.rank == 0 else "second"][0, 0] = value
        report = rank.round(differences, 4, buffers=buffers)
        after = rank.differences(1)
        rank.round(after, 4)
        return differences, report, after, buffers[0], rank.averager.stats()

    ranks = results(4, train)
    good = [rank for rank in range(4) if rank not in bad]
    for means in ([one[0] for one in ranks], [one[2] for one in ranks]):
        assert all_equal(means)
        assert all(torch.isfinite(mean).all() for mean in means[0].values())
    assert all(one[1].refused == bad and one[1].ranks == len(good) for one in ranks)
    assert ranks[0][4]["outer/skipped_rounds"] == (not good)
    if good:
        torch.testing.assert_close(ranks[0][3], torch.full((3,), sum(good) / len(good)))
    else:
        assert not any(mean.any() for mean in ranks[0][0].values())
        assert not ranks[2][3].any()
    if good and codec == "native":
        clean = drawn(4, 0)
        mean = weighted([clean[rank] for rank in good], [1] * len(good))
        torch.testing.assert_close(ranks[0][0]["first"].double(), mean["first"], rtol=0, atol=5e-7)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == len({0, *bad})
    assert all("not finite in round 1 of 5 parameters, 'table' to 'empty'" in line for line in warned)


@pytest.mark.parametrize(("value", "refused"), [(1e20, ()), (math.inf, (1,)), (math.nan, (1,))])
def test_buffers_may_be_large_and_must_be_finite(value: float, refused: tuple[int, ...]) -> None:
    def train(network: LoopbackExchange) -> tuple[RoundReport, Tensor, Tensor]:
        rank = Rank(network)
        buffer, narrow = torch.full((2,), value if network.rank else 1.0), torch.ones(3, dtype=torch.bfloat16)
        return rank.round(rank.differences(0), 2, buffers=[buffer, narrow]), buffer, narrow

    for report, buffer, narrow in results(2, train):
        assert report.refused == refused
        assert buffer.tolist() == ([1.0, 1.0] if refused else [pytest.approx(5e19)] * 2)
        assert narrow.tolist() == [1.0] * 3


def test_rounds_may_be_of_nothing_and_carry_flags() -> None:
    def train(network: LoopbackExchange) -> RoundReport:
        return Rank(network).round({}, 3, flag=10 + network.rank)

    assert results(3, train) == [RoundReport((3.0, 3.0, 3.0), (), (10, 11, 12))] * 3


def test_empty_tables_and_complex_parameters() -> None:
    def train(network: LoopbackExchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank = Rank(network, compress.top_k(0.1), shapes={"table": (0, 8), "table.few": (5, 3), "table.flat": (7,)})
        differences = rank.differences(0, rows=2)
        rank.round(differences, 1)
        parameter = nn.Parameter(torch.zeros(40, 40, dtype=torch.complex64))
        averager = Averager(
            rank.lane, [Entry("wave", parameter, False)], compress.top_k(0.1), "auto", ParameterRecords()
        )
        waves = {"wave": torch.full((40, 40), 1 + 2j * network.rank)}
        averager.mean(rank.lane, waves, 1 + network.rank)
        return differences, waves

    ranks = results(2, train)
    assert all_equal([differences for differences, _ in ranks])
    assert [list(mean.shape) for mean in ranks[0][0].values()] == [[0, 8], [5, 3], [7]]
    for _, waves in ranks:
        torch.testing.assert_close(waves["wave"], torch.full((40, 40), 1 + 4j / 3))


def test_ranks_that_pass_other_names_are_told() -> None:
    def train(network: LoopbackExchange) -> None:
        rank = Rank(network)
        rank.round(rank.differences(0, names=["first"] if network.rank == 1 else ["second"]), 1)

    for outcome in run_ranks(2, train):
        assert isinstance(outcome.error, MismatchError)
        assert "differences of parameter 'first'" in str(outcome.error)


# --- tables


@pytest.mark.parametrize("scheme", ["auto", "zen", "agsparse", "column_split", "dense"])
@pytest.mark.parametrize("steps", [(3, 3, 3), (3, 1, 2)])
def test_tables_are_exact(scheme: str, steps: tuple[int, ...]) -> None:
    """Rows that one rank alone changed, rows of several, and rows that cancel."""

    def train(network: LoopbackExchange) -> list[Tensor]:
        rank = Rank(network, scheme=scheme, shapes={"table": (3000, 16), "table.small": (300, 16)})
        found = []
        for number, rows in enumerate((50, 0, 300, 3)):
            differences = rank.differences(number, rows)
            differences["table"][7] = -2.0 / steps[1] if network.rank == 1 else 2.0 / steps[0] * (network.rank == 0)
            rank.round(differences, steps[network.rank])
            found += list(differences.values())
        return found

    def exact(network: LoopbackExchange) -> list[Tensor]:
        rank = Rank(network, shapes={"table": (3000, 16), "table.small": (300, 16)})
        found = []
        for number, rows in enumerate((50, 0, 300, 3)):
            differences = rank.differences(number, rows)
            differences["table"][7] = -2.0 / steps[1] if network.rank == 1 else 2.0 / steps[0] * (network.rank == 0)
            found += list(differences.values())
        return found

    ranks, before = results(3, train), results(3, exact)
    for place in range(len(ranks[0])):
        assert all(torch.equal(one[place], ranks[0][place]) for one in ranks)
        mean = sum(steps[k] * before[k][place].double() for k in range(3)) / sum(steps)
        assert isinstance(mean, Tensor)
        torch.testing.assert_close(ranks[0][place].double(), mean, rtol=0, atol=1e-6)
        touched = torch.stack([one[place].any(1) for one in before]).any(0)
        assert not ranks[0][place][~touched].any(), "no row changes that no rank changed"


def test_bytes_of_a_table_follow_its_rows() -> None:
    def train(network: LoopbackExchange) -> list[int]:
        rank = Rank(network, shapes={"table": (20_000, 32)})
        sent = []
        for number, rows in enumerate((0, 100, 200, 400, 20_000, 0, 100)):
            before = network.traffic.sent_bytes
            rank.round(rank.differences(number, rows), 2)
            sent.append(network.traffic.sent_bytes - before)
        return sent

    dense = 2 * 3 / 4 * 20_000 * 32 * 4
    for nothing, hundred, twice, four, all_rows, nothing_again, again in results(4, train):
        assert max(nothing, nothing_again) < 2000, "headers"
        for rows, sent in ((100, hundred), (200, twice), (400, four), (100, again)):  # again: after a dense round
            values = 3 * rows * 32 * 4  # of the others: few rows are the same
            assert 0.95 * values < sent < 1.4 * values
        assert all_rows < 1.01 * dense


def test_no_clock_decides_how_a_table_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed loop measured its links anew, so that its rounds could add in another order."""

    def refuse() -> None:
        raise AssertionError("measured")

    def channel(lane: LoopbackLane, subject: Subject) -> Channel:
        made = opened(lane, subject)
        made._measure = refuse
        return made

    opened = LoopbackLane.channel
    monkeypatch.setattr(LoopbackLane, "channel", channel)

    def train(network: LoopbackExchange) -> None:
        rank = Rank(network)
        rank.round(rank.differences(0, rows=20))

    results(4, train)


# --- bytes


@pytest.mark.parametrize("codec", ["native", compress.top_k(0.05), compress.qsgd(), compress.power_sgd(2)])
def test_bytes_are_those_predicted_and_those_counted(codec: Dense) -> None:
    def train(network: LoopbackExchange) -> tuple[dict[str, ParameterRecord], int]:
        rank = Rank(network, codec, scheme="column_split", shapes={**SHAPES, "table": (4000, 16)})
        for number in range(3):
            before = network.traffic.sent_bytes
            rank.round(rank.differences(number, 100 + 50 * number), 2)
        return rank.records, network.traffic.sent_bytes - before

    for records, sent in results(4, train):
        rows = {name: record.row() for name, record in records.items()}
        assert sum(row["bytes"] for row in rows.values()) == sent
        assert rows[OPENINGS]["bytes"] == rows[OPENINGS]["predicted_bytes"] == 3 * (56 + 56)
        for name, row in rows.items():
            assert row["bytes"] == pytest.approx(row["predicted_bytes"], rel=0.1, abs=64), name
        if codec == "native":
            assert rows[OTHERS]["bytes"] == rows[OTHERS]["predicted_bytes"]


# --- memories


def owed(rank: Rank) -> dict[str, Tensor]:
    """The part of the mean that this rank has not sent."""
    sync = rank.averager._compressed
    assert sync is not None
    found = {name: sync.memories.outstanding(name) for name in sync.plans}
    return {name: rest.double().flatten() / rank.lane.world_size for name, rest in found.items() if rest is not None}


CODECS: dict[str, tuple[Dense, str]] = {
    "gathered": (compress.top_k(0.05), "all_gather"),
    "two_shot": (compress.top_k(0.05), "two_shot"),
    "zen": (compress.top_k(0.05), "zen"),
    "sparse_loco": (compress.error_feedback(compress.top_k(0.0156, values=compress.qsgd(2))), "auto"),
    "power_sgd": (compress.power_sgd(2), "auto"),
    "dgc": (compress.dgc(0.05, momentum=0.0), "auto"),
    "by_name": ({"first": compress.top_k(0.05), "*": "native"}, "auto"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CODECS)
def test_nothing_is_lost_but_delayed(name: str) -> None:
    """What arrived, and what is owed, is the sum of all weighted differences."""
    codec, exchange = CODECS[name]
    steps = [(4, 4, 4), (3, 1, 2), (0, 5, 1), (2, 2, 2)]

    def train(network: LoopbackExchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank = Rank(network, codec, exchange)
        arrived: dict[str, Tensor] = {}
        for number, of_ranks in enumerate(steps):
            differences = rank.differences(number)
            rank.round(differences, of_ranks[network.rank])
            arrived = {one: arrived.get(one, 0) + mean.double() for one, mean in differences.items()}
        return arrived, owed(rank)

    ranks = results(3, train)
    expected = [weighted(drawn(3, number), of_ranks) for number, of_ranks in enumerate(steps)]
    names = list(ranks[0][1])
    assert names == (["first"] if name == "by_name" else ["first", "second"])
    for one in ranks[0][0]:
        total = sum(mean[one] for mean in expected).flatten()  # type: ignore[union-attr]
        rest = sum(rests[one] for _, rests in ranks) if one in names else 0.0
        if one in names:
            assert float(rest.abs().max()) > 0.1, "something is owed"
        torch.testing.assert_close(ranks[0][0][one].flatten() + rest, total, rtol=0, atol=5e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CODECS)
def test_a_round_that_is_not_committed_is_sent_again_alike(name: str) -> None:
    codec, exchange = CODECS[name]

    def train(network: LoopbackExchange, fails: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        rank = Rank(network, codec, exchange)
        rank.round(rank.differences(0), 3)
        if fails:
            before = copy.deepcopy(rank.averager.state_dict()["compress"]["states"])
            rank.averager.mean(rank.lane, rank.differences(1), 3)
            rank.averager.finish_round(committed=False)
            torch.testing.assert_close(rank.averager.state_dict()["compress"]["states"], before, rtol=0, atol=0)
        differences = rank.differences(1)
        rank.round(differences, 3)
        return differences, rank.averager.state_dict()["compress"]["states"]

    for one, other in zip(
        results(3, lambda network: train(network, True)),
        results(3, lambda network: train(network, False)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.few(3)
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_a_restored_averager_goes_on_with_the_same_bits(codec: str | None) -> None:
    chosen, exchange = CODECS[codec] if codec else ("native", "auto")

    def train(network: LoopbackExchange, breaks: bool) -> dict[str, Tensor]:
        rank = Rank(network, chosen, exchange)
        for number in range(5):
            if breaks and number == 3:
                state = copy.deepcopy(rank.averager.state_dict())
                rank = Rank(network, chosen, exchange)
                rank.averager.check_state(state)
                rank.averager.load_state_dict(state)
            differences = rank.differences(number)
            rank.round(differences, 1 + number % 2 * network.rank)
        return differences

    undisturbed = results(2, lambda network: train(network, False))
    assert all_equal([*undisturbed, *results(2, lambda network: train(network, True))])


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("before", "after"), [(4, 3), (4, 1), (2, 3)])
def test_ranks_that_go_on_with_others_still_owe_what_they_owed(name: str, before: int, after: int) -> None:
    codec, exchange = CODECS[name]

    def first(network: LoopbackExchange) -> Rank:
        rank = Rank(network, codec, exchange)
        rank.round(rank.differences(0), 2)
        return rank

    known = results(before, first)
    rests = [owed(rank) for rank in known]

    def second(network: LoopbackExchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        joins = network.rank >= before
        rank = Rank(network, codec, exchange) if joins else known[network.rank]
        rank.network, rank.lane = network, LoopbackLane(network)
        rank.averager.moved_to(rank.lane)
        for one, rest in rests[network.rank].items() if not joins else ():
            torch.testing.assert_close(owed(rank)[one], rest, rtol=1e-6, atol=1e-7)
        differences = rank.differences(1)
        rank.round(differences, 2)
        return differences, owed(rank)

    ranks = results(after, second)
    assert all_equal([means for means, _ in ranks])
    mean = weighted(drawn(after, 1), [1] * after)
    for one in ranks[0][1]:
        expected = mean[one].flatten() + sum(rest[one] for rest in rests[:after])
        left = sum(rest[one] for _, rest in ranks)
        torch.testing.assert_close(ranks[0][0][one].double().flatten() + left, expected, rtol=0, atol=5e-5)


def test_only_memories_make_momentum_doubtful() -> None:
    def train(network: LoopbackExchange) -> list[bool]:
        codecs = ("native", compress.qsgd(), compress.top_k(0.1), compress.fp16())
        return [Rank(network, codec).averager.remembers for codec in codecs]

    assert results(1, train) == [[False, False, True, False]]


@pytest.mark.parametrize(
    "codec", [compress.sign_sgd(), compress.sign_sgd(0.0), compress.leave_small(compress.sign_sgd())]
)
def test_signs_without_a_size_are_refused(codec: Dense) -> None:
    """No learning rate scales a difference: parameters would go by 1 in every round."""

    def train(network: LoopbackExchange) -> None:
        with pytest.raises(ValueError, match=r"'first' makes each element .* take ef_sign_sgd"):
            Rank(network, codec)
        Rank(network, compress.ef_sign_sgd())

    results(1, train)


def test_what_all_ranks_agree_on() -> None:
    (lines,) = results(1, lambda network: Rank(network, compress.top_k(0.1)).averager.describe())
    assert "parameter 'table': torch.float32 [400, 8], as rows" in lines
    assert "parameter 'first' is compressed: error_feedback(top_k(0.1)) by all_gather" in lines
    assert "parameter 'bias': torch.float32 [64]" in lines
