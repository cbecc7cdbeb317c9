"""What quantizers send of a gradient."""

from __future__ import annotations

from torch import Tensor

from thinwire.compress.base import (
    Compressor,
    Parameter,
    Payload,
    State,
)
from thinwire.compress.reductions.base import salted
from thinwire.compress.wrappers import packed_code


def state_of(compressor: Compressor, parameter: Parameter, rank: int = 0) -> State:
    return salted(compressor.init(parameter), rank)


def arrived(compressor: Compressor, payload: Payload, parameter: Parameter) -> Tensor:
    code = packed_code(compressor)
    return code.decompress(code.unpack(code.pack(payload, parameter), parameter), parameter)


def sent(compressor: Compressor, gradient: Tensor, state: State | None = None) -> Tensor:
    parameter = Parameter("weight", tuple(gradient.shape), gradient.dtype)
    state = state_of(compressor, parameter) if state is None else state
    return arrived(compressor, compressor.compress(gradient, parameter, state), parameter)
