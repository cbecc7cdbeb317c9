"""What `thinwire.schemes` offers: the named points, and every type that a point of one's own is written with."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum

import pytest

from thinwire import schemes
from thinwire.schemes import Communication, Scheme, TwoLevel
from thinwire.sums.named import resolve

POINTS = {name: getattr(schemes, name) for name in schemes.__all__ if name.isupper() and name not in ("AUTO", "NAMED")}


def test_a_star_import_brings_what_is_promised() -> None:
    namespace: dict[str, object] = {}
    exec("from thinwire.schemes import *", namespace)
    del namespace["__builtins__"]
    assert set(namespace) == set(schemes.__all__)
    assert all(namespace[name] is getattr(schemes, name) for name in schemes.__all__)
    assert len(schemes.__all__) == len(set(schemes.__all__))


@pytest.mark.parametrize("name", POINTS)
def test_a_point_can_be_written_with_the_types_of_this_module(name: str) -> None:
    point = POINTS[name]
    assert isinstance(point, Scheme)
    assert resolve(name.lower()) is point
    values = {field.name: getattr(point, field.name) for field in fields(point) if field.init}
    for value in values.values():
        if isinstance(value, Enum):
            assert getattr(schemes, type(value).__name__) is type(value)
            assert type(value).__name__ in schemes.__all__
    written = {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}
    assert Scheme(**written) == point, "text does for members"


def test_a_point_of_ones_own_and_two_levels_of_a_named_one_are_schemes() -> None:
    own = replace(schemes.ZEN, seed=3)
    assert own != schemes.ZEN
    assert resolve(own) is own
    assert resolve("two_level:zen") == TwoLevel(schemes.ZEN)
    assert schemes.ZEN.communication is Communication.POINT_TO_POINT
