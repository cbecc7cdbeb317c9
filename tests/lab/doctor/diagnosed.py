"""Models and links that are diagnosed."""

from __future__ import annotations

from typing import Any

from measured import measurement, table
from thinwire import fuse
from thinwire.lab.doctor.diagnosis import (
    Diagnosis,
    diagnose,
)
from thinwire.plan.policy import Policy

TOP_K = "top_k:density=0.01"
POLICIES: tuple[Policy, ...] = (fuse.cupcake(), fuse.one_bucket())


def with_tables(mbit: float, **changes: Any) -> Diagnosis:
    tables = [table(world_size=4), table("items.weight", 4, num_rows=100_000, held=(50.0,) * 4, union=180.0)]
    measured = measurement(mbit, world_size=4, tables=tables, **changes)
    return diagnose("a test", measured, [TOP_K, "bf16"], POLICIES, with_plan=False)
