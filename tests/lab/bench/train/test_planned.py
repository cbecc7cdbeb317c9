"""Methods from plans."""

from __future__ import annotations

from thinwire.lab.bench.train.methods import (
    method_of_plan,
)
from thinwire.plan.plan import STOCK, Group, Plan


def test_a_plan_to_do_nothing_is_stock_ddp() -> None:
    groups = (Group(("fc.weight",), 4096),)
    nothing, other = (Plan(2, "", groups, 1.0, 1.0, choice=choice) for choice in (STOCK, "exact, cupcake"))
    assert not method_of_plan(nothing).is_plain
    assert method_of_plan(other).is_plain
