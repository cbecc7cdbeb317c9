"""The choice between stock DDP and rows: what it takes over from another run, and what it says."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from thinwire.gradients.ddp import ROWS, LeftToDdp
from thinwire.gradients.steps.trials import STOCK, RowsChoice


def choice(has_stock: bool, world_size: int = 2) -> tuple[RowsChoice, Any]:
    """Return a choice on rank 0 of some, all of which say the same, and what sums its tables."""
    lane: Any = MagicMock(world_size=world_size, rank=0)
    lane.agree = lambda what, numbers: [list(numbers)] * world_size
    plug, gradients = MagicMock(spec=LeftToDdp) if has_stock else object(), MagicMock()
    gradients.rivals.return_value = "", []
    return RowsChoice(lane, gradients, plug, MagicMock(), ["table"], lambda: None), gradients


def test_a_table_says_what_a_watch_has_seen_so_far() -> None:
    """And not for the whole of it that nothing was tried yet."""
    one, gradients = choice(has_stock=True)
    for _ in range(6):
        one.finish_step(0.0)
    reason = f"{STOCK}: steps wait 0.0% of their time for the network"
    assert gradients.leave.call_args.args == (["table"], reason)


@pytest.mark.parametrize(("standing", "left"), [(STOCK, 500), (ROWS, 150)])
@pytest.mark.parametrize("has_stock", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_decision_is_taken_over_by_as_many_ranks_where_it_is_an_option(
    standing: str, left: int, has_stock: bool, world_size: int
) -> None:
    """A run that was DDP may go on as a plain module, or on other ranks, and watches again."""
    before, _ = choice(has_stock=True)
    state = {**before.state_dict(), "standing": standing, "left": left, "steps": 700}
    resumed, gradients = choice(has_stock, world_size)
    resumed.load_state_dict(state)
    is_taken = world_size == 2 and (has_stock or standing == ROWS)
    assert resumed.trial.steps == (700 if is_taken else 0)
    assert resumed.trial.arm == (standing if is_taken else STOCK if has_stock else ROWS)
    assert gradients.is_stock == (resumed.trial.arm == STOCK)
