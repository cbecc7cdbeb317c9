"""The work of a training."""

from __future__ import annotations

import pytest

from thinwire.lab.bench.checkpoint.work import TrainingWork


def test_work_that_cannot_be_is_refused() -> None:
    for options in ({"job": "chess"}, {"state_bytes": 1}, {"compute_seconds": -1.0}):
        with pytest.raises(ValueError):
            TrainingWork(**options)
