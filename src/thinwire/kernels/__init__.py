"""The hot loops. `reference` is the definition of correct; `dispatch` takes the compiled twin where that is faster."""

from thinwire.kernels.blocks import gather_blocks, nonzero_blocks
from thinwire.kernels.dispatch import (
    checksum,
    deal,
    dealt_ids,
    elias_fano_decode,
    elias_fano_encode,
    gather_rows,
    group_by_owner,
    hierarchical_hash,
    mix,
    nonzero_rows,
    owner_by_hash,
    pack_bits,
    scatter_rows,
    sum_rows,
    sum_rows_at,
    union_places,
    unpack_bits,
    using,
)
from thinwire.kernels.reference_codes import elias_fano_bytes
from thinwire.kernels.warm import warm_up

__all__ = [
    "checksum",
    "deal",
    "dealt_ids",
    "elias_fano_bytes",
    "elias_fano_decode",
    "elias_fano_encode",
    "gather_blocks",
    "gather_rows",
    "group_by_owner",
    "hierarchical_hash",
    "mix",
    "nonzero_blocks",
    "nonzero_rows",
    "owner_by_hash",
    "pack_bits",
    "scatter_rows",
    "sum_rows",
    "sum_rows_at",
    "union_places",
    "unpack_bits",
    "using",
    "warm_up",
]
