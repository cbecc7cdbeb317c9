"""TorchRec: replicated tables by rows, and replicas of 2D parallelism by touched rows, beside TorchRec alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

Run = Callable[..., dict[str, Any]]
SCRIPT = "tests/integrations/scripts/torchrec_towers.py"


def per_step(rank: dict[str, Any], name: str) -> list[float]:
    totals = [0.0, *(stats[name] for stats in rank["ours"]["stats"])]
    return [after - before for before, after in pairwise(totals)]


def check_equal(ranks: list[dict[str, Any]]) -> None:
    """The losses of all steps, and all that was trained at the end: shards, replicas, and states of optimizers."""
    for rank in ranks:
        assert rank["tensors"] > 5
        assert rank["ours"]["losses"] == pytest.approx(rank["stock"]["losses"], rel=1e-6)
        assert rank["difference"] < 1e-6


@pytest.mark.parametrize("kinds", [("data_parallel", "table_wise"), ("data_parallel", "data_parallel")])
def test_rows_of_replicated_tables(torchrun: Run, kinds: tuple[str, str]) -> None:
    """They are in fbgemm's flat weights, in DDPs of their own. Their rows are known from the forward, not scanned."""
    ranks = torchrun(SCRIPT, 2, "parallel", *kinds)["ranks"]
    check_equal(ranks)
    dense, tables = ranks[0]["ours"]["table"]
    assert dense["name"] == "all other parameters"
    assert tables["kind"] == "dense gradient, rows known"
    assert tables["density"] < 0.02
    assert sum(per_step(ranks[0], "comm/bytes_sent")) < sum(per_step(ranks[0], "comm/bytes_dense")) / 10


def test_replicas_by_touched_rows(torchrun: Run) -> None:
    """1 % of the rows touched on each replica: whole tables, once; then at least 10 times fewer bytes."""
    ranks = torchrun(SCRIPT, 4, "replicas", "table_wise", "column_wise")["ranks"]
    check_equal(ranks)
    for rank in ranks:
        sent, dense = per_step(rank, "replicas/bytes_sent"), per_step(rank, "replicas/bytes_dense")
        syncs = [(one, other) for one, other in zip(sent, dense, strict=True) if other]
        whole = [place for place, (one, other) in enumerate(syncs) if one >= other / 2]
        assert whole[0] == 0, "replicas may begin with different tables"
        assert len(whole) <= 4, "the first, the one after somebody wrote to a table, and their states"
        for place, (one, other) in enumerate(syncs):
            assert place in whole or one < other / 10


def test_outer_loops_of_replicas(torchrun: Run) -> None:
    """Averages in every step are TorchRec's; delayed and compressed ones leave replicas alike, in fewer bytes."""
    for rank in torchrun(SCRIPT, 4, "outer", "table_wise", "column_wise")["ranks"]:
        assert rank["every step"]["losses"] == pytest.approx(rank["whole"]["losses"], rel=1e-5)
        assert rank["difference"] < 1e-5
        for how, rounds in (("every step", 1), ("delayed", 2), ("compressed", 1)):
            stats = rank[how]["stats"]
            assert rank[how]["apart"] == 0.0
            ended = stats["outer/rounds"] - stats["outer/skipped_rounds"]
            assert ended == len(rank["whole"]["losses"]) // rounds
            assert stats["comm/bytes_sent"] < stats["comm/bytes_dense"] / 8
            assert rank[how]["losses"] == pytest.approx(rank["whole"]["losses"], rel=2e-3)


def test_an_embedding_bag_collection_in_plain_ddp(torchrun: Run) -> None:
    ranks = torchrun(SCRIPT, 2, "plain", "-", "-")["ranks"]
    check_equal(ranks)
    assert sum(per_step(ranks[0], "comm/bytes_sent")) < sum(per_step(ranks[0], "comm/bytes_dense")) / 10


def test_what_cannot_be_attached_is_refused(torchrun: Run) -> None:
    for texts in torchrun(SCRIPT, 4, "refusals")["ranks"]:
        other, not_ready, taken, missed = texts
        assert "use thinwire.attach(model)" in other
        assert "model.init_data_parallel()" in not_ready
        assert "has an all-reduce of its own" in taken
        assert "use thinwire.integrations.torchrec.attach(model)" in missed


def test_the_example_runs(torchrun: Run) -> None:
    assert "losses equal: True" in torchrun("examples/torchrec_two_tower.py")["stdout"]
