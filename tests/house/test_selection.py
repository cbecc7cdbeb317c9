"""What `make test` leaves out is what it may leave out, and one test of many texts fails like many."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from loops import for_each
from tests.common.plugins.selection import covering, spread

ROOT = Path(__file__).parents[2]
WHOLE = 5000  # items; of a run of less, the others are collected on the side

FAMILIES = (
    "agsparse", "column_split", "dense", "dense_ring", "omnireduce", "sparcml", "sparse_ps", "union_split", "zen",
)  # fmt: skip
IN_EVERY_RUN = {
    "bits of each family of schemes": [
        *(f"tests/sums/test_conformance.py::test_laws[{family}-" for family in FAMILIES),
        "tests/sums/test_two_level.py::test_sums_bits_and_bytes[",
        "tests/sums/test_lossless.py::test_the_bits_of_a_sum_in_rank_order[",
        "tests/compress/reductions/test_reductions.py::test_ranks_agree_bitwise_and_send_what_was_predicted[",
    ],
    "predicted bytes are sent bytes, and those that the interface counts": [
        "tests/sums/test_two_level.py::test_sums_bits_and_bytes[",
        "tests/compress/reductions/test_reductions.py::test_ranks_agree_bitwise_and_send_what_was_predicted[",
        "tests/comm/test_sent_bytes.py::test_stats_are_what_the_interface_counts[",
    ],
    "a failure is heard by all": [
        "tests/comm/failing/test_hanging_up.py::test_an_exception_in_backward_of_one_rank_reaches_all[ddp-",
        "tests/comm/failing/test_hanging_up.py::test_an_exception_in_backward_of_one_rank_reaches_all[plain-",
        "tests/comm/failing/test_named_failures.py::test_a_living_rank_that_fails_is_named_by_all_others_at_once",
        "tests/test_all_reduce.py::test_what_one_rank_does_wrong_every_rank_is_told[",
    ],
    "kill -9 of a rank": [
        "tests/comm/failing/test_named_failures.py::test_a_rank_that_dies_is_named_by_all_others[tables-killed-",
        "tests/reproducible/test_steps.py::test_a_killed_rank_leaves_its_share_to_the_others",
    ],
    "kill -9 of a holder": ["tests/checkpoint/test_checkpointer.py::test_a_killed_holder_does_not_stop_training"],
    "a restore": [
        "tests/checkpoint/test_checkpointer.py::test_a_killed_training_goes_on_bitwise[",
        "tests/checkpoint/test_checkpointer.py::test_a_lost_host_is_restored_from_its_peer",
    ],
    "attach under DDP, FSDP2 and plain": [
        "tests/test_attach.py::test_trains_as_stock_ddp[",
        "tests/gradients/sharded/test_layout.py::test_an_attached_model_trains_like_one_that_is_not[",
        "tests/attach/test_plain_module.py::test_a_plain_module_is_synchronized_over_the_group_it_is_given[",
    ],
}
"""What a change is never tested without, as beginnings of the names of items of `make test`."""

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


def test_what_is_in_every_run_is_in_make_test(request: pytest.FixtureRequest) -> None:
    """Nobody has called it slow, thinned it out to nothing, renamed it or deleted it."""
    names = [item.nodeid for item in request.session.items]
    if not (request.config.option.pairs and len(names) > WHOLE):
        names = collected_by_make_test({name.partition("::")[0] for names in IN_EVERY_RUN.values() for name in names})
    missing = {
        law: lacking
        for law, prefixes in IN_EVERY_RUN.items()
        if (lacking := [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)])
    }
    assert missing == {}


def collected_by_make_test(files: set[str]) -> list[str]:
    (quick,) = re.findall(r"^QUICK +:= (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *shlex.split(quick), *sorted(files)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_files_with_tests_that_start_ranks_say_so(request: pytest.FixtureRequest) -> None:
    """By the mark in their own text, by which `make test-torches` finds them."""
    files = {item.path for item in request.session.items if item.get_closest_marker("ranks")}
    assert {file.name for file in files if "mark.ranks" not in file.read_text()} == set()
