"""What an encoder remembers, stores and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from tests.checkpoint.state.stored import is_copied, items, same, states
from thinwire.checkpoint.state.encode import StateEncoder, flatten


class Marked(Tensor):
    """A subclass that does not say what it is made of."""


@settings(max_examples=min(40, settings.default.max_examples))
@example({np.int8(0): None}, {(0, ""): None})  # keys whose comparison is an array
@given(states, states)
def test_an_encoder_remembers_nothing_that_is_not_so_any_more(first: Any, second: Any) -> None:
    """Whatever it encoded before, the result is that of a new one."""
    encoder = StateEncoder()
    for state in (first, second, second, first):
        again, anew = encoder.encode(state), StateEncoder().encode(state)
        assert again.to_bytes({"a": 1}) == anew.to_bytes({"a": 1})
        assert all(map(same, again.tensors, anew.tensors))
        if not any(map(is_copied, items(state))):
            assert [t.data_ptr() for t in again.tensors] == [t.data_ptr() for t in anew.tensors]


def test_only_numbers_are_encoded_anew_while_shapes_stay() -> None:
    encoder, weight = StateEncoder(), torch.randn(3)
    first = encoder.encode({"weight": weight, "tied": weight, "step": 1, "random": torch.zeros(2)})
    second = encoder.encode({"weight": weight, "tied": weight, "step": 2, "random": torch.ones(2)})
    assert first.slices is second.slices
    assert second.to_bytes() == StateEncoder().encode(
        {"weight": weight, "tied": weight, "step": 2, "random": torch.ones(2)}
    ).to_bytes()  # fmt: skip
    for changed in ({"tied": weight.clone()}, {"weight": weight[:2]}, {"weight": weight.double()}, {"step": weight}):
        state = {"weight": weight, "tied": weight, "step": 2, "random": torch.ones(2), **changed}
        assert encoder.encode(state).to_bytes() == StateEncoder().encode(state).to_bytes()


@pytest.mark.parametrize("levels", [101, 400, 100_000])
def test_what_is_nested_too_deeply_is_refused_in_a_sentence(levels: int) -> None:
    deep: Any = 5
    for _ in range(levels):
        deep = {"a": deep} if levels < 1000 else [deep]
    with pytest.raises(ValueError, match="containers in one another more than 100 deep cannot be stored"):
        flatten(deep)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": [1, {object}]}, "a.1: a type cannot be stored; make it of dict"),
        ({"data": {"sampler": {"position": object()}}}, r"data\.sampler\.position: a object"),
        ({"a": np.array([None])}, "a: a numpy array of object"),
        ({"a": np.arange(3.0, dtype=">f8")}, "a: a numpy array of >f8"),
        ({"a": torch.ones(3).as_subclass(Marked)}, "a: a Marked cannot be stored"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_stored_is_named(state: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flatten(state)
