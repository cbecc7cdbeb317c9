"""A state goes through JSON and bytes, and comes back bit for bit."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoint.state.states import load_into
from tests.checkpoint.state.stored import bits, is_copied, items, same, states
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.decode import unflatten
from thinwire.checkpoint.state.encode import StateEncoder, flatten
from thinwire.checkpoint.state.layout import ALIGNMENT_BYTES, StateLayout, write
from thinwire.errors import CorruptMessageError


class Quantized(Tensor):
    """A tensor made of codes and scales, like torchao's quantized weights and states."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, note: Any) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, codes.shape, codes.stride(), dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor, note: Any) -> None:
        self.codes, self.scale, self.note = codes, scale, note

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, *_: Any) -> Quantized:
        return cls(inner["codes"], inner["scale"], context["note"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.codes * arg.scale if isinstance(arg, cls) else arg for arg in args), **kwargs or {})

    @classmethod
    def of(cls, seed: int, note: Any = "int8") -> Quantized:
        codes = torch.randint(-128, 127, (3, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
        return cls(codes, torch.tensor(0.5 * seed), note)


def stored(state: Any) -> tuple[StateLayout, memoryview]:
    layout, tensors = flatten(state)
    buffer = memoryview(bytearray(layout.payload_bytes))
    write(layout.slices, tensors, buffer)
    return StateLayout.from_bytes(layout.to_bytes()), buffer


@given(states)
def test_every_state_comes_back_bit_for_bit(state: Any) -> None:
    layout, buffer = stored(state)
    assert same(state, unflatten(layout, tensors_of(layout, buffer)))
    assert all(where.offset % ALIGNMENT_BYTES == 0 for where in layout.slices)


@example(np.zeros(1, np.int8)[::-1])  # contiguous for numpy, whatever the stride of a single element
@given(states)
def test_loading_into_an_equal_state_changes_nothing_and_allocates_no_tensor(state: Any) -> None:
    layout, buffer = stored(state)
    _, before = flatten(state)
    loaded = load_into(state, layout, tensors_of(layout, buffer))
    _, after = flatten(loaded)
    assert same(state, loaded)
    if not any(map(is_copied, items(state))):
        assert [tensor.data_ptr() for tensor in before] == [tensor.data_ptr() for tensor in after]


@given(states)
def test_a_loaded_state_does_not_depend_on_the_buffer(state: Any) -> None:
    layout, buffer = stored(state)
    loaded = load_into(None, layout, tensors_of(layout, buffer))
    buffer[:] = bytes(len(buffer))
    assert same(state, loaded)


def test_nan_and_infinity_keep_their_kind() -> None:
    layout, buffer = stored([math.nan, math.inf, -math.inf, -0.0])
    back = unflatten(layout, tensors_of(layout, buffer))
    assert math.isnan(back[0])
    assert same([math.inf, -math.inf, -0.0], back[1:])


def test_views_are_the_buffer_itself() -> None:
    layout, buffer = stored({"a": torch.arange(5.0), "b": torch.tensor(3)})
    tensors_of(layout, buffer)[0].fill_(7)
    assert tensors_of(layout, buffer)[0].tolist() == [7.0] * 5


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = torch.randn(8, 8)
    state = {"embedding": weight, "head": weight, "transposed": weight.t(), "row": weight[0]}
    layout, buffer = stored(state)
    assert layout.payload_bytes == 2 * 256 + 32
    back = unflatten(layout, tensors_of(layout, buffer))
    assert back["embedding"].data_ptr() == back["head"].data_ptr()
    assert same(state, back)


def test_a_module_and_its_optimizer_are_loaded_in_place() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    layout, buffer = stored(saved)
    expected = [tensor.clone() for tensor in flatten(saved)[1]]
    where = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = load_into({"model": dict(model.state_dict())}, layout, tensors_of(layout, buffer))
    assert [parameter.data_ptr() for parameter in model.parameters()] == where
    assert all(map(same, expected, flatten(loaded)[1]))
    assert same(loaded["model"], dict(model.state_dict()))


def test_another_shape_or_dtype_is_replaced_not_filled() -> None:
    layout, buffer = stored({"a": torch.ones(3), "b": torch.ones(3)})
    state = {"a": torch.zeros(4), "b": torch.zeros(3, dtype=torch.float64), "c": 5}
    loaded = load_into(state, layout, tensors_of(layout, buffer))
    assert same(loaded, {"a": torch.ones(3), "b": torch.ones(3)})
    assert state["a"].tolist() == [0.0] * 4


def test_a_tensor_made_of_tensors_is_loaded_in_place_or_made_anew() -> None:
    state = {"weight": Quantized.of(1), "nested": Quantized(Quantized.of(2), torch.ones(3), ("a", 5))}
    layout, buffer = stored(state)
    assert [where.path for where in layout.slices] == [
        "weight.codes", "weight.scale", "nested.codes.codes", "nested.codes.scale", "nested.scale"
    ]  # fmt: skip
    again = {"weight": Quantized.of(7)}
    codes = again["weight"].codes.data_ptr()
    loaded = load_into(again, layout, tensors_of(layout, buffer))
    assert loaded["weight"] is again["weight"]
    assert again["weight"].codes.data_ptr() == codes
    assert [bits(tensor) for tensor in flatten(loaded)[1]] == [bits(tensor) for tensor in flatten(state)[1]]
    assert (type(loaded["nested"].codes), loaded["nested"].note) == (Quantized, ("a", 5))
    other = load_into({"weight": Quantized.of(7, note="int4")}, layout, tensors_of(layout, buffer))
    assert other["weight"].note == "int8", "the note is not that of the training's tensor, so it is another tensor"


def test_a_tensor_that_cannot_be_made_anew_says_so() -> None:
    state = {"weight": Quantized.of(1, note=object())}
    layout, buffer = stored(state)
    assert load_into(state, layout, tensors_of(layout, buffer))["weight"] is state["weight"]
    with pytest.raises(ValueError, match="restored in place: make one optimizer step"):
        unflatten(layout, tensors_of(layout, buffer))
    text = layout.to_bytes().replace(b"Quantized", b"np.ndarray")
    with pytest.raises(ValueError, match=r"no class .*ndarray to make a tensor of"):
        unflatten(StateLayout.from_bytes(text), tensors_of(layout, buffer))


def test_a_set_that_changes_is_encoded_again() -> None:
    encoder, state = StateEncoder(), {"seen": {1}, "array": np.zeros(3), "frozen": np.broadcast_to(np.zeros(1), 3)}
    encoder.encode(state)
    state["seen"].add(2)
    encoded = encoder.encode(state)
    layout = StateLayout.from_bytes(encoded.to_bytes())
    assert unflatten(layout, encoded.tensors)["seen"] == {1, 2}


def test_subclasses_come_back_as_what_they_extend() -> None:
    layout, buffer = stored({"ordered": OrderedDict(a=1), "text": np.str_("a"), "float": np.float64(0.5)})
    assert same(
        unflatten(layout, tensors_of(layout, buffer)), {"ordered": {"a": 1}, "text": "a", "float": np.float64(0.5)}
    )


def test_an_array_is_loaded_in_place() -> None:
    layout, buffer = stored({"a": np.arange(5), "b": np.arange(5)})
    mine, fixed = np.zeros(5, np.int64), np.zeros(5, np.int64)
    fixed.flags.writeable = False
    loaded = load_into({"a": mine, "b": fixed}, layout, tensors_of(layout, buffer))
    assert mine.tolist() == loaded["b"].tolist() == [0, 1, 2, 3, 4]
    assert fixed.tolist() == [0] * 5


def test_a_tensor_that_cannot_be_written_to_is_replaced_not_filled() -> None:
    """Of elements that are one in memory, or made in inference mode."""
    with torch.inference_mode():
        inference = torch.zeros(3)
    state = {"expanded": torch.zeros(1, 3).expand(4, 3), "inference": inference, "one": torch.zeros(1).expand(1)}
    layout, buffer = stored({"expanded": torch.ones(4, 3), "inference": torch.ones(3), "one": torch.ones(1)})
    loaded = load_into(state, layout, tensors_of(layout, buffer))
    assert all(tensor.sum() == tensor.numel() for tensor in loaded.values())
    assert loaded["one"] is state["one"]
    assert state["expanded"].sum() == inference.sum() == 0


def test_what_is_nested_as_deeply_as_that_comes_back() -> None:
    deep: Any = torch.ones(1)
    for _ in range(100):
        deep = {"a": deep}
    layout, buffer = stored(deep)
    assert same(load_into(deep, layout, tensors_of(layout, buffer)), deep)


def test_a_conjugated_view_is_stored_as_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    state = {"plain": tensor, "conjugated": tensor.conj()}
    layout, buffer = stored(state)
    back = unflatten(layout, tensors_of(layout, buffer))
    assert back["conjugated"].tolist() == [1 - 2j, 3 + 4j]
    assert same(state, back)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    layout, tensors = flatten({"a": torch.ones(100)})
    with pytest.raises(ValueError, match="smaller"):
        write(layout.slices, tensors, memoryview(bytearray(399)))
    with pytest.raises(CorruptMessageError):
        tensors_of(layout, memoryview(bytearray(399)))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 64}, {"offset": -64}, {"offset": 1}, {"nbytes": 13}, {"nbytes": 1 << 60}, {"shape": [-3]},
        {"shape": [3.0]}, {"dtype": "object"}, {"dtype": None}, {"offset": True}, {"shape": [1 << 40]},
    ],
)  # fmt: skip
def test_a_layout_that_points_elsewhere_is_refused(change: dict[str, Any]) -> None:
    content = json.loads(flatten({"a": torch.ones(3)})[0].to_bytes())
    content["slices"][0].update(change)
    with pytest.raises(CorruptMessageError):
        StateLayout.from_bytes(json.dumps(content).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2]}, {"offset": [1]}, {"offset": [-1]}, {"offset": []}, {"shape": [3.0]}, {"placements": None},
        {"mesh": 5},
    ],
)  # fmt: skip
def test_a_part_that_is_not_within_the_whole_is_refused(change: dict[str, Any]) -> None:
    content = json.loads(flatten({"a": torch.ones(3)})[0].to_bytes())
    content["slices"][0]["part"] = {"shape": [3], "offset": [0], "placements": ["shard 0"], "mesh": None}
    assert StateLayout.from_bytes(json.dumps(content).encode()).slices[0].part is not None
    content["slices"][0]["part"].update(change)
    with pytest.raises(CorruptMessageError):
        StateLayout.from_bytes(json.dumps(content).encode())


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text(max_size=4), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_no_text_but_a_layout_is_one(text: bytes) -> None:
    with pytest.raises(CorruptMessageError):
        StateLayout.from_bytes(text)
