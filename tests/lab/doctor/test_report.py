"""The page of the doctor: the verdict, what to paste, every way, and no more lines in the picture than can be read."""

from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest

from measured import codec, measurement
from tests.lab.doctor.diagnosed import POLICIES, TOP_K, with_tables
from thinwire.lab.doctor.diagnosis import SPEEDS_MBIT, Diagnosis, LinkCurve, diagnose, to_paste
from thinwire.lab.doctor.report import TITLE, _by_link, _drawn, build_report
from thinwire.lab.plot import MOST_LINES
from thinwire.plan.plan import STOCK


def diagnosis(mbit: float, **changes: object) -> Diagnosis:
    return diagnose("a test of <pages>", measurement(mbit, **changes), [TOP_K], POLICIES)  # type: ignore[arg-type]


def test_a_page_has_the_verdict_the_lines_and_every_way() -> None:
    slow = diagnosis(20)
    page = build_report(slow).html()
    assert escape("a test of <pages>") in page
    assert "<pages>" not in page
    assert f"{slow.plan.speedup:.2f}x faster" in page
    assert "Compare the loss, too." in page
    _, lines = to_paste(slow, None)
    assert len(lines) > 1
    assert all(escape(line) in page for line in lines)
    assert "It is lossy: compare the loss, too, or take the exact way" in page
    assert TITLE in page
    assert "20 Mbit/s a rank, measured" in page
    for candidate in slow.plan.candidates[:12]:
        assert escape(candidate.name) in page


def test_where_nothing_pays_there_is_nothing_to_paste() -> None:
    page = build_report(diagnosis(50_000, backward_seconds=0.1, alpha=1e-5)).html()
    assert "Do nothing" in page
    assert "import thinwire" not in page
    assert "It is lossy" not in page


def test_figures_that_contradict_each_other_are_no_verdict() -> None:
    page = build_report(replace(diagnosis(20), error="A step was faster than its bytes")).html()
    assert "No verdict" in page
    assert "A step was faster than its bytes. One of the two figures is wrong: rerun with --fresh." in page
    assert "import thinwire" not in page, "no advice either"


def test_tables_have_rows_of_their_own_and_models_without_any_have_none() -> None:
    page = build_report(with_tables(100)).html()
    assert "Embedding tables" in page
    assert "50,000 x 64" in page
    assert "100,000 x 64" in page
    assert "Embedding tables" not in build_report(diagnosis(100)).html()


@pytest.mark.parametrize("mbit", [20.0, 900.0])
def test_the_picture_has_the_exact_ways_and_the_fastest_others(mbit: float) -> None:
    names = [f"top_k:density=0.0{number}" for number in range(1, 10)]
    codecs = [codec(name, "all_gather", beta=1e-10 * number) for number, name in enumerate(names, 1)]
    many = diagnose("", measurement(mbit, codecs=codecs), names, POLICIES)
    drawn = _drawn(many)
    shown = {curve.name for curve in drawn}
    assert len(many.curves) > MOST_LINES == len(drawn)
    assert {STOCK, "exact, fused"} <= shown
    assert [curve for curve in many.curves if curve.name in shown] == drawn, "in the order of the table"

    def at_link(curve: LinkCurve) -> float:
        nearest = min(range(len(SPEEDS_MBIT)), key=lambda index: abs(SPEEDS_MBIT[index] / mbit - 1))
        return curve.step_seconds[nearest]

    left_out = [curve for curve in many.curves if curve.name not in shown]
    assert max(at_link(curve) for curve in drawn if curve.name in names) <= min(map(at_link, left_out))


def test_the_table_of_links_has_every_way_at_every_fourth_speed() -> None:
    slow = diagnosis(20)
    columns, rows = _by_link(slow)
    assert len(columns) == 1 + len(SPEEDS_MBIT[::4])
    assert [row[0] for row in rows] == [curve.name for curve in slow.curves]
    assert all(len(row) == len(columns) for row in rows)
