"""A state goes through JSON and bytes, and comes back bit for bit."""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from states import load_into
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.decode import unflatten
from thinwire.checkpoint.state.encode import StateEncoder, flatten
from thinwire.checkpoint.state.layout import ALIGNMENT_BYTES, StateLayout, write
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import CorruptMessageError

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.uint16,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


class Marked(Tensor):
    """A subclass that does not say what it is made of."""


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


def bits(tensor: Tensor) -> bytes:
    return (
        tensor.resolve_conj()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        alike = isinstance(right, Tensor) and left.dtype == right.dtype and left.shape == right.shape
        return alike and bits(left) == bits(right)
    if isinstance(left, (np.ndarray, np.generic)):
        alike = type(left) is type(right) and left.dtype == right.dtype and left.shape == right.shape
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, complex):
        return type(right) is complex and all(map(same, (left.real, left.imag), (right.real, right.imag)))
    if isinstance(left, float):
        return type(right) is float and struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return type(right) is dict and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def stored(state: Any) -> tuple[StateLayout, memoryview]:
    layout, tensors = flatten(state)
    buffer = memoryview(bytearray(layout.payload_bytes))
    write(layout.slices, tensors, buffer)
    return StateLayout.from_bytes(layout.to_bytes()), buffer


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def any_number(draw: st.DrawFn, kinds: str = "bBhHiIlLefdFD?M") -> np.generic:
    dtype = np.dtype("M8[us]" if (kind := draw(st.sampled_from(kinds))) == "M" else kind)
    raw = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    (number,) = np.frombuffer(bytes(byte & 1 for byte in raw) if kind == "?" else raw, dtype)
    return number


@st.composite
def any_array(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    number = draw(any_number("bhilBHILefdFD?"))
    array = np.full(shape, number)
    array.flags.writeable = draw(st.booleans())
    return array.T if draw(st.booleans()) else array[..., ::-1] if shape else array


keys = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), any_number("bhilBHIL?"),
    st.tuples(st.integers() | st.booleans() | st.floats(allow_nan=False), st.text()),
)  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8),
    any_tensor(), any_number(), any_array(), st.complex_numbers(allow_nan=False), st.sets(keys, max_size=3),
    st.frozensets(keys, max_size=3), st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(slice, st.none() | st.integers(), st.integers()), st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3)]), st.lists(st.integers(0, 9)).map(torch.Size),
)  # fmt: skip
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@given(states)
def test_every_state_comes_back_bit_for_bit(state: Any) -> None:
    layout, buffer = stored(state)
    assert same(state, unflatten(layout, tensors_of(layout, buffer)))
    assert all(where.offset % ALIGNMENT_BYTES == 0 for where in layout.slices)


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


def items(state: Any) -> list[Any]:
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [state, *(item for value in inner for item in items(value))]


def is_copied(value: Any) -> bool:
    if not isinstance(value, np.ndarray):
        return False
    return not (value.flags.c_contiguous and value.flags.writeable) or min(value.strides, default=0) < 0


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


@pytest.mark.parametrize("levels", [101, 400, 100_000])
def test_what_is_nested_too_deeply_is_refused_in_a_sentence(levels: int) -> None:
    deep: Any = 5
    for _ in range(levels):
        deep = {"a": deep} if levels < 1000 else [deep]
    with pytest.raises(ValueError, match="containers in one another more than 100 deep cannot be stored"):
        flatten(deep)


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


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 1}, {"tensor": -1}, {"tensor": "0"}, {"float": 1}, {"bytes": "!"}, {"what": 1}, {}, 1.5,
        {"dict": [1]},
        {"numpy": ["|O", "00"]}, {"numpy": ["<f8", "00"]}, {"numpy": ["<i4", ""]}, {"numpy": ["<i4", "00" * 8]},
        {"numpy": 5}, {"numpy": ["V8", "00" * 8]}, {"complex": ["0x0p0"]}, {"range": [1, 2, 0]}, {"range": ["a"]},
        {"slice": []}, {"size": ["a"]}, {"set": [[]]}, {"set": [{"tensor": 0}]}, {"dtype": "nn"}, {"dtype": 5},
        {"device": "moon"}, {"array": 5}, {"array": {"float": "0x0p0"}}, {"subclass": [[], []]}, {"subclass": [5, 5]},
        {"subclass": [["os", "system", [], [], None], 5]}, {"subclass": [[5, 5, [], [], None], [["a", 1]]]},
        {"subclass": [["os", "path", ["a"], [], None], []]},
    ],
)  # fmt: skip
def test_a_tree_that_is_none_is_refused(tree: Any) -> None:
    layout, tensors = flatten([torch.ones(3)])
    with pytest.raises(CorruptMessageError):
        unflatten(StateLayout(tree, layout.slices, layout.payload_bytes), tensors)
