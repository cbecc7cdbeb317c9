"""A link that is measured: what is done about a measurement that says nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loopback import Hub, LoopbackExchange
from thinwire.lab.planning import link
from thinwire.lab.planning.speeds import Fit


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in the order in which they are measured; what a probe returns is its time."""
    sizes: list[int] = []
    monkeypatch.setattr(link, "_steady_seconds", lambda exchange, run: run())
    return sizes


def curve(sizes: list[int], seconds: Callable[[int, int], float]) -> Fit:
    """``seconds``: of a size in an attempt, which begins with the shortest message."""

    def probe(size: int) -> Callable[[], float]:
        sizes.append(size)
        return lambda: seconds(size, sizes.count(sizes[0]))

    return link._curve(LoopbackExchange(Hub(1, 1.0), 0), probe, lambda size: size)


def test_a_byte_that_takes_no_time_is_measured_again(measured: list[int]) -> None:
    """As on a machine that was busy only while short messages were measured."""
    fit = curve(measured, lambda size, attempt: 0.01 / size if attempt == 1 else 1e-9 * size)
    assert fit.line.beta == pytest.approx(1e-9)
    assert measured.count(measured[0]) == 2
    again = measured.index(measured[0], 1)
    assert max(measured[again:]) > max(measured[:again]), "messages are longer the second time"


def test_one_measurement_is_enough_where_bytes_take_time(measured: list[int]) -> None:
    fit = curve(measured, lambda size, attempt: 1e-4 + 1e-9 * size)
    assert fit.line.beta > 0.0
    assert measured.count(measured[0]) == 1


def test_measuring_ends(measured: list[int]) -> None:
    """With a link that `thinwire.lab.planning.speeds.MeasuredLink` refuses, in a sentence."""
    assert curve(measured, lambda size, attempt: 0.01).line.beta == 0.0
    assert measured.count(measured[0]) == link._ATTEMPTS
