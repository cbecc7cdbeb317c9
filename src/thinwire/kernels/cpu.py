"""All kernels that numba compiles, by the names of their twins. Importing this imports numba; `dispatch` does."""

from thinwire.kernels.cpu_codes import checksum, elias_fano_decode, elias_fano_encode, pack_bits, unpack_bits
from thinwire.kernels.cpu_ids import (
    deal,
    dealt_ids,
    group_by_owner,
    hierarchical_hash,
    mix,
    owner_by_hash,
)
from thinwire.kernels.cpu_rows import gather_rows, nonzero_rows, scatter_rows, sum_rows, sum_rows_at
from thinwire.kernels.cpu_union import union_places

__all__ = [
    "checksum",
    "deal",
    "dealt_ids",
    "elias_fano_decode",
    "elias_fano_encode",
    "gather_rows",
    "group_by_owner",
    "hierarchical_hash",
    "mix",
    "nonzero_rows",
    "owner_by_hash",
    "pack_bits",
    "scatter_rows",
    "sum_rows",
    "sum_rows_at",
    "union_places",
    "unpack_bits",
]
