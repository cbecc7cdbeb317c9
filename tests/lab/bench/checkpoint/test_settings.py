"""What is measured, and what is refused before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thinwire.lab.bench.checkpoint.methods import NONE, THINWIRE
from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark
from thinwire.lab.bench.checkpoint.work import TrainingWork
from thinwire.lab.testbed.network import Link


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"methods": ("none", "tape")}, "unknown methods tape; legal are none, dcp_sync"),
        ({"methods": ("none", "none")}, "none, none: name each once"),
        ({"methods": ()}, "legal are none"),
        ({"hosts": 1}, "2 replicas need 2 machines"),
        ({"steps": 0}, "at least one"),
        ({"kills": -1}, "at least zero"),
        ({"work": TrainingWork(state_bytes=10**12)}, "bytes, and .* are available"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CheckpointBenchmark(**options)


def test_parts_are_blocks_and_runs() -> None:
    benchmark = CheckpointBenchmark(methods=(NONE, THINWIRE), repeat=3, kills=2, link=Link(None))
    assert benchmark.recovering == [THINWIRE]
    assert benchmark.parts == 2 * 4 + 4
    assert replace(benchmark, kills=0).recovering == []
