"""Rows of sparse gradients: the value that moves through all exact schemes, its partition, formats and codes."""

from typing import Literal

SchemeName = Literal[
    "auto", "dense", "agsparse", "agsparse_coded", "sparse_ps", "balanced_parallelism", "zen", "column_split",
    "union_split", "zen_elements", "omnireduce", "omnireduce_contiguous", "dense_ps", "dense_ring",
    "dense_halving_doubling", "agsparse_ring", "agsparse_hierarchy", "sparcml", "sparcml_dense", "sparcml_split",
    "sparcml_split_dense", "sparcml_coded", "hierarchical_centralization", "two_level:agsparse",
    "two_level:agsparse_coded", "two_level:sparse_ps", "two_level:balanced_parallelism", "two_level:zen",
    "two_level:column_split", "two_level:union_split", "two_level:zen_elements", "two_level:omnireduce",
    "two_level:omnireduce_contiguous", "two_level:dense_ps", "two_level:dense_ring", "two_level:dense_halving_doubling",
    "two_level:agsparse_ring", "two_level:agsparse_hierarchy", "two_level:sparcml", "two_level:sparcml_dense",
    "two_level:sparcml_split", "two_level:sparcml_split_dense", "two_level:sparcml_coded",
    "two_level:hierarchical_centralization",
]  # fmt: skip
"""The names of schemes, for type checkers and editors: those of `NAMED`, "auto", and two levels around them."""
