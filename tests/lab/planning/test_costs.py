"""Costs of groups."""

from __future__ import annotations

import pytest

from measured import codec, measurement, parameters
from thinwire.compress.assign import with_memory
from thinwire.compress.named import parse
from thinwire.compress.reductions.choose import reduction_for
from thinwire.lab.planning.codecs import exchanges_of
from thinwire.lab.planning.costs import added_bytes

FIXED = [(text, way) for text in ("bf16", "top_k:density=0.01", "ef_sign_sgd", "power_sgd", "int8", "terngrad")
         for way in exchanges_of(text)]  # fmt: skip


@pytest.mark.parametrize(("text", "way"), FIXED)
def test_bytes_of_a_group_are_those_of_its_tensors(text: str, way: str) -> None:
    """What costs add up is what an exchange sends, but for headers and the rounding of a ring to whole bytes."""
    compressor, world_size = with_memory(parse(text)), 8
    plans = [(compressor, parameter) for parameter in parameters([(64, 64), (256, 512), (77, 33)])]
    exchange = reduction_for(way, *plans[0], world_size)
    sent = max(exchange.sent_bytes(plans, rank, world_size) or 0 for rank in range(world_size))
    added = sum(added_bytes(*plan, exchange, world_size) for plan in plans)
    assert 0 <= sent - added <= 2 * 7 * 64 + 8 * len(plans)


def test_costs_of_a_group_are_a_constant_and_its_tensors() -> None:
    measured = measurement(codecs=[codec("top_k:density=0.01", "all_gather", 1e-4, 1e-9)])
    exact, coded = measured.costs(), measured.costs("top_k:density=0.01", "all_gather")
    size, wire, alpha = 4 * 1024 * 512, 8e-6 / 100, 1e-3
    assert exact.seconds([4]) == pytest.approx(2 * alpha + size * (wire * 14 / 8 + 2e-12) + 2e-6)
    parameter = measured.parameters[4]
    sent = added_bytes(with_memory(parse("top_k:density=0.01")), parameter, reduction_for(
        "all_gather", parse("top_k:density=0.01"), parameter, 8), 8)  # fmt: skip
    assert coded.seconds([4]) == pytest.approx(3 * alpha + sent * wire + 2 * (1e-4 + size * 1e-9))
    assert coded.coded == (True, False) * 4
    with_vector = coded.seconds([4, 5]) - coded.seconds([4])  # which adds an all-reduce to the job
    assert with_vector == pytest.approx(alpha + 2e-6 + 2048 * (wire * 14 / 8 + 2e-12))
    assert coded.seconds([5]) == pytest.approx(exact.seconds([5]))
