"""Rows as messages, each sent once: what is sent comes back, within its limit, and is added in rank order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire import schemes
from thinwire.comm.channel import Channel, Subject
from thinwire.errors import CorruptMessageError
from thinwire.rows.formats import Format, FormatChoice, Kind, Whole
from thinwire.rows.sparse import SparseRows
from thinwire.sums import direct
from thinwire.sums.named import name_of

FORMATS = [format for format in Format if format is not Format.DENSE]


def channel_of(exchange: LoopbackExchange) -> Channel:
    return Channel(exchange, Subject("table", "rows of a test"), 0)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[SparseRows, FormatChoice]:
    num_rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    ids = sorted(draw(st.sets(st.integers(0, num_rows - 1))))
    values = torch.arange(1.0, 1 + len(ids) * width).view(len(ids), width)
    choice = FormatChoice((draw(st.sampled_from(FORMATS)),), draw(st.booleans()))
    return SparseRows(torch.tensor(ids, dtype=torch.int64), values, num_rows), choice


@given(pieces())
def test_a_piece_comes_back_as_it_is_said_to_be_sent(case: tuple[SparseRows, FormatChoice]) -> None:
    rows, choice = case
    whole = Whole(rows.num_rows)

    def run(exchange: LoopbackExchange) -> object:
        channel = channel_of(exchange)
        made = direct.draft(choice, whole, rows, channel, (rows.ids, rows.values))
        assert (made.count, made.held) == (rows.ids.numel(), rows.ids.numel())
        assert made.payload.numel() <= direct.limit(rows, whole)
        (message,) = channel.seal(Kind.GATHER, [made])
        return direct.decode(message, whole, rows, channel), direct.as_sent(choice, whole, (rows.ids, rows.values))

    ((ids, values), sent) = run_ranks(1, run)[0].get()  # type: ignore[misc]
    assert torch.equal(ids, sent[0])
    assert torch.equal(values, sent[1])
    dense = torch.zeros(rows.num_rows, rows.width).index_copy_(0, ids, values)
    assert torch.equal(dense, rows.to_dense()), "nothing but rows of zeros is added"


def test_what_is_sent_dense_has_a_row_for_each_position() -> None:
    rows = SparseRows(torch.arange(16)[torch.arange(16) != 5], torch.ones(15, 1), 16)
    switch, never = FormatChoice((Format.COO,), True), FormatChoice((Format.COO,))
    piece = rows.ids, rows.values
    ids, values = direct.as_sent(switch, Whole(16), piece)
    assert ids.tolist() == list(range(16))
    assert torch.equal(values, rows.to_dense())
    assert direct.as_sent(never, Whole(16), piece) is piece
    few = (rows.ids[:1], rows.values[:1])
    assert direct.as_sent(switch, Whole(16), few) is few


def test_a_limit_is_that_of_the_largest_part() -> None:
    rows = SparseRows(torch.tensor([1]), torch.ones(1, 8), 100)
    small, large = Whole(10), Whole(100)
    assert direct.limit(rows, small, large) == direct.limit(rows, large) > direct.limit(rows, small)
    assert direct.limit(rows, large) >= 100 * 8 * 4


BIG_ONE_LESS = (1e8, -1e8, 1.0)
"""Which are 1 in this order of addition, and 0 in any other, in float32."""


@pytest.mark.parametrize("scheme", [schemes.AGSPARSE, schemes.SPARSE_PS, schemes.ZEN], ids=name_of)
def test_rows_are_added_in_rank_order_and_scaled_before_they_are_rounded(scheme: schemes.Scheme) -> None:
    def run(exchange: LoopbackExchange) -> Tensor:
        channel = channel_of(exchange)
        rows = SparseRows(torch.tensor([exchange.rank, 5]), torch.full((2, 1), BIG_ONE_LESS[exchange.rank]), 8)
        channel.open(2)
        if not scheme.is_parallel:
            return direct.all_reduce(rows, scheme, channel, 0.5).to_dense()
        partition = scheme.rows_partition(8, 3)
        total = direct.reduce_scatter(rows, partition, scheme, channel, 0.5)
        return direct.all_gather(rows, total, partition, scheme, channel).to_dense()

    for outcome in run_ranks(3, run):
        assert outcome.get().view(-1).tolist() == [5e7, -5e7, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0]


def test_a_message_that_cannot_be_names_its_sender() -> None:
    """Sealed well, with ids that are not of the part."""

    def run(exchange: LoopbackExchange) -> None:
        channel = channel_of(exchange)
        rows = SparseRows(torch.tensor([7]), torch.ones(1, 2), 8)
        made = direct.draft(FormatChoice((Format.COO,)), Whole(8), rows, channel, (rows.ids, rows.values))
        (message,) = channel.seal(Kind.GATHER, [made])
        direct.decode(message, Whole(4), rows, channel)

    (outcome,) = run_ranks(1, run)
    assert isinstance(outcome.error, CorruptMessageError)
    assert "from rank 0" in str(outcome.error)
