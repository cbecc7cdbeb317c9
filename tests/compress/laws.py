"""Gradients of every kind, and what arrives of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload, State, Summable
from thinwire.compress.wrappers import code_of, unwrapped

PARAMETER = Parameter("weight", (24, 32))
TINY = 2.0**-126
KINDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "zeros": lambda generator: torch.zeros(768),
    "all equal": lambda generator: torch.full((768,), -0.3),
    "two magnitudes": lambda generator: (torch.rand(768, generator=generator) < 0.5).float() + 1.0,
    "denormal": lambda generator: TINY * (torch.rand(768, generator=generator) - 0.5),
    "denormal, all equal": lambda generator: torch.full((768,), 2.0**-149),
    "few": lambda generator: torch.zeros(768).index_fill_(0, torch.randint(768, (3,), generator=generator), 2.0),
    "an outlier": lambda generator: torch.randn(768, generator=generator).index_fill_(0, torch.tensor([99]), 1e36),
    "all scales": lambda generator: torch.randn(768, generator=generator) * 10.0 ** torch.linspace(-44, 36, 768),
    "normal": lambda generator: torch.randn(768, generator=generator),
}


def made(kind: str, seed: int) -> Tensor:
    return KINDS[kind](torch.Generator().manual_seed(seed)).view(PARAMETER.shape)


def arrived(compressor: Compressor, payload: Payload, state: State) -> Tensor:
    """What a rank that is alone gets back, through the bytes where payloads have any."""
    code, (_, inside) = code_of(compressor), unwrapped(compressor, state)
    if isinstance(code, Summable):
        following: Payload | None = payload
        while following is not None:
            payload, following = following, code.next_round(following, PARAMETER, inside)
        mean = code.reconstruct(payload, PARAMETER, inside)
    else:
        mean = code.decompress(code.unpack(code.pack(payload, PARAMETER), PARAMETER), PARAMETER)
    compressor.finish(mean, PARAMETER, state)
    return mean
