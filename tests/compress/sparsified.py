"""What sparsifiers send of a gradient."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload, State


def gradient_of(parameter: Parameter) -> Tensor:
    return torch.randn(parameter.shape, dtype=parameter.working_dtype)


def sent_by(compressor: Compressor, gradient: Tensor, parameter: Parameter, state: State | None = None) -> Payload:
    return compressor.compress(gradient, parameter, compressor.init(parameter) if state is None else state)


def saved_and_loaded(state: State) -> State:
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)
