"""What is said of a result."""

from __future__ import annotations

from tests.lab.bench.checkpoint.results import result
from thinwire.lab.bench.checkpoint.summary import sentences


def test_the_bound_stands_beside_what_was_reached() -> None:
    bound, reached = sentences(result())[:2]
    assert "one checkpoint in every iteration fits" in bound
    assert "0.160 s of a link" in bound
    assert "one in 1.00, safe 0.300 s after the step, 1.88x" in reached
    tight = sentences(result(idle=0.05))[0]
    assert "does NOT allow one checkpoint per iteration, at best one in 4" in tight
    assert "not known" in sentences(result(link_mbit=None))[0]
