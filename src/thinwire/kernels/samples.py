"""Sample calls of kernels, of every type that they support, so that calling them all compiles everything."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from thinwire.kernels.reference.floats import EQUAL

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WORKING_DTYPES = (torch.float32, torch.float64)  # dtypes in which gradients are corrected and compressed


class Sample:
    """The arguments of one call of a kernel.

    Example:
        >>> Sample(torch.tensor([3.0, 4.0]), dim=0).call(torch.norm)
        tensor(5.)
    """

    def __init__(self, *args: object, **settings: object) -> None:
        self.args, self.settings = args, settings

    def call(self, kernel: Callable[..., object]) -> object:
        """Return what ``kernel`` returns for these arguments."""
        return kernel(*self.args, **self.settings)


def once() -> Iterator[tuple[()]]:
    """Yield no inputs, once, for samples that are made of nothing."""
    yield ()


def rows() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield three rows of each dtype and word size, and two of their ids; new ones, as some kernels write to them."""
    for dtype in DTYPES:
        for width in (1, 2, 3, 4, 8):
            yield torch.ones(3, width, dtype=dtype), torch.tensor([0, 2])


def gpu_rows() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows as `rows` of usual widths, for which Triton compiles: from 32 words on, multiples of 16 are alike."""
    for dtype in (torch.float32, torch.bfloat16):
        for width in (1, 16, 32, 64, 128, 256, 512):
            yield torch.ones(3, width, dtype=dtype), torch.tensor([0, 2])


def values() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield 1000 values and steps of blocks of 8, of each working dtype."""
    for dtype in WORKING_DTYPES:
        yield torch.arange(1000, dtype=dtype), torch.ones(125, dtype=dtype)


def floats() -> Iterator[tuple[Tensor]]:
    """Yield 1000 values of each dtype."""
    for dtype in DTYPES:
        yield (torch.arange(1000).to(dtype),)


def code_of_equal(values: Tensor) -> Tensor:
    """Return the code of values that are all the first of these, fewer than fill a chunk."""
    header = torch.tensor([EQUAL | (4 + values.element_size()) << 8], dtype=torch.int32)
    return torch.cat([header.view(torch.uint8), values[:1].view(torch.uint8)])


def ids() -> Tensor:
    """Return three ids below 5."""
    return torch.tensor([0, 3, 4])


def codes(bits: int = 8) -> Tensor:
    """Return the codes of 1000 values, of ``bits`` bits each."""
    return torch.zeros(125 * bits, dtype=torch.uint8)
