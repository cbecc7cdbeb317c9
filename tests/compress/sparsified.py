"""What sparsifiers send of a gradient."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire import compress
from thinwire.compress.base import Compressor, Parameter, Payload, State
from thinwire.compress.methods.sparsify import DensitySelector
from thinwire.compress.papers.thresholds import SampledTopK

METHODS: dict[str, Callable[..., DensitySelector]] = {
    "top_k": compress.top_k,
    "random_k": compress.random_k,
    "gaussian_k": compress.gaussian_k,
    "redsync": compress.redsync,
    "sidco_exponential": compress.sidco,
    "sidco_gamma": lambda density, **more: compress.sidco(density, distribution="gamma", **more),
    "sidco_pareto": lambda density, **more: compress.sidco(density, distribution="pareto", **more),
    "ms_top_k": compress.ms_top_k,
    "sampled_top_k": lambda density, **more: SampledTopK(density, **more),
}


def gradient_of(parameter: Parameter) -> Tensor:
    return torch.randn(parameter.shape, dtype=parameter.working_dtype)


def sent_by(compressor: Compressor, gradient: Tensor, parameter: Parameter, state: State | None = None) -> Payload:
    return compressor.compress(gradient, parameter, compressor.init(parameter) if state is None else state)


def saved_and_loaded(state: State) -> State:
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)
