"""Gradients of micro-batches as exact sums."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel
from thinwire.errors import MismatchError
from thinwire.reproducible.gradients import Gradients


def test_sums_take_8_bytes_for_an_element_and_keep_their_memory() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8, sparse=True), nn.Linear(8, 4))
    gradients = Gradients(model, 2)
    (total,) = gradients._sums.values()
    assert total.values.nbytes == 8 * sum(entry.numel() for entry in model[1].parameters())
    before = total.values.data_ptr()
    gradients.clear()
    assert gradients._sums[torch.float32].values.data_ptr() == before


def test_rows_of_a_table_are_summed_without_rounding() -> None:
    table = nn.Embedding(50, 3, sparse=True)
    gradients, dense = Gradients(table, 4), torch.zeros(50, 3, dtype=torch.float64)
    for index in range(4):
        gradients.begin()
        ids = torch.randint(50, (9,), generator=torch.Generator().manual_seed(index))
        (table(ids) * 10.0**index / 7).square().sum().backward()
        dense += table.weight.grad.coalesce().to_dense().double()
        gradients.add()
    gradients.exchange(None, [gradients.status()], 0)
    gradients.deliver()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.is_coalesced()
    assert torch.equal(table.weight.grad.to_dense(), (dense / 4).float())


def test_a_parameter_without_gradient_keeps_none() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    gradients = Gradients(model, 1)
    gradients.begin()
    model["used"](torch.ones(1, 2)).sum().backward()
    gradients.add()
    gradients.exchange(None, [gradients.status()], 0)
    gradients.deliver()
    assert model["unused"].weight.grad is None
    assert torch.equal(model["used"].weight.grad, torch.ones(2, 2))


class Noted(nn.Linear):
    """It writes what it saw last to a buffer."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.register_buffer("seen", torch.zeros(1))
        self.is_noting = True

    def forward(self, batch: Tensor) -> Tensor:
        if self.is_noting:
            self.seen.copy_(batch[0])
        return super().forward(batch)


def test_a_micro_batch_that_is_made_again_after_an_error_counts_once() -> None:
    model = Noted()
    gradients = Gradients(model, 2)
    for number, value in enumerate((1.0, 2.0)):
        gradients.begin()
        model(torch.full((1, 1), value)).sum().backward()
        if number:
            with pytest.raises(ValueError, match="buffer seen is written by forward"):
                gradients.add()
            model.is_noting = False
            gradients.begin()
            model(torch.full((1, 1), value)).sum().backward()
        gradients.add()
    gradients.exchange(None, [gradients.status()], 0)
    gradients.deliver()
    assert model.weight.grad.tolist() == [[1.5]]


def test_kinds_of_gradients_have_to_agree() -> None:
    gradients = Gradients(nn.Linear(2, 1), 2)
    one = {"kinds": "dd", "written": {}, "codes": True}
    with pytest.raises(MismatchError, match="weight has sparse gradients on some ranks"):
        gradients.exchange(None, [one, {**one, "kinds": "sd"}], 0)
    with pytest.raises(ValueError, match="buffer x is written by forward, and ranks"):
        gradients.exchange(None, [{**one, "written": {"x": "1"}}, {**one, "written": {"x": "2"}}], 0)


@pytest.mark.parametrize(("codes", "most_bits"), [(True, 40), (False, 65)])
def test_sums_are_coded_where_all_ranks_read_codes(codes: bool, most_bits: int) -> None:
    """One without numba, or whose kernels are not compiled yet, gets them as they are."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(100, 100), torch.randn(2, 8, 100)
    means = []

    def run(exchange: LoopbackExchange) -> tuple[Tensor, float]:
        gradients = Gradients(copy.deepcopy(model), 2)
        gradients.begin()
        gradients._model(inputs[exchange.rank]).square().sum().backward()
        gradients.add()
        status = gradients.status()
        assert status["codes"]
        lane = SimpleNamespace(exchange=exchange, world_size=2, channel=lambda subject: Channel(exchange, subject, 0))
        gradients.exchange(lane, [status, {**status, "codes": codes}], 0)  # type: ignore[arg-type]
        return gradients._means["weight"], gradients.push.bits

    for outcome in run_ranks(2, run):
        mean, bits = outcome.get()
        means.append(mean)
        assert most_bits - 25 < bits < most_bits
    assert torch.equal(*means)


def test_ddp_is_refused() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(ValueError, match="pass its module"):
        Gradients(wrapped, 1)
