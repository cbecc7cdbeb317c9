"""Ranks that compress."""

from __future__ import annotations

from thinwire.compress.base import Parameter

PARAMETERS = (Parameter("a.weight", (40, 30)), Parameter("b.weight", (64, 33)), Parameter("b.bias", (64,)))
