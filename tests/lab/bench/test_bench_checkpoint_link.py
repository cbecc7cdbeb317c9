"""`thinwire bench checkpoint` on emulated hosts: what went over the links, and how fast a lost host is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from namespaces import NEEDS_NAMESPACES
from thinwire.lab.bench.checkpoint.benchmark import run
from thinwire.lab.bench.checkpoint.methods import BLOCKING, NONE, THINWIRE
from thinwire.lab.bench.checkpoint.overhead import TRACED_STEPS
from thinwire.lab.bench.checkpoint.report import build_report
from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark
from thinwire.lab.bench.checkpoint.work import TrainingWork
from thinwire.lab.testbed.network import Link

pytestmark = [*NEEDS_NAMESPACES, pytest.mark.ranks]


def measure(**options: Any) -> dict[str, Any]:
    return run(CheckpointBenchmark(timeout_seconds=100.0, **options), lambda done: None)


@pytest.mark.slow
def test_checkpoints_are_on_the_links_of_two_hosts(tmp_path: Path) -> None:
    """The links carried gradients, and little of versions: under DDP all hosts have the same state."""
    work = TrainingWork(state_bytes=500_000, compute_seconds=0.06)
    result = measure(
        work=work, hosts=2, link=Link(200.0), methods=(NONE, THINWIRE), steps=4, repeat=1, kills=0, traced=True
    )
    row = result["rows"][1]
    assert 150 < row["link_mbit"] < 200
    bounds = result["environment"]["bounds"]
    assert bounds["network_seconds"] == pytest.approx(row["state_bytes"] * 8e-6 / row["link_mbit"])
    traffic = result["timeline"]
    for host in traffic["hosts"]:
        width = traffic["seconds"] / len(host["seconds"])
        checkpoints, others = (sum(host[name]) * width / 8e-6 for name in ("checkpoint_mbit", "gradient_mbit"))
        assert checkpoints < 0.2 * (TRACED_STEPS + 1) * row["state_bytes"]
        assert others > TRACED_STEPS * row["state_bytes"] / 12 * 4 * 0.5, "of two hosts each sends a float a parameter"
        assert len(host["steps"]) == TRACED_STEPS
    build_report(result).write(tmp_path / "page.html")
    assert "host 1" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_all_hosts_have_is_not_sent_and_a_lost_one_comes_back_at_the_speed_of_the_link() -> None:
    work = TrainingWork(state_bytes=3_000_000, compute_seconds=0.5)
    result = measure(
        work=work, hosts=3, link=Link(100.0), methods=(NONE, BLOCKING, THINWIRE), steps=6, repeat=2, kills=1
    )
    rows = {row["method"]: row for row in result["rows"]}
    network_seconds = result["environment"]["bounds"]["network_seconds"]
    slower = rows[BLOCKING]["iteration_seconds_median"] - rows[NONE]["iteration_seconds_median"]
    assert slower < 0.5 * network_seconds, "even one that waits for each version sends next to nothing under DDP"
    assert rows[THINWIRE]["restore_bitwise_equal"] is rows[BLOCKING]["restore_bitwise_equal"] is True
    assert rows[THINWIRE]["recovery_link_share"] > 0.6
    assert rows[THINWIRE]["iterations_lost"] <= 2.0
