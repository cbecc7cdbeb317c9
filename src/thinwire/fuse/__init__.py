"""Fusion policies: each constructor returns a `Policy`, a function from a profile to groups of gradients."""

from thinwire.fuse.buckets import byte_cap, equal_count, layerwise, mg_wfbp, omgs, one_bucket
from thinwire.fuse.cupcake import cupcake
from thinwire.fuse.named import parse
from thinwire.fuse.policy import Policy
from thinwire.fuse.safusion import safusion

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
