"""Compressed gradients: each constructor returns a `Compressor`, a frozen description of a method and its settings.

To write a compressor of your own, derive a frozen dataclass from one of these types:

`Packed`
    payloads travel as bytes, and every rank decodes all of them: give ``name``, ``part_specs``, ``compress`` and
    ``decompress``
`Summable`
    payloads can be added part by part, inside an all-reduce (cf. PowerSGD): the same four; ``next_round`` and
    ``reconstruct`` if it takes several rounds

``part_specs`` lists the parts of a `Payload` as `PartSpec`, dtype and number of elements. A `Parameter` is what all
ranks know of a gradient, a `State` is the memory of one parameter, and `Memory` says who keeps what is not sent: by
default `attach` adds error feedback. `Wrapper` changes what another compressor gets. For example, a sign with one scale
(`thinwire.attach(model, dense=ScaledSign())`)::

    @dataclass(frozen=True)
    class ScaledSign(Packed):
        name = "scaled_sign_of_mine"

        def part_specs(self, parameter):
            return PartSpec(torch.int8, parameter.numel), PartSpec(torch.float32, 1)

        def compress(self, gradient, parameter, state):
            scale = gradient.abs().mean().float().reshape(1)
            return Payload((gradient.sign().to(torch.int8).flatten(), scale))

        def decompress(self, payload, parameter):
            sign, scale = payload.parts
            return (sign.to(parameter.working_dtype) * scale).view(parameter.shape)
"""

from thinwire.compress.assign import leave_small
from thinwire.compress.base import Compressor, Identity, Memory, Packed, Parameter, Payload, State, Summable
from thinwire.compress.memory import ef21, error_feedback, momentum_correction
from thinwire.compress.methods.cast import bf16, fp16
from thinwire.compress.methods.floats import fp8, mxfp4, mxfp8, natural
from thinwire.compress.methods.lossless import lossless
from thinwire.compress.methods.low_rank import acp_sgd, atomo, power_sgd
from thinwire.compress.methods.quantize import int8, qsgd, terngrad
from thinwire.compress.methods.select import gaussian_k, hi_top_k, ms_top_k, redsync, threshold, top_k
from thinwire.compress.methods.sign import ef_sign_sgd, sign_sgd
from thinwire.compress.packing import PartSpec
from thinwire.compress.papers.deep_reduce.compressor import deep_reduce
from thinwire.compress.papers.deep_reduce.values import double_exponential, polynomial
from thinwire.compress.papers.ok_topk import ok_topk
from thinwire.compress.papers.random_k import random_k
from thinwire.compress.papers.thresholds import dgc, sidco
from thinwire.compress.state import redistribute
from thinwire.compress.warm_up import warm_up
from thinwire.compress.wrappers import Wrapper

__all__ = [
    "Compressor", "Identity", "Memory", "Packed", "Parameter", "PartSpec", "Payload", "State", "Summable",
    "Wrapper", "acp_sgd", "atomo", "bf16", "deep_reduce", "dgc", "double_exponential", "ef21", "ef_sign_sgd",
    "error_feedback", "fp8", "fp16", "gaussian_k", "hi_top_k", "int8", "leave_small", "lossless",
    "momentum_correction", "ms_top_k", "mxfp4", "mxfp8", "natural", "ok_topk", "polynomial", "power_sgd", "qsgd",
    "random_k", "redistribute", "redsync", "sidco", "sign_sgd", "terngrad", "threshold", "top_k", "warm_up",
]  # fmt: skip
