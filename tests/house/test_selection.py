"""What `make test` leaves out is what it may leave out, and one test of many texts fails like many."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from loops import for_each
from selection import covering, spread

SIZES = {"scheme": 39, "world_size": 6, "dtype": 4, "layout": 2}
ROWS = [dict(zip(SIZES, row, strict=True)) for row in product(*map(range, SIZES.values()))]


def pairs(rows: list[dict[str, int]]) -> set[object]:
    return {pair for row in rows for pair in combinations(row.items(), 2)}


@pytest.mark.parametrize("number", [2, 3, 4])
def test_each_two_values_meet_in_hardly_more_rows_than_they_need(number: int) -> None:
    rows = [{name: row[name] for name in list(SIZES)[:number]} for row in ROWS]
    kept = [rows[place] for place in covering(rows)]
    assert pairs(kept) == pairs(rows)
    assert 39 * 6 <= len(kept) <= 39 * 6 * 1.05


def test_pairs_that_no_item_has_are_not_asked_for() -> None:
    rows = [row for row in ROWS if row["scheme"] % 2 == row["dtype"] % 2]
    assert pairs([rows[place] for place in covering(rows)]) == pairs(rows)


def test_few_are_spread_from_the_first_to_the_last() -> None:
    assert (spread(11, 4), spread(4, 1), spread(2, 5)) == ([0, 3, 7, 10], [0], [0, 1])
    assert all(len(set(spread(count, few))) == min(count, few) for count in range(1, 40) for few in range(1, 40))


def test_a_loop_names_all_that_fail() -> None:
    seen = []

    @for_each(["one", "two", "three"])
    def test(text: str) -> None:
        seen.append(text)
        assert "o" not in text, "an o"
        pytest.fail("no o")

    with pytest.raises(AssertionError, match=r"(?s)3 of 3 failed:.one: AssertionError.*two: .*three: Failed: no o"):
        test()
    assert seen == ["one", "two", "three"]


def test_a_loop_over_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="nothing"):
        for_each([])(lambda text: None)()
