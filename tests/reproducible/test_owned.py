"""The mean by owners: bits on all ranks, bytes, and messages that are no such thing."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.errors import CorruptMessageError
from thinwire.reproducible import gradients
from thinwire.reproducible.exact import ExactSum
from thinwire.reproducible.owned import ExactMean
from thinwire.rows import floats
from thinwire.sums import owners
from thinwire.sums.lossless import Half

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def parts_of(kind: str, numel: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(numel + count)
    found = []
    for _ in range(count):
        values = torch.randn(numel, generator=draw) * torch.exp(2 * torch.randn(numel, generator=draw))
        if kind == "autocast":
            values = values.bfloat16().float() * (torch.rand(numel, generator=draw) < 0.9)
        if kind == "wide":
            values = values * torch.exp2(torch.randint(-60, 60, (numel,), generator=draw).float())
        found.append(values.to(dtype))
    return found


def mean_on_ranks(parts: list[Tensor], world_size: int, seed: int) -> tuple[list[Tensor], list[float]]:
    """The mean on each rank of parts that are dealt at random, and bits of a value of the pull."""
    shares: list[list[Tensor]] = [[] for _ in range(world_size)]
    for part in parts:
        random.Random(seed).choice(shares).append(part)
        seed += 1

    def run(exchange: LoopbackExchange) -> tuple[Tensor, float]:
        totals = []
        for share in shares:  # terms of all ranks are gathered by another exchange
            totals.append(ExactSum(torch.zeros(parts[0].numel(), dtype=torch.float64)))
            for part in share:
                totals[-1].add(part)
        mine = totals[exchange.rank]
        before = mine.values.clone()
        out, push, pull = torch.empty_like(parts[0]), Half(), Half()
        terms = [pair for total in totals for pair in total.terms]
        channel = Channel(exchange, Subject("mean", ""), 0)
        channel.open()
        owners.begin(ExactMean(mine, len(parts), out, channel, push, pull, terms), channel)()
        assert torch.equal(mine.values.view(torch.int64), before.view(torch.int64)), (
            "the sums are needed again if a rank is lost"
        )
        return out, pull.bits

    found = [outcome.get() for outcome in run_ranks(world_size, run)]
    return [out for out, _ in found], [bits for _, bits in found]


@pytest.mark.parametrize("kind", ["float32", "autocast", "wide"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 5000, 70001])
def test_all_ranks_get_the_bits_of_one(kind: str, dtype: torch.dtype, numel: int) -> None:
    if numel > 5000 and (kind, dtype) not in (("float32", torch.float32), ("autocast", torch.float32)):
        pytest.skip("one by one, slowly")
    parts = parts_of(kind, 300 if numel == 5000 and (kind == "wide" or dtype == torch.float64) else numel, 7, dtype)
    whole = ExactSum(torch.zeros(parts[0].numel(), dtype=torch.float64))
    for part in parts:
        whole.add(part)
    expected = whole.mean(7, dtype)
    for world_size, seed in ((2, 0), (3, 1)):
        for out in mean_on_ranks(parts, world_size, seed)[0]:
            assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_sums_travel_where_means_are_longer() -> None:
    """A third of a short number fills a mantissa."""
    parts = parts_of("autocast", 16384, 6, torch.float32)
    means, bits = mean_on_ranks(parts, 2, 0)
    assert max(bits) < floats.bits_per_value(means[0]) - 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([3], "3 means beside 8 sums"),
        ([0.0] * 8 + [9, 9], "9 means beside 8 sums"),
        ([0.0] * 8 + [8, 1.0, 1], "of none of them"),
        ([0.0] * 8 + [-5, 1.0, 1], "of none of them"),
        ([0.0] * 8 + [-7], "-7 means"),
    ],
)
def test_a_message_that_is_none_is_refused(words: list[float], text: str) -> None:
    dtypes = {float: torch.float32, int: torch.int32}
    packed = [torch.tensor([word], dtype=dtypes[type(word)]).view(torch.uint8) for word in words]

    def run(exchange: LoopbackExchange) -> tuple[str]:
        total, out = ExactSum(torch.zeros(16, dtype=torch.float64)), torch.zeros(16)
        code = ExactMean(total, 2, out, Channel(exchange, Subject("mean", ""), 0), Half(), Half(), [])
        code.cuts = [[slice(0, 8)], [slice(8, 16)]]
        with pytest.raises(CorruptMessageError, match=text):
            code.take(1 - exchange.rank, 0, partial(torch.cat, packed))
        return (text,)

    for outcome in run_ranks(2, run):
        outcome.get()


def test_terms_travel_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model in float64 took one message of a size that no rank accepts."""
    monkeypatch.setattr(gradients, "TERMS_AT_ONCE", 2, raising=False)
    gather, sizes = gradients.gather_bytes, list[int]()

    def noted(exchange: Any, what: str, data: bytes, *limit: int) -> list[bytes]:
        sizes.append(len(data))
        return gather(exchange, what, data, *limit)

    monkeypatch.setattr(gradients, "gather_bytes", noted)

    def run(exchange: LoopbackExchange) -> list[tuple[int, float]]:
        total = ExactSum(torch.zeros(8, dtype=torch.float64))
        ids = torch.arange((0, 4, 5)[exchange.rank])
        total.terms.append((ids, (ids + 0.5 * exchange.rank).double()))
        lane: Any = SimpleNamespace(exchange=exchange)
        pairs = [torch.stack([ids, terms], 1) for ids, terms in gradients._gathered_terms(lane, "sums", total)]
        return sorted(map(tuple, torch.cat(pairs).tolist()))

    expected = sorted([(n, n + 0.5) for n in range(4)] + [(n, n + 1.0) for n in range(5)])
    assert [outcome.get() for outcome in run_ranks(3, run)] == [expected] * 3
    assert max(sizes) <= 2 * 16
