"""What all compressors share: what a payload weighs, how ranks' payloads become a mean, and how seeds are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.compress import packing, top_k
from thinwire.compress.base import (
    Additive,
    Compressor,
    Exchanged,
    Identity,
    Parameter,
    Payload,
    State,
    check_parameter,
    counters,
    next_seed,
    stable_seed,
)
from thinwire.schemes import ZEN

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@dataclass(frozen=True)
class Signs(Additive):
    """Counts of a gradient rounded to whole numbers; what it adds is the parts as they are."""

    name = "signs"

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return Payload((gradient.flatten().sign(),))

    def part_specs(self, parameter: Parameter) -> tuple[packing.PartSpec, ...]:
        return (packing.PartSpec(parameter.working_dtype, None),)

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        total.add_(payload.parts[0].view(parameter.shape), alpha=-1 if negated else 1)


@given(shapes, st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_the_identity_comes_back_in_the_bytes_that_were_said(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    parameter, identity = Parameter("a", shape, dtype), Identity()
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=parameter.working_dtype)
    payload = identity.compress(gradient, parameter, {})
    data = identity.pack(payload, parameter)
    assert data.dtype == torch.uint8
    assert data.numel() == identity.packed_bytes(parameter)
    assert payload.num_bytes == gradient.nbytes == parameter.numel * parameter.working_dtype.itemsize
    arrived = identity.decompress(identity.unpack(data, parameter), parameter)
    assert arrived.dtype == parameter.working_dtype
    assert torch.equal(arrived, gradient)


def test_gradients_are_kept_in_float32_but_those_of_float64() -> None:
    assert [Parameter("a", (1,), dtype).working_dtype for dtype in DTYPES] == [
        torch.float32, torch.float64, torch.float32, torch.float32,
    ]  # fmt: skip


def test_a_mean_is_of_payloads_added_in_rank_order() -> None:
    """1e8 + 1 - 1e8 is 0 in float32, and 1e8 - 1e8 + 1 is 1."""
    parameter, identity = Parameter("a", (1,)), Identity()
    big, one, less = (Payload((torch.tensor([number]),)) for number in (1e8, 1.0, -1e8))
    assert identity.combine([big, one, less], parameter).item() == 0.0
    assert identity.combine([big, less, one], parameter).item() == pytest.approx(1 / 3)


def test_what_is_added_and_subtracted_is_what_is_decompressed() -> None:
    gradient, parameter = torch.tensor([[3.0, -2.0], [0.0, 7.0]]), Parameter("a", (2, 2))
    for code in (Signs(), Identity()):
        payload = code.compress(gradient, parameter, {})
        total = gradient.clone()
        code.add(payload, parameter, total)
        assert torch.equal(total, gradient + code.decompress(payload, parameter))
        code.add(payload, parameter, total, negated=True)
        assert torch.equal(total, gradient)
    assert torch.equal(Signs().decompress(Signs().compress(gradient, parameter, {}), parameter), gradient.sign())
    assert Signs().packed_bytes(parameter) is None, "its length depends on the gradient"


def test_a_payload_with_a_code_weighs_what_the_code_sends() -> None:
    parts = (torch.zeros(3, 5), torch.zeros(7, dtype=torch.float64))
    assert Payload(parts).num_bytes == 15 * 4 + 7 * 8
    plans = [Parameter("part", (3, 5)), Parameter("part", (7,), torch.float64)]
    coded = sum(Identity().packed_bytes(plan) or 0 for plan in plans)
    assert Payload(parts, code=Identity()).num_bytes == coded


def test_a_compressor_shows_its_name_and_takes_exchanges_by_name() -> None:
    assert repr(Signs()) == "signs"
    assert repr(top_k(0.01)) == top_k(0.01).name
    assert top_k(0.01).by("two_shot") == Exchanged(top_k(0.01), "two_shot")
    assert top_k(0.01).by(ZEN).exchange == "zen"
    with pytest.raises(ValueError, match=r"unknown exchange 'nobody'.*all_reduce.*two_shot.*zen.*two_level:NAME"):
        top_k(0.01).by("nobody")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_float_is_refused(dtype: torch.dtype) -> None:
    compressor: Compressor = Identity()
    for fine in DTYPES:
        check_parameter(compressor, Parameter("table.weight", (2,), fine))
    with pytest.raises(ValueError, match=f"identity: parameter 'table.weight' is {dtype}: only floating-point"):
        check_parameter(compressor, Parameter("table.weight", (2,), dtype))


def test_seeds_depend_on_each_of_their_parts_and_on_nothing_else() -> None:
    """The same ones on every machine: ranks of one job may have other versions of Python."""
    assert stable_seed(0, "fc.weight", 3, 1) == stable_seed(0, "fc.weight", 3, 1)
    parts = [
        (0, "fc.weight", 3, 1),
        (1, "fc.weight", 3, 1),
        (0, "fc.bias", 3, 1),
        (0, "fc.weight", 1, 3),
        (0, "fc.weight", 31),
    ]
    seeds = {stable_seed(*each) for each in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stable_seed(7, "fc.weight", 2, 1) == 6485289172658395043


def test_a_seed_is_drawn_once() -> None:
    state, parameter = counters(), Parameter("a", (1,))
    drawn = [next_seed(5, parameter, state) for _ in range(3)]
    assert state == {"step": 3, "salt": 0}
    assert drawn == [stable_seed(5, "a", step, 0) for step in range(3)]
    assert next_seed(5, parameter, {"step": 0, "salt": 1}) not in drawn
