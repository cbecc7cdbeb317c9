"""Digests of what ranks hold, to see whether it is the same."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of tensors, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
