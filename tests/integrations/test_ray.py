"""Workers of Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

Run = Callable[..., dict[str, Any]]


def test_ray(python: Run) -> None:
    found = python("tests/integrations/scripts/outer_ray.py")
    first, second = found["whole"]
    assert first != second
    assert found["resumed"] == found["whole"]
