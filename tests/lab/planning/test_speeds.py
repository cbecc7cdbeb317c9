"""The line through measured costs: found where there is one, nearest elsewhere, refused for what are no points."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measured import codec, link, measurement
from thinwire.lab.planning.speeds import Fit, MeasuredLink, fit_line
from thinwire.plan.profile import Linear

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


def test_a_fit_says_how_far_off_it_is() -> None:
    exact = Fit.of([(1000, 0.002), (2000, 0.003), (5000, 0.006)])
    assert exact.line(3000) == pytest.approx(0.004)
    assert exact.residual == pytest.approx(0.0, abs=1e-12)
    bent = Fit.of([(1000, 0.002), (2000, 0.003), (5000, 0.012)])
    errors = sorted(abs(bent.line(size) - seconds) / seconds for size, seconds in bent.points)
    assert bent.residual == errors[1] > 0.01


def test_a_line_for_more_bytes_than_were_measured_has_the_slope_of_the_long_messages() -> None:
    """Points of an all-reduce at 100 Mbit/s; 24 kB took as long as 98 kB."""
    points = [(6144, 5.3e-3), (24576, 8.7e-3), (98304, 8.6e-3), (393216, 31.7e-3), (786432, 64.7e-3),
              (1572864, 130e-3), (3145728, 263.3e-3)]  # fmt: skip
    assert Fit.of(points, extrapolates=True)(19.3e6) == pytest.approx(19.3e6 / 3145728 * 263.3e-3, rel=0.02)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1e-6, 1.0))
def test_a_link_at_another_rate_changes_the_wire_alone(measured: float, other: float, alpha: float) -> None:
    slow, overhead = link(measured, alpha), 3e-9
    slow = replace(slow, all_reduce=Fit(Linear(alpha, slow.message.beta + overhead)))
    moved = slow.at(other)
    assert moved.mbit == pytest.approx(other, rel=1e-6)
    assert moved.all_reduce.line.alpha == alpha
    assert moved.all_reduce.line.beta == pytest.approx(8e-6 / other + overhead, rel=1e-4)
    assert slow.at(slow.mbit).all_reduce.line.beta == pytest.approx(slow.all_reduce.line.beta)


def test_a_link_that_takes_no_time_is_refused() -> None:
    free = Fit(Linear(1e-3, 0.0))
    with pytest.raises(ValueError, match=r"the link was measured as zero: a byte of all_reduce.*--fresh"):
        replace(link(100), all_reduce=free)
    with pytest.raises(ValueError, match=r"measured as zero: a round"):
        replace(link(100), round=Linear(0.0, 0.0))
    with pytest.raises(ValueError, match="rate above 0"):
        link(100).at(0.0)


def test_what_was_measured_badly_is_told() -> None:
    noisy = replace(codec("bf16", "all_reduce"), decode=Fit(Linear(1e-5, 1e-10), residual=0.4))
    assert measurement(codecs=[noisy]).doubts() == ["bf16 (decode)"]
    assert measurement().doubts() == []


def test_few_bytes_take_no_less_than_the_floor() -> None:
    """A fit that is flat up to 1 MB, in a job of one small gradient and in one of a large one."""
    measured = measurement(shapes=[(64, 64), (2048, 1024)])
    bent = Fit(Linear(0.0, 8e-8), floor=0.08)
    exact = replace(measured, link=replace(measured.link, all_reduce=bent)).costs()
    assert exact.seconds([0]) == pytest.approx(1e-3 + 0.08, rel=1e-3)
    assert exact.seconds([0, 1]) == pytest.approx(1e-3 + 8e-8 * 14 / 8 * 4 * (64 * 64 + 2048 * 1024), rel=1e-3)


def test_links_survive_json() -> None:
    measured = replace(link(100), all_reduce=Fit.of([(1000, 0.25), (3000, 0.5)]))
    assert MeasuredLink.from_json(json.loads(json.dumps(asdict(measured)))) == measured
    assert math.isclose(measured.mbit, 100)
