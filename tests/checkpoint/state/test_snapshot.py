"""States of modules that cannot be loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.checkpoint.state.encode import flatten
from thinwire.checkpoint.state.snapshot import TrainingState


class Holds(torch.nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", buffer)


def test_a_module_that_load_state_dict_cannot_write_to_is_refused() -> None:
    with torch.inference_mode():
        inference = torch.zeros(3)
    for buffer in (torch.zeros(1).expand(3), inference):
        assert TrainingState(torch.nn.Linear(1, 1), data=Holds(buffer.clone())).describe()
        for name, state in (
            ("model", TrainingState(Holds(buffer))),
            ("data", TrainingState(torch.nn.Linear(1, 1), data=Holds(buffer))),
        ):
            with pytest.raises(ValueError, match=rf"{name}\.mask: load_state_dict cannot write to it"):
                state.describe()


def test_another_model_is_told_by_the_first_name_that_differs() -> None:
    def model(*sizes: int, bias: bool = True) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(n, n, bias=bias and n < 9) for n in sizes))

    here = TrainingState(model(2, 3))
    for other, says in (
        (model(2), "it has 2 tensors of the model, and this model 4; model.1.weight is new, float32 (3, 3)"),
        (model(2, 3, 4), "it has 6 tensors of the model, and this model 4; model.2.weight is gone, float32 (4, 4)"),
        (model(2, 5), "and this model 4; model.1.weight was float32 (5, 5) and is float32 (3, 3)"),
        (model(2, 3).double(), "model.0.weight was float64 (2, 2) and is float32 (2, 2)"),
    ):
        assert says in here.difference(flatten(TrainingState(other).capture(0))[0])
    scheduled = flatten(TrainingState(model(2, 3), data=torch.nn.Linear(1, 1)).capture(0))[0]
    assert here.difference(scheduled) == (
        "it has the parts model, data, step, random, and this training model, step, random"
    )
