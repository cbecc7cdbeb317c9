"""Measurements that nobody measured, in round numbers, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire import fuse
from thinwire.compress.base import Parameter
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import Option
from thinwire.lab.planning.speeds import COPIES, Codec, DenseCode, Fit, MeasuredLink
from thinwire.lab.planning.tables import EmbeddingTable
from thinwire.plan.plan import Group
from thinwire.plan.policy import Policy
from thinwire.plan.profile import Linear
from thinwire.tune.lossless import Code

SHAPES = ((64, 64), (64,), (256, 512), (512,), (1024, 512), (512,), (512, 300), (300,))
"""In backward order: 3.2 MB, of which the vectors are not compressed."""


def link(mbit: float, alpha: float = 1e-3) -> MeasuredLink:
    """Every collective takes alpha and the wire."""
    line = Linear(alpha, 8e-6 / mbit)
    return MeasuredLink(line, Linear(alpha, 0.0), Fit(line), Fit(line), Fit(line), (1e-4, *[1e-9] * 6))


def codec(compressor: str, exchange: str, alpha: float = 1e-5, beta: float = 1e-10) -> Codec:
    fit = Fit(Linear(alpha, beta))
    return Codec(compressor, exchange, fit, fit)


def dense_code(
    push_bits: float = 11.5, pull_bits: float = 17.5, byte_seconds: float = 5e-10, cores: float = 1.0
) -> DenseCode:
    """The code of gradients under 16-bit autocast by default, all work on a byte at one speed."""
    return DenseCode(torch.float32, Code(push_bits, pull_bits, *[byte_seconds] * 4), cores)


AUTOCAST, PLAIN = dense_code(), dense_code(27.2, 27.6)
POLICIES: tuple[Policy, ...] = (fuse.cupcake(), fuse.one_bucket())
"""By which gradients are grouped where these codes are priced."""


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"layer{place}.weight", shape) for place, shape in enumerate(shapes))


def option(
    name: str, seconds: float, compressor: str | None = None, exchange: str = "all_reduce", **settings: Any
) -> Option:
    """An option that sends a gradient of 16 KiB."""
    return Option(name, (Group(("layer0.weight",), 16384, compressor, exchange),), seconds, **settings)


def table(name: str = "words.weight", world_size: int = 8, **changes: Any) -> EmbeddingTable:
    """A dense table of 12.8 MB of which each rank touches 200 rows, ready when the other gradients are."""
    fields = {"num_rows": 50_000, "width": 64, "dtype": torch.float32, "is_sparse": False,
              "held": (200.0,) * world_size, "union": 1200.0, "ready_seconds": 0.08}  # fmt: skip
    return EmbeddingTable(name, **(fields | changes))


def measurement(
    mbit: float = 100.0,
    *,
    world_size: int = 8,
    backward_seconds: float = 0.01,
    codecs: Sequence[Codec] = (codec("top_k:density=0.01", "all_gather"), codec("bf16", "all_reduce")),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    alpha: float = 1e-3,
    tables: Sequence[EmbeddingTable] = (),
    dense_codes: Sequence[DenseCode] = (),
) -> Measurement:
    """Each gradient takes ``backward_seconds``; copies cost next to nothing."""
    return Measurement(
        world_size=world_size,
        tables=tables,
        dense_codes=tuple(dense_codes),
        parameters=parameters(shapes),
        backward_seconds=(backward_seconds,) * len(shapes),
        forward_seconds=0.02,
        rest_seconds=0.01,
        link=link(mbit, alpha),
        codecs=(codec(COPIES, "all_reduce", 1e-6, 1e-12), *codecs),
        hosts=world_size,
        created="2026-01-02T03:04:05+00:00",
    )
