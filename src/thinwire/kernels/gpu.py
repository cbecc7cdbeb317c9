"""All kernels for a GPU, by the names of their twins. Importing this imports Triton; `dispatch` does.

The names that end in ``_into`` and ``_on_device`` never wait for the device. Of them only `nonzero_rows_into` has a
twin.
"""

from thinwire.kernels.gpu_bits import pack_bits, unpack_bits, unpack_bits_into
from thinwire.kernels.gpu_codes import checksum, checksum_on_device, elias_fano_decode, elias_fano_encode
from thinwire.kernels.gpu_find import nonzero_blocks, nonzero_rows, nonzero_rows_into
from thinwire.kernels.gpu_hash import hierarchical_hash
from thinwire.kernels.gpu_ids import deal, deal_into, dealt_ids, group_by_owner, mix, owner_by_hash
from thinwire.kernels.gpu_rows import gather_payload, gather_rows, scatter_rows, sum_rows, sum_rows_at
from thinwire.kernels.gpu_union import union_places, union_places_into

__all__ = [
    "checksum",
    "checksum_on_device",
    "deal",
    "deal_into",
    "dealt_ids",
    "elias_fano_decode",
    "elias_fano_encode",
    "gather_payload",
    "gather_rows",
    "group_by_owner",
    "hierarchical_hash",
    "mix",
    "nonzero_blocks",
    "nonzero_rows",
    "nonzero_rows_into",
    "owner_by_hash",
    "pack_bits",
    "scatter_rows",
    "sum_rows",
    "sum_rows_at",
    "union_places",
    "union_places_into",
    "unpack_bits",
    "unpack_bits_into",
]
