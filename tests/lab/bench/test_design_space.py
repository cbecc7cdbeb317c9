"""All points of the design space."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

from thinwire import schemes
from thinwire.lab.bench.design_space import label, points
from thinwire.schemes import Aggregation, Balance, Communication, Format, Ownership, Partitioning, Scheme, Unit


def test_every_combination_is_a_point_or_refused_with_a_reason_and_a_way_out() -> None:
    """The reason comes before a colon, and what to do instead behind it."""
    legal, reasons = set(), set()
    for values in product(
        Communication, Aggregation, Partitioning, (None, *Balance), (None, *Ownership), Unit, (None, *Communication)
    ):
        *dimensions, unit, pull_communication = values
        dense = (Format.DENSE,)
        push = dense if values[0] is Communication.NATIVE else tuple(Format)
        pull = dense if dimensions[-1] in (Ownership.COLUMNS, Ownership.UNION) else push
        try:
            legal.add(Scheme(*dimensions, push, pull, unit=unit, pull_communication=pull_communication))
        except ValueError as error:
            reasons.add(str(error))
    assert legal == set(points())
    assert len(reasons) >= 12
    for reason in reasons:
        assert re.fullmatch(r"[^:;]{15,}[:;] .{8,}", reason), reason


def test_points_are_in_a_fixed_order_and_have_different_labels() -> None:
    assert points() == points()
    assert len({label(point) for point in points()}) == len(points())
    assert {name for name in map(label, points()) if "/" not in name} == {"dense", "zen", "column_split", "union_split"}
    assert label(replace(schemes.ZEN, communication="ring")) == "ring/incremental/parallelism/permutation/rows"
    assert label(schemes.HIERARCHICAL_CENTRALIZATION) == "sparcml"
