"""Lines to paste."""

from __future__ import annotations

from dataclasses import replace

import pytest

from measured import AUTOCAST, POLICIES, measurement
from tests.lab.doctor.diagnosed import TOP_K
from thinwire.lab.doctor.advice import Advice, advice_of, lines_of, where_to_paste
from thinwire.lab.doctor.diagnosis import describe, diagnose
from thinwire.lab.planning.measurement import DdpSite
from thinwire.lab.planning.planner import price_options
from thinwire.plan.plan import LOSSLESS, Plan


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


SITE = DdpSite((measurement().names,), "train.py", 7, "ddp", "DDP(net)", follows_plans=True)


BEFORE = "`sc` is the script's GradScaler, which has to be built before"


def lossy_plan() -> Plan:
    measured = replace(measurement(20), ddp=SITE)
    found = price_options(measured, [TOP_K], POLICIES)
    way = next(way for way in found if not way.is_exact and not way.is_plain)
    plan = advice_of(way, measured, found).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("has_plan", [False, True])
def test_the_scaler_of_the_script_is_passed_to_what_compresses(has_plan: bool) -> None:
    advice = Advice("", lossy_plan() if has_plan else TOP_K)
    dense = "plan" if has_plan else "thinwire.compress.top_k(density=0.01)"
    start = ("in place of" if has_plan else "after") + " line 7 of train.py, `ddp = DDP(net)`"
    line = f"sync = thinwire.attach(ddp, dense={dense}"
    for scaler, passed, where in (("", ")", ""), ("sc", ", grad_scaler=sc)", f", where {BEFORE}")):
        site = replace(SITE, scaler=scaler)
        assert lines_of(advice, site)[-1] == line + passed
        assert where_to_paste(advice, site) == start + where
        for exact in ("auto", "lossless"):
            assert "scaler" not in lines_of(Advice("", exact), site)[-1] + where_to_paste(Advice("", exact), site)
    unnamed = replace(SITE, target="", call="", scaler="sc")
    where = where_to_paste(Advice("", TOP_K), unnamed)
    assert where.endswith(f"line 7 of train.py, where `model` is the DistributedDataParallel and {BEFORE}")
