"""What a rank trains: optimizers beside compressors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.bench.jobs.own import JobError
from thinwire.lab.bench.train.methods import (
    method_of,
)
from thinwire.lab.bench.train.rank import set_up_optimizer


def test_dgc_without_momentum_takes_any_optimizer() -> None:
    """Under AdamW the momentum of DGC would be a second one; the job has none, so DGC has none."""
    layer = nn.Linear(64, 32)
    method = method_of("dgc", get_job("gpt"), 100, 2)
    adam = set_up_optimizer(torch.optim.AdamW(layer.parameters(), lr=0.1), method, layer, "dgc")
    assert [group["lr"] for group in adam.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("name", "scale", "momentum"), [("top_k", 1.0, 0.9), ("dgc", 1.0, 0.0), ("sign_sgd", 0.002, 0.0)]
)
def test_what_a_method_compresses_has_its_optimizer_settings_and_tables_keep_theirs(
    name: str, scale: float, momentum: float
) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(100, 32, sparse=True), "layer": nn.Linear(64, 32)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    set_up_optimizer(optimizer, method_of(name, get_job("lstm"), 100, 2), model, name)
    compressed, rest = optimizer.param_groups
    assert compressed["params"] == [model["layer"].weight]
    assert (compressed["lr"], compressed["momentum"]) == (pytest.approx(0.5 * scale), momentum)
    assert (len(rest["params"]), rest["lr"], rest["momentum"]) == (2, 0.5, 0.9)


def test_a_method_with_momentum_needs_an_optimizer_that_can_leave_it_out() -> None:
    layer = nn.Linear(64, 32)
    with pytest.raises(JobError, match=r"dgc needs torch\.optim\.SGD, and the job has Adam"):
        set_up_optimizer(torch.optim.Adam(layer.parameters()), method_of("dgc", get_job("lstm"), 100, 2), layer, "dgc")
