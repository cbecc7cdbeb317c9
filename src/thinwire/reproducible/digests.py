"""Digests: of models, of gradients, and of how a machine computes."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_BYTES = 16


def digest(model: nn.Module) -> str:
    """Return a digest of the bits of all parameters and buffers, of their names, shapes and dtypes.

    Example:
        >>> import torch
        >>> torch.manual_seed(0) and digest(torch.nn.Linear(2, 2)) == digest(torch.nn.Linear(2, 2))
        False
    """
    return of_tensors([*model.named_parameters(), *model.named_buffers()])


def of_tensors(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return a digest of tensors, dense or sparse, or None, with their names."""
    found = hashlib.blake2b(digest_size=_BYTES)
    for name, tensor in named:
        found.update(f"{name} {None if tensor is None else (tuple(tensor.shape), tensor.dtype)}\n".encode())
        if tensor is not None:
            whole = tensor.detach()
            parts = [whole.coalesce().indices(), whole.coalesce().values()] if whole.is_sparse else [whole]
            for part in parts:
                found.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def of_state(state: object) -> str:
    """Return a digest of the state of an optimizer: dicts and lists of tensors, numbers and texts."""
    found = hashlib.blake2b(digest_size=_BYTES)

    def update(value: object) -> None:
        if isinstance(value, Tensor):
            found.update(of_tensors([("", value)]).encode())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                found.update(f"{key}:".encode())
                update(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                update(one)
        else:
            found.update(f"{value!r},".encode())

    update(state)
    return found.hexdigest()


def of_arithmetic(device: torch.device) -> str:
    """Return a digest of what this machine computes of fixed numbers, the kinds of products and functions that models
    are made of: other processors and other numbers of threads round differently."""
    numbers = torch.arange(1, 96 * 160 + 1, dtype=torch.float64).mul(0.6180339887).frac().sub(0.5).float()
    found: list[tuple[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = numbers.view(96, 160).to(device, dtype)
        images = numbers.view(4, 6, 20, 32).to(device, dtype)
        heads = numbers.view(2, 4, 60, 32).to(device, dtype)
        found += [
            ("product", matrix @ matrix.T),
            ("row times matrix", matrix[0] @ matrix.T),
            ("convolution", nn.functional.conv2d(images, images[:, :, :3, :3])),
            ("attention", nn.functional.scaled_dot_product_attention(heads, heads, heads)),
            ("softmax", matrix.softmax(1)),
            ("gelu", nn.functional.gelu(matrix)),
            ("norm", nn.functional.layer_norm(matrix, (160,))),
            ("sum", matrix.sum(0)),
        ]
    found += [("functions", torch.stack([numbers.exp(), numbers.tanh(), numbers.sin(), numbers.abs().log()]))]
    return of_tensors(found)
