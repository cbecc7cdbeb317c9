"""Anchors alone: what is sent, what lands, and what a state brings back. No ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire.outer import OuterRecipe, diloco, local_sgd
from thinwire.outer.anchors import Anchors, cut

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


@given(sizes=SIZES, data=st.data())
def test_fragments_are_a_partition_in_order_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    named = {f"p{number}": size for number, size in enumerate(sizes)}
    fragments = cut(named, count)
    assert len(fragments) == count
    assert all(fragments)
    assert [name for fragment in fragments for name in fragment] == list(named)


@given(size=st.integers(1, 50), count=st.integers(1, 9), each=st.integers(1, 5))
def test_fragments_of_equal_parameters_are_of_equal_size(size: int, count: int, each: int) -> None:
    fragments = cut({f"p{number}": size for number in range(count * each)}, count)
    assert {len(fragment) for fragment in fragments} == {each}


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 fragments of 2 parameters: pass fragments=2"):
        cut({"a": 1, "b": 1}, 3)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"matrix": (4, 3), "bias": (5,), "empty": (0, 2), "image": (2, 3, 4, 5)}
    found = {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}
    found["image"] = nn.Parameter(found["image"].detach().to(memory_format=torch.channels_last))
    return found


def moved(named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        change = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.data.add_(change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_a_difference_is_contiguous_wide_enough_and_zero_where_nothing_moved(dtype: torch.dtype) -> None:
    named = parameters(dtype)
    anchors = Anchors(named, local_sgd())
    wide = dtype if dtype in (torch.float64, torch.complex64) else torch.float32
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    assert all(not difference.any() for difference in anchors.difference(0).values())
    moved(named, 1)
    for name, difference in anchors.difference(0).items():
        assert difference.is_contiguous()
        assert difference.dtype == wide
        assert torch.equal(difference, before[name].to(wide) - named[name].detach().to(wide))


def test_the_anchor_of_16_bits_keeps_what_they_cannot_show() -> None:
    """1,000 rounds of a thousandth of a unit in the last place move the parameter by one unit."""
    named = {"p": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    anchors = Anchors(named, local_sgd())
    unit = 2.0**-7
    for _ in range(1000):
        assert not anchors.difference(0)["p"].any()
        anchors.step(0, {"p": torch.full((3,), -unit / 1000)})
        anchors.mix(anchors.trained(0), 1.0)
    assert torch.equal(named["p"].detach(), torch.full((3,), 1.0 + unit, dtype=torch.bfloat16))


@pytest.mark.parametrize("recipe", [local_sgd(), diloco(lr=1.0, momentum=0.0, nesterov=False)])
def test_without_momentum_the_mean_becomes_the_anchor(recipe: OuterRecipe) -> None:
    """With the difference of one rank for the mean it comes back, to the rounding of ``a - (a - p)``."""
    named = parameters(torch.float64)
    anchors = Anchors(named, recipe)
    moved(named, 1)
    there = {name: parameter.detach().clone() for name, parameter in named.items()}
    anchors.step(0, anchors.difference(0))
    anchors.mix(anchors.trained(0), 1.0)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), there[name], rtol=1e-14, atol=1e-14)


def test_a_plain_step_and_the_outer_optimizer_without_momentum_have_the_same_bits() -> None:
    found = []
    for is_plain in (False, True):
        named = parameters()
        anchors = Anchors(named, diloco(lr=1.0, momentum=0.0, nesterov=False))
        moved(named, 1)
        anchors.step(0, anchors.difference(0), is_plain)
        found.append(anchors.state_dict()["anchors"])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_outer_step_is_that_of_torch() -> None:
    named, reference = parameters(), parameters()
    anchors = Anchors(named, diloco(every=4, fragments=2))
    outer = torch.optim.SGD(list(reference.values()), lr=0.7, momentum=0.9, nesterov=True)
    for seed in range(5):
        moved(named, seed)
        for fragment in (0, 1):
            means = anchors.difference(fragment)
            for name, mean in means.items():
                reference[name].grad = mean.clone()
            anchors.step(fragment, means)
            anchors.mix(anchors.trained(fragment), 1.0)
        outer.step()
    assert all(torch.equal(named[name], reference[name]) for name in named)


def test_mixing() -> None:
    named = {"p": nn.Parameter(torch.tensor([1.0, float("nan")]))}
    anchors = Anchors({"p": nn.Parameter(torch.tensor([3.0, 3.0]))}, local_sgd())
    anchors._parameters = named
    anchors.mix(anchors.trained(0), 0.25)
    assert named["p"][0] == 1.5
    assert named["p"][1].isnan(), "which a weight of 1 would have mended"
    anchors.mix(anchors.trained(0), 1.0)
    assert named["p"].tolist() == [3.0, 3.0]


def test_a_frozen_parameter_is_its_own_anchor_until_it_is_trained() -> None:
    named = parameters()
    named["matrix"].requires_grad_(False)
    anchors = Anchors(named, diloco())
    assert anchors.anchors["matrix"].data_ptr() == named["matrix"].data_ptr()
    assert "matrix" not in anchors.difference(0)
    assert "matrix" not in anchors.state_dict()["anchors"]
    named["matrix"].requires_grad_(True)
    anchors.adopt()
    moved(named, 1)
    means = anchors.difference(0)
    assert means["matrix"].any()
    anchors.step(0, means)
    anchors.mix(anchors.trained(0), 1.0)
    assert torch.equal(anchors.anchors["matrix"], named["matrix"])
    assert anchors.anchors["matrix"].data_ptr() != named["matrix"].data_ptr()
    named["matrix"].requires_grad_(False)
    assert "matrix" in anchors.difference(0), "ranks that froze it and ranks that did not send the same names"


def test_anchors_are_there_for_evaluation_and_go_also_after_an_error() -> None:
    named, buffers = parameters(), {"mean": torch.zeros(3)}
    anchors = Anchors(named, local_sgd(), lambda: buffers)
    buffers["new"] = torch.ones(2)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    moved(named, 1)
    buffers["mean"] += 5
    local = {name: parameter.detach().clone() for name, parameter in named.items()}

    def evaluate() -> None:
        with anchors.swapped():
            assert all(torch.equal(named[name], before[name]) for name in named)
            assert not buffers["mean"].any()
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert all(torch.equal(named[name], local[name]) for name in named)
    assert buffers["mean"].tolist() == [5.0] * 3


def test_buffers_land_as_parameters_do() -> None:
    buffers: dict[str, Tensor] = {"mean": torch.tensor([1.0, 2.0]), "half": torch.ones(2, dtype=torch.float16)}
    buffers["mask"] = torch.tensor([0.0, float("-inf")])
    anchors = Anchors({"p": nn.Parameter(torch.ones(1))}, local_sgd(), lambda: buffers)
    now = buffers = {"mean": torch.tensor([3.0, 2.0]), "half": torch.ones(3, dtype=torch.float16)}
    differences = anchors.buffer_difference()
    assert "mask" not in differences
    assert differences["mean"] is not None
    assert differences["mean"].tolist() == [-2.0, 0.0]
    assert differences["half"] is None, "it has another shape now"
    anchors.land_buffers({"mean": torch.tensor([-1.0, 0.0])}, 1.0)
    assert now["mean"].tolist() == [2.0, 2.0]
    buffers = {}
    assert anchors.buffer_difference()["mean"] is None, "it is gone"


@pytest.mark.parametrize("recipe", [local_sgd(), diloco(every=8, fragments=3)])
def test_a_state_brings_back_bitwise_what_was(recipe: OuterRecipe) -> None:
    def round_of(anchors: Anchors, named: dict[str, nn.Parameter], seed: int) -> None:
        moved(named, seed)
        for fragment in range(recipe.fragments):
            anchors.step(fragment, anchors.difference(fragment))
            anchors.mix(anchors.trained(fragment), 0.5)

    named = parameters()
    anchors = Anchors(named, recipe, lambda: {"mean": torch.ones(2)})
    round_of(anchors, named, 0)
    state = copy.deepcopy(anchors.state_dict())
    again = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    other = Anchors(again, recipe, lambda: {"mean": torch.zeros(2)})
    other.check_state(state)
    other.load_state_dict(state)
    for seed in (1, 2):
        round_of(anchors, named, seed)
        round_of(other, again, seed)
    assert all(torch.equal(named[name], again[name]) for name in named)
    found, expected = other.state_dict(), anchors.state_dict()
    for kind in ("anchors", "momenta", "buffers"):
        assert found[kind].keys() == expected[kind].keys()
        assert all(torch.equal(found[kind][name], expected[kind][name]) for name in expected[kind])
    assert bool(expected["momenta"]) == (recipe.momentum > 0)


def test_a_state_of_another_model_is_refused() -> None:
    anchors = Anchors(parameters(), local_sgd())
    other = Anchors({"matrix": nn.Parameter(torch.ones(2, 2))}, local_sgd())
    with pytest.raises(ValueError, match="anchors of 'matrix'"):
        anchors.check_state(other.state_dict())
