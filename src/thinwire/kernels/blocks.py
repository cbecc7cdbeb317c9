"""Blocks of consecutive elements, as OmniReduce sends them (section 3): rows of the flattened tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.registry import gather_rows, nonzero_rows

BLOCK_ELEMENTS = 256


def nonzero_blocks(flat: Tensor, block_elements: int = BLOCK_ELEMENTS) -> Tensor:
    """Return the ids of the blocks of ``flat`` [n] with any non-zero bit, sorted int64 [k]; the last may be shorter.

    Example:
        >>> nonzero_blocks(torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0]), block_elements=2)
        tensor([1, 2])
    """
    whole, rest = _cut(flat, block_elements)
    blocks = nonzero_rows(whole)
    if nonzero_rows(rest.view(-1, 1)).numel():
        return torch.cat([blocks, torch.tensor([whole.shape[0]])])
    return blocks


def gather_blocks(flat: Tensor, blocks: Tensor, block_elements: int = BLOCK_ELEMENTS) -> Tensor:
    """Gather the increasing ``blocks`` int64 [k] of ``flat`` [n] into [k, block_elements], padded with zeros."""
    whole, rest = _cut(flat, block_elements)
    gathered = flat.new_empty(blocks.numel(), block_elements)
    with_rest = bool(rest.numel() and blocks.numel() and blocks[-1] == whole.shape[0])
    count = blocks.numel() - with_rest
    gather_rows(whole, blocks[:count], gathered[:count])
    if with_rest:
        gathered[count, : rest.numel()] = rest
        gathered[count, rest.numel() :] = 0
    return gathered


def _cut(flat: Tensor, block_elements: int) -> tuple[Tensor, Tensor]:
    end = flat.numel() // block_elements * block_elements
    return flat[:end].view(-1, block_elements), flat[end:]
