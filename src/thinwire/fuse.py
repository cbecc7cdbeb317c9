"""Fusion policies: each constructor returns a `Policy`, a function from a profile to groups of gradients."""

from thinwire.plan.policy import (
    Policy,
    byte_cap,
    cupcake,
    equal_count,
    layerwise,
    mg_wfbp,
    omgs,
    one_bucket,
    parse,
    safusion,
)

__all__ = [
    "Policy",
    "byte_cap",
    "cupcake",
    "equal_count",
    "layerwise",
    "mg_wfbp",
    "omgs",
    "one_bucket",
    "parse",
    "safusion",
]
