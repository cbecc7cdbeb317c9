"""The result of the demo in words."""

from dataclasses import replace

import pytest

from tests.lab.demo.results import comparison
from thinwire.lab.demo.summary import (
    advice,
    conditions,
    format_bytes,
    format_factor,
    format_seconds,
    link_rows,
    losing_points,
    result,
)


def test_one_unequal_variant_makes_parameters_unequal() -> None:
    one = comparison()
    object.__setattr__(one.results["thinwire_sparse"], "parameters_bitwise_equal", False)
    assert one.to_json()["parameters_bitwise_equal"] is False
    assert not one.is_exact
    assert "the losses differ: please report this" in result(one)


@pytest.mark.parametrize(
    ("seconds", "link", "how", "where"),
    [
        (0.5, 955.0, "4.0x faster than", ""),
        (1.6, 955.0, "1.25x faster than", ""),
        (2.05, 955.0, "As fast as", ""),
        (3.0, None, "1.50x slower than", ", on loopback, where bytes cost next to nothing"),
    ],
)
def test_the_result_is_one_true_sentence(seconds: float, link: float | None, how: str, where: str) -> None:
    sentence = f"{how} this model under DDP, by one line: thinwire.attach(model), with the same losses{where}."
    assert result(comparison(link, thinwire=seconds)) == sentence


@pytest.mark.parametrize(
    ("sparse", "both", "before", "then"),
    [
        (0.2, 0.1, "If you can switch to sparse=True, do that first: stock DDP then", "2.0x faster than that"),
        (0.2, 0.2, "If you can switch to sparse=True, do that first: stock DDP then", "as fast"),
        (0.2, 0.3, "If you can switch to sparse=True, do that first: stock DDP then", "1.50x slower than that"),
        (0.8, 0.4, "With sparse=True, stock DDP", "2.0x faster than that"),
    ],
)
def test_the_advice_on_sparse_gradients_is_honest(sparse: float, both: float, before: str, then: str) -> None:
    sentence = f"{before} takes {format_seconds(sparse)} a step, and thinwire is {then}."
    assert advice(comparison(ddp_sparse=sparse, thinwire_sparse=both)) == sentence


def test_losing_points_are_named_in_words() -> None:
    slow, fast = comparison(95.0), comparison(9400.0, thinwire=2.4, thinwire_sparse=0.3)
    assert losing_points([slow, fast]) == [
        "At 9,400 Mbit/s, thinwire is 1.20x slower than stock DDP.",
        "At 9,400 Mbit/s, thinwire, sparse=True is 1.50x slower than stock DDP, sparse=True.",
    ]
    assert losing_points([slow]) == ["On none of these links is thinwire slower than stock DDP by more than 5%."]
    assert link_rows([slow, fast])[-2:] == [
        ["thinwire: speed-up", "4.0x", "0.83x"],
        ["thinwire, sparse=True: speed-up", "2.0x", "0.67x"],
    ]


def test_conditions_name_the_measured_link_and_the_steps_that_count() -> None:
    assert "links of 955 Mbit/s measured" in conditions(comparison())
    assert "loopback" in conditions(comparison(None))
    assert "5 steps of each in turn, medians of the last 3" in conditions(comparison())
    assert "two tables of 120,000 rows of 128" in conditions(comparison())


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (4_831_080, "4.83 MB"), (2e9, "2 GB")])
def test_format_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


def test_format_seconds_and_factors() -> None:
    assert (format_seconds(0.1234), format_seconds(2.5)) == ("123 ms", "2.5 s")
    assert (format_factor(5.267), format_factor(1.234)) == ("5.3x", "1.23x")


@pytest.mark.parametrize(
    ("load", "spread", "says"),
    [(0.4, 1.0, ""), (60.0, 1.0, "busy (60 other processes on 2 cores, "), (0.4, 1.5, "busy (steps of stock")],
)
def test_the_result_says_that_the_machine_is_busy(load: float, spread: float, says: str) -> None:
    one = replace(comparison(), load=load, cores=2)
    one.results["ddp"].columns["step_seconds"][-1:] *= spread
    assert one.is_busy == one.to_json()["machine_is_busy"] == bool(says)
    assert ("these times mean little" in result(one)) == bool(says)
    assert says in result(one)
    assert result(one).split(", by one line: ")[0] == "4.0x faster than this model under DDP"
