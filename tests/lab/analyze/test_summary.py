"""The JSON of an analysis."""

from __future__ import annotations

import json

import pytest

from tests.lab.analyze.recordings import NUM_ROWS, recorded
from thinwire.lab.analyze.prediction import PREDICTED_RANKS
from thinwire.lab.analyze.summary import Analysis
from thinwire.sums.named import NAMED

pytestmark = pytest.mark.slow


def test_json_has_the_promised_fields() -> None:
    figures = json.loads(json.dumps(Analysis.of(recorded(), "train.py", 5).to_json()))
    assert (figures["workers"], figures["steps"], figures["steps_wanted"]) == (2, 3, 5)
    (words,) = figures["parameters"]
    assert words["name"] == "words"
    assert words["density"]["mean"] == 2 / NUM_ROWS
    assert set(words["overlap_quantiles"]) >= {"0.0", "0.5", "1.0"}
    assert len(words["densification"]) == 2
    assert set(words["skewness"]) == {"8", "128"}
    assert words["contiguous"]["push_rows"] == [4.0, 0.0]
    assert sum(words["permutation"]["push_rows"]) == 4
    assert [one["world_size"] for one in words["predictions"]] == list(PREDICTED_RANKS)
    assert set(words["sent_bytes"]) == set(words["predictions"][-1]["bytes"]) == set(NAMED)
    assert words["pick"] == words["predictions"][0]["pick"]
    assert [one["name"] for one in figures["others"]] == ["bias"]
    assert figures["others"][0]["density_mean"] == 1
