"""Rows of ranks, with what schemes send of them."""

from __future__ import annotations

import pytest

from thinwire import schemes

named = pytest.mark.parametrize("scheme", schemes.NAMED.values(), ids=schemes.NAMED.keys())
