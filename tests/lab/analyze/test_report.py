"""The page of an analysis."""

from __future__ import annotations

import pytest

from tests.lab.analyze.recordings import BIAS, recorded
from thinwire.lab.analyze.recording import TableSteps, recording_of
from thinwire.lab.analyze.report import build_report
from thinwire.lab.analyze.summary import Analysis
from thinwire.sums.named import NAMED

pytestmark = pytest.mark.slow


def test_page_has_its_pictures_and_escapes_names() -> None:
    analysis = Analysis.of(recorded(), "<b>train.py", 5)
    page = build_report(analysis).html()
    assert page.count("<figure") == 5
    assert "<b>train" not in page
    assert "ended before the 5 asked for" in page
    for name in NAMED:
        assert name in page


def test_page_without_sparse_tables() -> None:
    alike = (1, [TableSteps(BIAS, [1.0], [None])])
    analysis = Analysis.of(recording_of([alike, alike]), "train.py", 1)
    assert "No parameter has a sparse gradient" in build_report(analysis).html()
    with pytest.raises(ValueError, match="no trace to record"):
        analysis.largest_trace()
