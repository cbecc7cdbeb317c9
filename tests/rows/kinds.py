"""Values of every kind, in each dtype of floats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.rows.floats import CHUNK_VALUES

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIZES = (0, 1, 2, 7, 100, 1023, 1024, 1025, 4097, CHUNK_VALUES - 1, CHUNK_VALUES, CHUNK_VALUES + 1)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bytes_of(values: Tensor) -> Tensor:
    return values.reshape(-1).view(torch.uint8)


def kinds(size: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Values of every kind that the code treats in its own way."""
    normal = torch.randn(size, generator=generator)
    bits = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    rare = torch.rand(size, generator=generator)
    smallest = torch.finfo(dtype).smallest_normal
    made = {
        "normal": normal,
        "as a bfloat16 computation gives": normal.bfloat16(),
        "sums of 8": sum(torch.randn(8, size, generator=generator).bfloat16().float()),
        "some low bits": torch.where(rare < 0.02, normal, normal.bfloat16().float()),
        "wide": normal * torch.randn(size, generator=generator).mul(20).exp2(),
        "zeros": torch.zeros(size),
        "negative zeros": -torch.zeros(size),
        "one of another kind": torch.arange(size) == size // 2,
        "mostly zeros": normal * (rare < 0.3),
        "steps": normal.round(),
        "sorted": normal.sort().values,
        "constant": torch.full((size,), 1.1),
        "nan": torch.where(rare < 0.01, float("nan"), normal),
        "infinite": torch.where(rare < 0.01, float("-inf"), normal),
    }
    cast = {name: values.to(dtype) for name, values in made.items()}
    return cast | {"random bits": bits, "subnormal": (normal.double() * smallest / 16).to(dtype)}
