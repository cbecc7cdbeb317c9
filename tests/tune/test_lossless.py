"""What a lossless sum is predicted to cost, and the verdict: pure numbers, without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.comm.machine import Machine
from thinwire.tune.lossless import KEPT, TAKEN, Code, Ranks, decide, lossless_seconds, native_seconds, verdict

MB = 1e6
AUTOCAST = Code(11.5, 17.5, 1e-9, 1e-9, 2e-9, 2e-9)
PLAIN = Code(27.2, 27.5, 1e-9, 1e-9, 1e-9, 1e-9)
FREE = Code(16.0, 16.0, 0.0, 0.0, 0.0, 0.0)


def wire(mbit: float) -> Machine:
    """Return a link of hosts with one rank each, all collectives at the rate of the wire."""
    return Machine(1e-3, 2e-4, 8e-6 / mbit, 8e-6 / mbit, *[0.0] * 7)


def test_bytes_are_the_bits_of_both_halves_without_the_own_piece() -> None:
    # 1000 float32 values on 8 ranks: 7/8 of them are pushed at 11.5 bits, and the sums of 1/8 go to 7 ranks at 17.5
    assert AUTOCAST.sent_bytes(4000, 8) == pytest.approx(7 / 8 * 1000 * 29 / 8)
    assert replace(FREE, value_bits=16).sent_bytes(2000, 2) == pytest.approx(1 / 2 * 1000 * 32 / 8)
    assert AUTOCAST.sent_bytes(4000, 1) == 0.0


def test_bits_decide_on_a_slow_link_and_the_code_on_a_fast_one() -> None:
    ranks = Ranks(8)
    slow, fast = wire(100), wire(40_000)
    assert decide(25 * MB, ranks, slow, AUTOCAST).is_lossless
    assert native_seconds(25 * MB, 8, slow) / lossless_seconds(25 * MB, ranks, slow, AUTOCAST) == pytest.approx(
        64 / 29, rel=0.03
    )
    assert not decide(25 * MB, ranks, fast, AUTOCAST).is_lossless
    assert lossless_seconds(25 * MB, ranks, fast, AUTOCAST) >= AUTOCAST.coding_seconds(25 * MB, 8)


def test_a_bucket_of_one_segment_overlaps_nothing() -> None:
    link, ranks = wire(1000), Ranks(4)
    for num_bytes in (1000.0, 100e3):
        coding = AUTOCAST.coding_seconds(num_bytes, 4)
        sending = AUTOCAST.sent_bytes(num_bytes, 4) * link.byte_seconds
        assert lossless_seconds(num_bytes, ranks, link, AUTOCAST) == pytest.approx(coding + sending + 2e-3)


def test_an_empty_bucket_and_a_single_rank_cost_rounds_alone() -> None:
    assert lossless_seconds(0.0, Ranks(4), wire(100), AUTOCAST) == pytest.approx(2e-3)
    assert not decide(0.0, Ranks(4), wire(100), AUTOCAST).is_lossless
    assert not decide(25 * MB, Ranks(1), wire(100), AUTOCAST).is_lossless


def test_ranks_of_a_host_share_its_cores() -> None:
    link = wire(10_000)
    alone = lossless_seconds(100 * MB, Ranks(8, 4, cores=4), link, AUTOCAST)
    crowded = lossless_seconds(100 * MB, Ranks(8, 4, cores=1), link, AUTOCAST)
    assert crowded > 3 * alone
    # one thread encodes and another decodes, which takes longer: more cores do not help
    two, many = (lossless_seconds(100 * MB, Ranks(8, cores=cores), link, AUTOCAST) for cores in (2, 16))
    assert two == many < 0.8 * alone


def test_ranks_of_one_host_stay_native_whatever_was_measured() -> None:
    found = decide(100 * MB, Ranks(4, 4, cores=64), wire(1), FREE, was_lossless=True)
    assert not found.is_lossless
    assert "one host" in found.reason


def test_plain_float32_gains_less_than_its_bits() -> None:
    found = decide(100 * MB, Ranks(8), wire(100), PLAIN)
    assert found.native_seconds / found.lossless_seconds == pytest.approx(64 / 54.7, rel=0.03)
    assert not decide(100 * MB, Ranks(8), wire(100), replace(PLAIN, push_bits=29.5, pull_bits=29.5)).is_lossless


def test_a_verdict_says_bits_and_seconds_in_one_line() -> None:
    assert (
        verdict(0.91, 0.42, AUTOCAST).reason == "11.5 + 17.5 of 64 bits a value; 0.42 s instead of 0.91 s on this link"
    )
    assert verdict(0.91, 0.88, AUTOCAST).reason.endswith("on this link, less than 10 % to gain")
    assert verdict(0.0091, 0.42, AUTOCAST).reason.endswith("0.42 s instead of 9.1 ms on this link, slower")


def test_a_verdict_does_not_waver() -> None:
    """Between the two thresholds a bucket stays what it was."""
    assert KEPT < TAKEN
    between = (KEPT + TAKEN) / 2
    assert verdict(between, 1.0, AUTOCAST, was_lossless=True).is_lossless
    assert not verdict(between, 1.0, AUTOCAST, was_lossless=False).is_lossless
    for was_lossless in (False, True):
        assert verdict(TAKEN, 1.0, AUTOCAST, was_lossless).is_lossless
        assert not verdict(0.99 * KEPT, 1.0, AUTOCAST, was_lossless).is_lossless
