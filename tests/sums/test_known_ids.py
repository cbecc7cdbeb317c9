"""Sums by ranks that know the ids of all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopback import run_ranks, synchronized
from thinwire.errors import CorruptMessageError
from thinwire.rows.sparse import SparseRows
from thinwire.sums import known_ids

LIAR = 1


def test_values_of_a_wrong_length_behind_ids_name_the_rank_that_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = known_ids._Shares._encoded

    def shorter(shares: known_ids._Shares, lead: Tensor, values: Tensor, copies: int) -> Tensor:
        content = encoded(shares, lead, values, copies)
        return content[:-8] if shares.rank == LIAR else content

    monkeypatch.setattr(known_ids._Shares, "_encoded", shorter)
    rows = SparseRows(torch.arange(5), torch.ones(5, 16), 20)
    for rank, outcome in enumerate(run_ranks(4, lambda exchange: synchronized(exchange, rows, "column_split"))):
        if rank != LIAR:
            assert isinstance(outcome.error, CorruptMessageError)
            assert f"rank {rank}, table: from rank {LIAR}: " in str(outcome.error)
            assert str(outcome.error).count("from rank") == 1
