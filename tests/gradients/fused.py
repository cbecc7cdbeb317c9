"""Tables that are sent together."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from loopback import LoopbackExchange
from thinwire.comm.channel import Channel, Subject
from thinwire.rows.sparse import SparseRows

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def random_rows(num_rows: int, count: int, width: int, dtype: torch.dtype, seed: int) -> SparseRows:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randperm(num_rows, generator=source)[: min(count, num_rows)].sort().values
    return SparseRows(ids, torch.randn(len(ids), width, generator=source).to(dtype), num_rows)


sizes = st.tuples(
    st.integers(0, 100_000),
    st.sampled_from([1, 8, 16]),
    st.sampled_from(DTYPES[:2]),
    st.none() | st.integers(0, 100_000),
)


class LoopbackLane:
    """As much of a lane as a job needs."""

    def __init__(self, exchange: LoopbackExchange) -> None:
        self.exchange, self.world_size, self.rank = exchange, exchange.world_size, exchange.rank
        self.subjects: list[Subject] = []

    def channel(self, subject: Subject) -> Channel:
        self.subjects.append(subject)
        return Channel(self.exchange, subject, len(self.subjects))
