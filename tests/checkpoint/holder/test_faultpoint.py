"""Points that faults strike at: each is in the code, and reaching one does nothing but what was planned for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire
from injected import Fault, Faults, InjectedFault
from thinwire.checkpoint.holder import faultpoint

SOURCE = Path(thinwire.__file__).parent


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faultpoint.arm(None)


def calls(name: str) -> Iterator[ast.Call]:
    for path in (path for room in ("checkpoint", "holder") for path in (SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield node


def test_every_point_is_in_the_code_and_every_one_there_has_a_name() -> None:
    assert {ast.literal_eval(call.args[0]) for call in calls("reach")} == set(faultpoint.POINTS)


def test_a_point_calls_who_was_armed_and_nobody_else() -> None:
    struck: list[tuple[str, int, int]] = []
    faultpoint.reach("send", 1, 2)
    faultpoint.arm(lambda *point: struck.append(point))
    faultpoint.reach("send", 1, 2)
    faultpoint.reach("load")
    faultpoint.arm(None)
    faultpoint.reach("send", 3, 4)
    assert struck == [("send", 1, 2), ("load", -1, -1)]


def test_a_fault_strikes_at_its_point_only() -> None:
    faults = Faults().fail(rank=1, step=2, at="header").pause(rank=0, step=1, seconds=0.0, at="send")
    assert faults.planned == (Fault("fail", 1, 2, at="header"), Fault("pause", 0, 1, 0.0, "send"))
    for rank, step, at in ((1, 2, ""), (1, 2, "sealed"), (0, 2, "header"), (1, 1, "header"), (0, 1, "send")):
        faults.strike(rank, step, at)
    with pytest.raises(InjectedFault):
        faults.strike(1, 2, at="header")


def test_nothing_depends_on_the_wall_clock() -> None:
    """Clocks of hosts differ, and jump: whatever is waited for or compared is so by a monotonic one."""
    for path in (path for room in ("checkpoint", "holder") for path in (SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("time", "time"), ("time", "time_ns"), ("datetime", "now")}
