"""What all ranks must know arrives as it was said, in rank order, and what was altered is refused by its rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loopback import LoopbackExchange, run_ranks, run_threads
from thinwire.comm.agree import broadcast_json, gather_bytes, gather_json, gather_numbers, longest
from thinwire.errors import CorruptHeaderError, CorruptMessageError


@settings(max_examples=20)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_bytes_of_any_length_arrive_in_rank_order(said: list[bytes]) -> None:
    outcomes = run_ranks(len(said), lambda exchange: gather_bytes(exchange, "words", said[exchange.rank]))
    assert [outcome.get() for outcome in outcomes] == [said] * len(said)


@settings(max_examples=20)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4))
def test_numbers_arrive_bit_for_bit_and_the_slowest_is_known_to_all(seconds: list[float]) -> None:
    def run(exchange: LoopbackExchange) -> tuple[list[list[float]], float]:
        mine = seconds[exchange.rank]
        return gather_numbers(exchange, "seconds", [mine, -mine]), longest(exchange, mine)

    for outcome in run_ranks(len(seconds), run):
        assert outcome.get() == ([[each, -each] for each in seconds], max(seconds))


def test_values_of_json_arrive_and_rank_0_is_heard_by_all() -> None:
    def run(exchange: LoopbackExchange) -> tuple[list[object], object]:
        mine = {"rank": exchange.rank, "name": "\u00fc" * exchange.rank}
        return gather_json(exchange, "settings", mine), broadcast_json(exchange, "choice", mine)

    said = [{"rank": rank, "name": "\u00fc" * rank} for rank in range(3)]
    assert [outcome.get() for outcome in run_ranks(3, run)] == [(said, said[0])] * 3


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_by_the_name_of_its_rank(number: float) -> None:
    errors = run_threads(2, lambda exchange: gather_numbers(exchange, "rates", [number if exchange.rank else 1.0]))
    assert all(isinstance(error, CorruptMessageError) and "rates: from rank 1" in str(error) for error in errors)


def test_a_length_above_the_most_is_refused_before_anything_is_received() -> None:
    said = [b"", b"x" * 101]
    errors = run_threads(2, lambda exchange: gather_bytes(exchange, "words", said[exchange.rank], max_bytes=100))
    assert all(isinstance(error, CorruptHeaderError) for error in errors)
    assert all("from rank 1: 101 bytes are announced, more than 100" in str(error) for error in errors)


@pytest.mark.parametrize("swap", [0, 1])
@pytest.mark.parametrize("place", [0, -1])
def test_a_bit_that_changed_is_refused_by_the_name_of_its_rank(swap: int, place: int) -> None:
    def tamper(source: int, target: int, number: int, part: Tensor) -> Tensor:
        part = part.clone()
        if (source, target, number) == (1, 0, swap):
            part[place] ^= 4
        return part

    error, got = run_threads(2, lambda exchange: gather_bytes(exchange, "words", b"said"), tamper=tamper)
    assert isinstance(error, CorruptHeaderError)
    assert "from rank 1: it made a different call, the message was corrupted" in str(error)
    if swap:
        assert got == [b"said"] * 2, "who received it whole has it"


def test_ranks_in_different_calls_both_learn_it() -> None:
    errors = run_threads(2, lambda exchange: gather_numbers(exchange, f"call {exchange.rank}", [1.0]))
    assert all(isinstance(error, CorruptHeaderError) and "a different call" in str(error) for error in errors)
