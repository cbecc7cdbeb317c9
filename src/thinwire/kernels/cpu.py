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
from thinwire.kernels.cpu_quantize import (
    add_from_table,
    add_quantized,
    add_signs,
    largest_of_blocks,
    mean_of_blocks,
    pack_signs,
    quantize,
    round_to_powers,
)
from thinwire.kernels.cpu_rows import gather_rows, nonzero_rows, scatter_rows, sum_rows, sum_rows_at
from thinwire.kernels.cpu_select import (
    count_at_least,
    leading_magnitudes,
    magnitude_moments,
    select_at_least,
    sum_log_magnitudes,
    top_magnitudes,
)
from thinwire.kernels.cpu_union import union_places

__all__ = [
    "add_from_table",
    "add_quantized",
    "add_signs",
    "checksum",
    "count_at_least",
    "deal",
    "dealt_ids",
    "elias_fano_decode",
    "elias_fano_encode",
    "gather_rows",
    "group_by_owner",
    "hierarchical_hash",
    "largest_of_blocks",
    "leading_magnitudes",
    "magnitude_moments",
    "mean_of_blocks",
    "mix",
    "nonzero_rows",
    "owner_by_hash",
    "pack_bits",
    "pack_signs",
    "quantize",
    "round_to_powers",
    "scatter_rows",
    "select_at_least",
    "sum_log_magnitudes",
    "sum_rows",
    "sum_rows_at",
    "top_magnitudes",
    "union_places",
    "unpack_bits",
]
