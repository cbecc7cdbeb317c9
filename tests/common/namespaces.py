"""Marks for tests on emulated hosts: skipped, with the reason, where this process may not make network namespaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from thinwire.lab.testbed.network import NetAdminError, require_net_admin

Test = TypeVar("Test", bound=Callable[..., object])


def _refusal() -> str:
    """Why this process may not make namespaces; empty if it may."""
    try:
        require_net_admin()
    except NetAdminError as error:
        return str(error)
    return ""


_REFUSAL = _refusal()
NEEDS_NAMESPACES = [pytest.mark.net, pytest.mark.skipif(bool(_REFUSAL), reason=_REFUSAL or "allowed")]


def needs_namespaces(test: Test) -> Test:
    """Decorates one test with `NEEDS_NAMESPACES`."""
    for mark in NEEDS_NAMESPACES:
        test = mark(test)
    return test
