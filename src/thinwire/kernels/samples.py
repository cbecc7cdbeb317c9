"""Calls to try a kernel with: of every type that it takes, so that calling them all compiles all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WORKING_DTYPES = (torch.float32, torch.float64)  # in which gradients are corrected and compressed


class Sample:
    """The arguments of one call.

    Example:
        >>> Sample(torch.tensor([3.0, 4.0]), dim=0).call(torch.norm)
        tensor(5.)
    """

    def __init__(self, *args: object, **settings: object) -> None:
        self.args, self.settings = args, settings

    def call(self, kernel: Callable[..., object]) -> object:
        """What ``kernel`` returns for these arguments."""
        return kernel(*self.args, **self.settings)


Samples = Callable[[], Iterator[Sample]]
"""Makes the samples of a kernel, new ones at each call: some kernels write to their arguments."""


def each(*make: Callable[[], Sample]) -> Samples:
    """These samples."""
    return lambda: (made() for made in make)


def of_rows(make: Callable[[Tensor, Tensor], Sample]) -> Samples:
    """One for rows of each dtype and word size, and two ids of them."""
    return lambda: (
        make(torch.ones(3, width, dtype=dtype), torch.tensor([0, 2])) for dtype in DTYPES for width in (1, 2, 3, 4, 8)
    )


def of_values(*make: Callable[[Tensor, Tensor], Sample]) -> Samples:
    """These for 1000 values and the steps of blocks of 8, of each dtype that compressors work in."""
    return lambda: (
        made(torch.arange(1000, dtype=dtype), torch.ones(125, dtype=dtype)) for dtype in WORKING_DTYPES for made in make
    )


def ids() -> Tensor:
    """Three ids below 5."""
    return torch.tensor([0, 3, 4])


def codes(bits: int = 8) -> Tensor:
    """Of 1000 values, so many bits each."""
    return torch.zeros(125 * bits, dtype=torch.uint8)
