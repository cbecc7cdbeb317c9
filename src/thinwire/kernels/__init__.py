"""The hot loops. `reference` is the definition of correct: plain torch and numpy, no compilation."""

from thinwire.kernels.reference import (
    checksum,
    elias_fano_bytes,
    elias_fano_decode,
    elias_fano_encode,
    hierarchical_hash,
    mix,
    nonzero_rows,
    owner_by_hash,
    pack_bits,
    sum_rows,
    sum_rows_at,
    unpack_bits,
)

__all__ = [
    "checksum",
    "elias_fano_bytes",
    "elias_fano_decode",
    "elias_fano_encode",
    "hierarchical_hash",
    "mix",
    "nonzero_rows",
    "owner_by_hash",
    "pack_bits",
    "sum_rows",
    "sum_rows_at",
    "unpack_bits",
]
