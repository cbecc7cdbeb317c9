"""Deltas: a state plus its delta is the new state, to the bit; anything else changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire import CorruptMessageError, MismatchError, deltas

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def state_of(seed: int, dtypes: list[torch.dtype], shapes: list[tuple[int, ...]]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    pairs = zip(dtypes, shapes, strict=True)
    return {f"layer.{k}": torch.randn(shape, generator=draw).to(dtype) for k, (dtype, shape) in enumerate(pairs)}


def changed(state: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    new = {}
    for name, value in state.items():
        other = torch.randn(value.shape, generator=draw).to(value.dtype)
        chosen = torch.rand(value.shape, generator=draw) < share
        wide = torch.complex128 if value.is_complex() else torch.float64  # torch.where takes no float8
        new[name] = torch.where(chosen, other.to(wide), value.to(wide)).to(value.dtype)
    return new


def bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in state.items()}


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=4)


@given(tensors=tensors, share=st.sampled_from([0.0, 0.01, 0.5, 1.0]), seed=st.integers(0, 99))
def test_round_trips(tensors: list[tuple[torch.dtype, tuple[int, ...]]], share: float, seed: int) -> None:
    old = state_of(seed, *map(list, zip(*tensors, strict=True))) if tensors else {}
    new = changed(old, share, seed)
    before = bits(old)
    delta = deltas.encode(old, new)
    assert bits(old) == before
    deltas.apply(old, delta)
    assert bits(old) == bits(new)


def test_bits_that_equal_compares_as_other_values_arrive() -> None:
    """Zeros of both signs, and numbers that are none."""
    old = {"x": torch.tensor([0.0, 1.0, float("nan"), -0.0])}
    new = {"x": torch.tensor([-0.0, float("nan"), float("inf"), 0.0])}
    deltas.apply(old, deltas.encode(old, new))
    assert bits(old) == bits(new)


def test_several_are_folded_into_one_that_is_no_longer_than_they_are() -> None:
    states = [state_of(0, [torch.float32, torch.bfloat16], [(50, 20), (300,)])]
    for step in range(3):
        states.append(changed(states[-1], 0.05, step))
    each = [deltas.encode(before, after) for before, after in itertools.pairwise(states)]
    before = bits(states[0])
    folded = deltas.fold(states[0], each)
    assert bits(states[0]) == before
    assert len(folded) <= sum(map(len, each))
    deltas.apply(states[0], folded)
    assert bits(states[0]) == bits(states[-1])
    with pytest.raises(MismatchError, match=r"'layer\.0' has other bits"):
        deltas.fold(states[-1], each)


def test_one_step_of_fine_tuning_in_bfloat16_is_a_small_part_of_the_state() -> None:
    model = nn.Linear(256, 256).bfloat16()
    old = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.parameters():
            value += 1e-5 * torch.randn_like(value)
    delta = deltas.encode(old, model.state_dict())
    assert len(delta) < 0.2 * sum(value.nbytes for value in old.values())


def test_tied_weights_and_views_change_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    state = {**model.state_dict(), "transposed": torch.zeros(3, 5).t()}
    new = {name: value + 1 for name, value in state.items()}
    deltas.apply(state, deltas.encode(state, new))
    assert bits(state) == bits(new)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, new["0.weight"])


@pytest.mark.parametrize("other", [1.0, 2.0])
def test_tied_weights_that_a_delta_changes_apart_change_nothing(other: float) -> None:
    """A model whose weights are tied cannot be one that has untied them, whether one of the two has changed or both."""
    state = dict.fromkeys(("head", "table"), torch.ones(5))
    delta = deltas.encode(state, {"head": torch.full((5,), 3.0), "table": torch.full((5,), other)})
    with pytest.raises(ValueError, match="'table' shares memory with a tensor of other bits behind the delta"):
        deltas.apply(state, delta)
    assert bits(state) == bits({"head": torch.ones(5), "table": torch.ones(5)})


@pytest.mark.parametrize("seed", range(40))
def test_a_delta_that_was_altered_or_cut_changes_nothing(seed: int) -> None:
    old = state_of(0, [torch.float32, torch.int64], [(20, 5), (30,)])
    delta = bytearray(deltas.encode(old, changed(old, 0.3, 1)))
    draw = torch.Generator().manual_seed(seed)
    at = int(torch.randint(len(delta), (), generator=draw))
    broken = bytes(delta[:at]) if seed % 2 else bytes(delta[:at]) + bytes([delta[at] ^ 1]) + bytes(delta[at + 1 :])
    before = bits(old)
    with pytest.raises(CorruptMessageError):
        deltas.apply(old, broken)
    assert bits(old) == before


@pytest.mark.parametrize("row", [
    ["w", "float32", [4], 2, "", "", [1, 1]],  # positions of no valid code
    ["w", "float32", [4], 4, "", "", [1, 1, 1]],  # three bytes of four
    ["w", "float32", [4], 4, "", "", [1, 1, 1, 1]],  # which are not deflated
    ["w", "float32", [4], 1 << 60, "", "", [9]],
    ["w", "float32", [4], 2, "", "", []],  # neither positions nor bits
    ["w", "float32", [4], 2, "", "", [0]],
    ["w", "float32", [4], -1, "", "", []],
    [["w"], "float32", [4], 0, "", "", []],
    ["w", "float32"],
    7,
])  # fmt: skip
def test_a_header_that_lies_under_a_valid_digest_is_refused(row: object) -> None:
    """An attacker can make digests too; nothing is allocated or written on such a word."""
    state = {"w": torch.zeros(4)}
    if isinstance(row, list) and len(row) == 7:
        row[4] = deltas._digest(deltas._words(state["w"]))
    size = sum(row[-1]) if isinstance(row, list) and isinstance(row[-1], list) else 20
    with pytest.raises(CorruptMessageError):
        deltas.apply(state, deltas._sealed([row], [b"x" * size]))
    assert torch.equal(state["w"], torch.zeros(4))


def test_another_state_is_refused_by_the_first_name_that_differs() -> None:
    old = {"a": torch.zeros(3), "b": torch.zeros(2)}
    delta = deltas.encode(old, {"a": torch.ones(3), "b": torch.ones(2)})
    cases = {
        "'c' is in one": {**old, "c": torch.zeros(1)},
        "'b' is in one": {"a": torch.zeros(3)},
        r"'b' is float32 \[3\], and float32 \[2\]": {"a": torch.zeros(3), "b": torch.zeros(3)},
        "'b' is float64": {"a": torch.zeros(3), "b": torch.zeros(2).double()},
        "'b' has other bits": {"a": torch.zeros(3), "b": torch.full((2,), 1e-45)},
    }
    for said, state in cases.items():
        before = bits(state)
        with pytest.raises(MismatchError, match=said):
            deltas.apply(state, delta)
        assert bits(state) == before
    with pytest.raises(TypeError, match="'a' is no dense tensor, but int"):
        deltas.encode({"a": 1}, {"a": 2})  # pyrefly: ignore
    with pytest.raises(TypeError, match="send it by itself"):
        deltas.encode({"a": torch.eye(2).to_sparse()}, {"a": torch.eye(2).to_sparse()})


def test_a_tensor_that_cannot_be_written_changes_none() -> None:
    old = {"w": torch.zeros(4), "shown": torch.zeros(1, 2).expand(3, 2)}
    delta = deltas.encode(old, {"w": torch.ones(4), "shown": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=r"'shown' has elements that share memory.*contiguous"):
        deltas.apply(old, delta)
    assert torch.equal(old["w"], torch.zeros(4))


def test_tensors_of_inference_mode_change_too() -> None:
    with torch.inference_mode():
        state = {"w": torch.zeros(4)}
    deltas.apply(state, deltas.encode({"w": torch.zeros(4)}, {"w": torch.ones(4)}))
    assert torch.equal(state["w"], torch.ones(4))


@pytest.mark.parametrize("mode", [False, True])
def test_parameters_change_as_they_are(mode: bool) -> None:
    """As ``dict(model.named_parameters())`` has them, together with others."""
    served = nn.Linear(2, 2)
    new = {name: torch.ones_like(value) for name, value in served.named_parameters()}
    with torch.inference_mode(mode):
        new["steps"], steps = torch.tensor(7), torch.tensor(3)
        delta = deltas.encode({**dict(served.named_parameters()), "steps": steps}, new)
    deltas.apply({**dict(served.named_parameters()), "steps": steps}, delta)
    assert bits({name: value.detach() for name, value in served.named_parameters()} | {"steps": steps}) == bits(new)
