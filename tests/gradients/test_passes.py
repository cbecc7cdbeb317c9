"""Where the backward pass of a training script begins and ends, whatever passes run inside of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.gradients.passes import Backward, watch


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyError("on purpose")


@dataclass
class Output:
    name: str
    loss: Tensor


@dataclass(slots=True)
class Slots:
    loss: Tensor
    unset: Tensor = field(init=False)


OUTPUTS = {
    "tensor": lambda loss: loss,
    "tuple": lambda loss: (1, loss),
    "dict": lambda loss: {"parts": [loss], "step": 3},
    "dataclass": lambda loss: Output("found", loss),
    "dataclass with slots": Slots,
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_nested_passes_end_with_the_outermost(output: str) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    events: list[str] = []
    backward = Backward(lambda: events.append("ended"))
    for name, parameter in layers.named_parameters():

        def hook(parameter: Tensor, name: str = name) -> None:
            assert backward.enter()
            events.append(f"{name} {'nested' if backward.is_nested() else 'outer'}")

        parameter.register_post_accumulate_grad_hook(hook)
    found = layers[0](torch.ones(2, 4))
    for layer in layers[1:]:
        found = checkpoint(layer, found, use_reentrant=True)
    loss = found.sum()
    watch(OUTPUTS[output](loss), backward.enter)
    loss.backward()
    assert events[-1] == "ended"
    assert events.count("ended") == 1
    assert sorted(events[:-1]) == [
        *(f"0.{name} outer" for name in ("bias", "weight")),
        *(f"{layer}.{name} nested" for layer in (1, 2) for name in ("bias", "weight")),
    ]
    assert not backward.is_running


def test_what_returns_no_tensor_with_a_gradient_is_left_alone() -> None:
    backward = Backward(lambda: None)
    for output in (None, "text", torch.ones(2), {"a": 1}, Output):
        watch(output, backward.enter)


def test_outside_of_a_backward_there_is_nothing_to_enter() -> None:
    backward = Backward(lambda: None)
    assert not backward.enter()
    assert not backward.is_running
    assert not backward.is_nested()


def test_a_pass_that_an_exception_ends_is_over() -> None:
    weight = nn.Parameter(torch.ones(3))
    ended: list[int] = []
    backward = Backward(lambda: ended.append(1))
    broken = Fails.apply(weight * 2.0).sum()
    watch(broken, backward.enter)
    with pytest.raises(KeyError, match="on purpose"):
        broken.backward()
    assert not backward.is_running
    assert not ended
    whole = (weight * 2.0).sum()
    watch(whole, backward.enter)
    whole.backward()
    assert ended == [1]
