"""Lines to paste."""

from __future__ import annotations

from dataclasses import replace

from measured import AUTOCAST, POLICIES, measurement
from thinwire.lab.doctor.advice import advice_of, lines_of
from thinwire.lab.doctor.diagnosis import describe, diagnose
from thinwire.lab.planning.measurement import DdpSite
from thinwire.lab.planning.planner import price_options
from thinwire.plan.plan import LOSSLESS


def test_the_line_is_in_the_form_of_the_script() -> None:
    site = DdpSite((measurement().names,), "train.py", 7, "ddp", "DDP(net)", follows_plans=True)
    measured = replace(measurement(100, dense_codes=[AUTOCAST]), ddp=site)
    found = diagnose("", measured, (), POLICIES, with_plan=False)
    assert lines_of(found.advice, site)[-1] == 'sync = thinwire.attach(ddp, dense="lossless")'
    assert "after line 7 of train.py" in describe(found)


def test_the_advice_of_a_way_with_a_plan_follows_the_plan() -> None:
    measured = measurement(100, dense_codes=[AUTOCAST])
    found = price_options(measured, (), POLICIES)
    for way in found:
        if way.is_lossless and not way.is_plain:
            advice = advice_of(way, measured, found)
            assert advice.plan is not None
            assert {group.dense for group in advice.plan.groups} == {LOSSLESS}
