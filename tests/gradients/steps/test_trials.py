"""The choice between stock DDP and rows: what it takes over from another run, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from thinwire.errors import ThinwireError, raising
from thinwire.gradients.ddp import ROWS, LeftToDdp, Plug
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.steps import state as states
from thinwire.gradients.steps.trials import STOCK, RowsChoice


def choice(has_stock: bool, world_size: int = 2) -> tuple[RowsChoice, Any]:
    """Return a choice on rank 0 of some, all of which say the same, and what sums its tables."""
    lane: Any = MagicMock(world_size=world_size, rank=0)
    lane.agree = lambda what, numbers: [list(numbers)] * world_size
    plug, gradients = MagicMock(spec=LeftToDdp, plays_stock=True) if has_stock else Plug(), MagicMock()
    gradients.rivals.return_value = "", []
    return RowsChoice(lane, gradients, plug, MagicMock(), ["table"], lambda: None), gradients


def test_a_table_says_what_a_watch_has_seen_so_far() -> None:
    """And not for the whole of it that nothing was tried yet."""
    one, gradients = choice(has_stock=True)
    for _ in range(6):
        one.finish_step(0.0)
    reason = f"{STOCK}: steps wait 0.0% of their time for the network"
    assert gradients.explain.call_args.args == (["table"], reason)


def test_a_table_says_by_what_steps_rows_won_beside_their_price() -> None:
    one, _ = choice(has_stock=True)
    one._gradients = gradients = GradientSync("auto")
    gradients.records.named("table").reason = "zen (0.1 MB in 3.0 ms) rather than dense"
    for said in ("rows: won 3 of 3 pairs", "rows: won 5 of 9 pairs"):
        one.load_state_dict({**one.state_dict(), "standing": ROWS, "left": 9, "tests": 1, "reason": said})
        one.finish_step(0.0)
        assert gradients.records["table"].reason == f"zen (0.1 MB in 3.0 ms) rather than dense; {said}"


@pytest.mark.parametrize(("standing", "left"), [(STOCK, 500), (ROWS, 150)])
@pytest.mark.parametrize("has_stock", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_decision_is_taken_over_by_as_many_ranks_where_it_is_an_option(
    standing: str, left: int, has_stock: bool, world_size: int
) -> None:
    """A run that had stock may go on without it, as under another environment, or on other ranks."""
    before, _ = choice(has_stock=True)
    state = {**before.state_dict(), "standing": standing, "left": left, "steps": 700}
    resumed, gradients = choice(has_stock, world_size)
    resumed.load_state_dict(state)
    is_taken = world_size == 2 and (has_stock or standing == ROWS)
    assert resumed.trial.steps == (700 if is_taken else 0)
    assert resumed.trial.arm == (standing if is_taken else STOCK if has_stock else ROWS)
    assert gradients.is_stock == (resumed.trial.arm == STOCK)


def test_a_rank_of_a_group_is_named_as_in_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its number among all ranks, and not among those that train together."""
    lane = MagicMock(world_size=2, rank=1)
    lane.exchange.global_ranks = [4, 7]
    lane.submit = lambda job: MagicMock(wait=lambda: job(lane))
    lane.agree = lambda what, numbers: [[1.0], numbers]
    plug = MagicMock(spec=LeftToDdp, is_free=False)
    rows = RowsChoice(lane, MagicMock(), plug, MagicMock(), ["table"], lambda: None)
    assert not rows._may_see()
    assert "rank 7 has registered" in rows.trial.explain()
    monkeypatch.setattr(states, "gather_json", lambda exchange, what, value: ["", value])
    with pytest.raises(ThinwireError, match="rank 7: cannot write"):
        states.Gathered(lane, raising(OSError("no space left")), MagicMock()).save_files(tmp_path)
