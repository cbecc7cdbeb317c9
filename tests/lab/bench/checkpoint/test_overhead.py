"""The order of methods within turns."""

from __future__ import annotations

from thinwire.lab.bench.checkpoint.methods import METHODS
from thinwire.lab.bench.checkpoint.overhead import order_of


def test_every_method_is_at_every_place_equally_often() -> None:
    orders = [order_of(METHODS, turn) for turn in range(len(METHODS))]
    assert all(sorted(place) == sorted(METHODS) for place in zip(*orders, strict=True))
