"""A result beside an earlier one: medians of what is the same in both, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.bench.compare import Compared, compare, load_rows


def row(scheme: str, seconds: float | None, size: int = 1, link: str = "1gbit") -> dict[str, Any]:
    return {"scheme": scheme, "seconds": seconds, "size": size, "link": link}


def compared(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[Compared]:
    return compare(now, before, ("link", "size"), "scheme", "seconds")


def test_medians_of_the_same_are_compared_and_what_only_one_run_has_stays() -> None:
    before = [row("zen", 2.0), row("zen", 9.0), row("zen", 4.0), row("dense", 1.0), row("old", 1.0)]
    now = [row("zen", 2.0), row("dense", 3.0), row("new", 5.0), row("failed", None)]
    found = compared(now, before)
    assert found == [
        Compared("zen", 4.0, 2.0), Compared("dense", 1.0, 3.0), Compared("new", None, 5.0), Compared("old", 1.0, None),
    ]  # fmt: skip
    assert [each.ratio for each in found] == [0.5, 3.0, None, None]


def test_names_have_their_fields_where_these_differ() -> None:
    rows = [row("zen", 1.0, size=1), row("zen", 2.0, size=2)]
    assert [each.name for each in compared(rows, rows)] == ["1gbit, 1, zen", "1gbit, 2, zen"]


def test_runs_without_a_row_in_common_are_refused() -> None:
    with pytest.raises(ValueError, match="the same in link, size, scheme"):
        compared([row("zen", 1.0)], [row("zen", 1.0, link="10gbit")])


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"rows": 5}), json.dumps({"rows": [1]}), '{"rows": []}'])
def test_a_file_that_is_no_result_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json .*that --json"):
        load_rows(tmp_path / "result.json")
    with pytest.raises(ValueError, match=r"none\.json is no result of a benchmark: No such file"):
        load_rows(tmp_path / "none.json")
