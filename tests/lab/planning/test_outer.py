"""Outer loops in a plan."""

from __future__ import annotations

from measured import measurement, table
from thinwire.lab.planning.outer import outer_option


def test_an_outer_loop_sends_the_rows_of_all_its_steps_and_no_more_than_there_are() -> None:
    few, all_rows = table(world_size=4, held=(50.0,) * 4, union=180.0), table("b", 4, held=(2e4,) * 4, union=4e4)
    measured = measurement(1, world_size=4, tables=[few, all_rows], shapes=[(64, 64)])
    option = outer_option(measured, 1e6, 0.1)
    assert option is not None
    whole = 1.5 * 12.8e6 / 32
    few_rows = option.sent_bytes - whole - 1.5 * 16384 / 32
    assert 0 < few_rows < 3 * 50 * (256 + 8) * 2, "rows of 64 values and their ids: pushed, and the sums pulled"
