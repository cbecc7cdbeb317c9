"""The format of codes of floats, and what runs until a compiled twin does, and without one: values as they are.

docs/reference/wire-format.md ("Floats") describes the codes. To make them in numpy took 300 times as long as compiled,
which no network makes up for. So values are their own code then, which every rank reads.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK_VALUES = 1 << 15
SEGMENT_VALUES = 1 << 10
SAMPLED_VALUES, SAMPLED_RUN = 1 << 12, 16
RAW, EQUAL, FIXED, FIXED_LOW, VARIABLE = range(5)
ESTIMATED_CHUNKS, ESTIMATED_VALUES = 32, 1 << 14
OVERHEAD = 1 / 16  # bits of a value for headers and sizes of streams, and since a code fits its own sample best
LOG2 = np.round(np.log2(np.maximum(np.arange(SAMPLED_VALUES + 1), 1)) * 256).astype(np.int64)


class FloatLayout(NamedTuple):
    """How many bits of a word, an unsigned integer of ``word``, are exponent and mantissa."""

    word: str
    exponent: int
    mantissa: int


LAYOUTS = {
    torch.bfloat16: FloatLayout("<u2", 8, 7),
    torch.float16: FloatLayout("<u2", 5, 10),
    torch.float32: FloatLayout("<u4", 8, 23),
    torch.float64: FloatLayout("<u8", 11, 52),
}


def words_of(values: Tensor) -> tuple[np.ndarray, FloatLayout]:
    """Return the words of contiguous values, which share their memory, and their layout."""
    layout = LAYOUTS[values.dtype]
    known = values.view(torch.int16) if values.dtype == torch.bfloat16 else values  # to numpy
    return known.detach().numpy().reshape(-1).view(layout.word), layout


def encode_floats(values: Tensor) -> Tensor:
    """Return the code of contiguous float16, bfloat16, float32 or float64 values, uint8 [k], k <= their bytes.

    Of k equal to their bytes it is the values themselves, whose memory it may share, as it always is here.
    """
    return values.detach().reshape(-1).view(torch.uint8)


def decode_floats(message: Tensor, out: Tensor) -> bool:
    """Fill contiguous ``out`` from the code of as many values; return False, with ``out`` undefined, if it is none.

    Here only values themselves are known.
    """
    if message.numel() == out.nbytes:
        encode_floats(out).copy_(message)
    return message.numel() == out.nbytes


def estimate_floats(values: Tensor) -> float:
    """Return about how many bits of a value the code of `encode_floats` has, from a sample."""
    return 8.0 * values.element_size() if values.numel() else 0.0
