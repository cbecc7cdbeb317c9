"""Bytes and seconds of stock DDP."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.lab.demo import stock
from thinwire.lab.testbed.launch import RankContext, run_ranks


def stock_bytes(context: RankContext) -> tuple[float, float]:
    """One backward of a sparse table of 10 rows x 3, this rank looking up rank + 1 rows, one of them twice."""
    model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
    model._set_ddp_runtime_logging_sample_rate(1)
    ids = torch.tensor([*range(context.rank + 1), 0])
    model(ids).sum().backward()
    dist.barrier()
    return stock.sent_bytes(model, [ids], context.world_size), stock.comm_seconds(model)


@pytest.mark.ranks
def test_stock_bytes_count_distinct_rows_and_seconds_are_those_of_ddp() -> None:
    for rank, outcome in enumerate(run_ranks(stock_bytes, world_size=2, timeout_seconds=60)):
        sent, seconds = outcome.value
        assert sent == 72 + (rank + 1) * (8 + 12)
        assert 0 < seconds < 60


def test_formulas_of_gloo() -> None:
    assert ring_all_reduce_bytes(1000, 4) == 1500
    assert ring_all_reduce_bytes(1000, 1) == 0
    assert sparse_all_reduce_bytes([10] * 4, rank=0, row_bytes=512) == 3 * (72 + 10 * 520)
