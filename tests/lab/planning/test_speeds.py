"""The line through measured costs: found where there is one, nearest elsewhere, refused for what are no points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.lab.planning.speeds import fit_line
from thinwire.plan import Linear

seconds = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))


@given(
    seconds,
    st.one_of(st.just(0.0), st.floats(1e-12, 1e-3)),
    st.lists(st.integers(1, 10**6), min_size=2, unique=True),
    st.booleans(),
)
def test_a_fit_finds_the_line(alpha: float, beta: float, sizes: list[int], relative: bool) -> None:
    line = Linear(alpha, beta)
    times = [line(size) for size in sizes]
    if relative and not all(times):
        return
    fitted = fit_line(sizes, times, relative)
    for size, took in zip(sizes, times, strict=True):
        assert fitted(size) == pytest.approx(took, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.01, 10)), min_size=2, max_size=8), st.booleans(), st.data())
@settings(max_examples=min(300, settings.default.max_examples))
def test_no_other_line_of_positive_costs_is_nearer(
    points: list[tuple[int, float]], relative: bool, data: st.DataObject
) -> None:
    sizes, times = zip(*points, strict=True)
    if len(set(sizes)) < 2:
        return
    fitted = fit_line(sizes, times, relative)

    def error(line: Linear) -> float:
        return sum((line(size) - took) ** 2 / (took**2 if relative else 1) for size, took in points)

    def nearby(value: float) -> st.SearchStrategy[float]:
        return st.one_of(st.just(value), st.floats(0.0, max(2 * value, 1e-3)))

    other = Linear(data.draw(nearby(fitted.alpha)), data.draw(nearby(fitted.beta)))
    assert error(fitted) <= error(other) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (([], []), "two sizes"),
        (([1, 1], [1, 2]), "two sizes"),
        (([1, 2], [1]), "two sizes"),
        (([1, 2], [1, math.nan]), "measure again"),
        (([1, 2], [1, -1]), "measure again"),
    ],
)
def test_points_that_make_no_line(points: tuple[list[float], list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_line(*points)
    with pytest.raises(ValueError, match="relative=False"):
        fit_line([1, 2], [0, 1], relative=True)
