"""What is inside of wrappers, however many there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import compress
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.memory import ErrorFeedback
from thinwire.compress.warm_up import DenseFirst, WarmUp
from thinwire.compress.wrappers import Wrapper, code_of, core_of, packed_code, summable_code, unwrapped

WRAPPERS = {"memory": ErrorFeedback, "warm-up": lambda inner: WarmUp(inner, 9)}


def wrapped(method: Compressor, names: list[str]) -> Compressor:
    for name in names:
        method = WRAPPERS[name](method)
    return method


@given(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3, unique=True))
def test_the_method_and_its_state_are_found_through_all_wrappers(names: list[str]) -> None:
    method = compress.top_k(0.1)
    compressor = wrapped(core_of(method), names)
    assert core_of(compressor) is core_of(method)
    assert isinstance(compressor, Wrapper) == bool(names)
    state = compressor.init(Parameter("weight", (8, 8)))
    inside, of_inside = unwrapped(compressor, state)
    assert inside is core_of(method)
    for _ in names:
        state = state["inner"]
    assert of_inside is state


def test_the_code_decides_how_payloads_travel() -> None:
    method = core_of(compress.top_k(0.1))
    assert code_of(ErrorFeedback(method)) is method
    assert packed_code(ErrorFeedback(method)) is method
    assert type(code_of(WarmUp(method, 9))) is type(method), "of another density"
    assert isinstance(code_of(WarmUp(core_of(compress.int8()), 9)), DenseFirst), (
        "what has no density is sent whole at first"
    )
    with pytest.raises(AssertionError, match="cannot be added up"):
        summable_code(method)
    summed = core_of(compress.power_sgd())
    assert summable_code(summed) is summed
    with pytest.raises(AssertionError, match="do not travel as bytes"):
        packed_code(summed)
