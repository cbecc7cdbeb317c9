"""Which gradients travel together: each constructor returns a `Policy`, a function from a profile to groups."""

from thinwire.fuse.byte_cap import byte_cap
from thinwire.fuse.cupcake import cupcake
from thinwire.fuse.equal_count import equal_count
from thinwire.fuse.layerwise import layerwise
from thinwire.fuse.mg_wfbp import mg_wfbp
from thinwire.fuse.named import parse
from thinwire.fuse.omgs import omgs
from thinwire.fuse.one_bucket import one_bucket
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
