"""Ids and values to code."""

from __future__ import annotations

from thinwire.compress.papers.deep_reduce.indices import LOSSLESS, Auto

EXACT = [codec.name for codec in (*LOSSLESS, Auto())]
BLOOM = ["bloom:p0", "bloom:p1", "bloom:p2", "bloom:p0:0.3", "bloom:p2:0.05"]
