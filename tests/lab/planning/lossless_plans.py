"""Measurements with lossless codes."""

from __future__ import annotations

from measured import dense_code
from thinwire import fuse
from thinwire.plan.policy import Policy

POLICIES: tuple[Policy, ...] = (fuse.cupcake(), fuse.one_bucket())
AUTOCAST, PLAIN = dense_code(), dense_code(27.2, 27.6)
