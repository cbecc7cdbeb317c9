"""The jobs with embedding tables on two ranks: exact methods have the losses of stock DDP, and send fewer bytes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.sparse import check_sparse_tensor_invariants

import thinwire
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 4
JOBS = (
    "xlmr",
    "deepfm:max_rows=3000",
    "dlrm:max_rows=3000:sparse=True",
    "nmt",
    "word2vec",
    "lstm:sampled=32:num_words=8000",
)


def losses_of(context: RankContext, name: str, data: Data, scheme: str) -> tuple[list[float], float]:
    """The losses of each step on this rank, and the share of dense bytes that it sent; stock DDP without a scheme."""
    training = get_job(name).training(data, context.rank, context.world_size, seed=0)
    model = DistributedDataParallel(training.model)
    sync = thinwire.attach(model, scheme) if scheme else None
    assert training.optimizer is not None
    losses = []
    for _ in range(STEPS):
        training.optimizer.zero_grad()
        loss = training.loss(model, training.batch())
        loss.backward()
        training.optimizer.step()
        losses.append(loss.item())
    if sync is None:
        return losses, 1.0
    dense = ring_all_reduce_bytes(sum(entry.nbytes for entry in model.parameters()), context.world_size)
    sent = sync.stats()["comm/bytes_sent"] / STEPS / dense
    sync.detach()
    return losses, sent


def compared(context: RankContext, data: dict[str, Data]) -> list[tuple[str, list[float], list[float], float]]:
    torch.set_num_threads(1)
    check_sparse_tensor_invariants.disable()  # Adagrad makes sparse tensors and warns that nothing checks them
    found = []
    for name in JOBS:
        stock, _ = losses_of(context, name, data[name], "")
        ours, share = losses_of(context, name, data[name], "zen")
        found.append((name, stock, ours, share))
    return found


@pytest.mark.usefixtures("small_corpus")
def test_exact_methods_have_the_losses_of_stock_ddp() -> None:
    data = {name: get_job(name).load() for name in JOBS}
    ranks = run_ranks(compared, data, world_size=2)
    for name, stock, ours, share in [entry for rank in ranks for entry in rank.value]:
        assert ours == pytest.approx(stock, rel=2e-5), name
        assert share < 0.85, name
    assert ranks[0].value[0][1] != ranks[1].value[0][1], "each rank has batches of its own"
