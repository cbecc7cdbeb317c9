"""Compressed gradients: each constructor returns a `Compressor`, a frozen description of a method and its settings."""

from thinwire.compress.assign import leave_small
from thinwire.compress.base import Compressor, Identity, Parameter
from thinwire.compress.memory import error_feedback, momentum_correction
from thinwire.compress.methods.atomo import atomo
from thinwire.compress.methods.cast import bf16, fp8, fp16
from thinwire.compress.methods.dgc import dgc
from thinwire.compress.methods.hi_top_k import hi_top_k
from thinwire.compress.methods.ok_topk import ok_topk
from thinwire.compress.methods.power_sgd import acp_sgd, power_sgd
from thinwire.compress.methods.quantize import int8, natural, qsgd, terngrad
from thinwire.compress.methods.random_k import random_k
from thinwire.compress.methods.select import gaussian_k, ms_top_k, redsync, threshold, top_k
from thinwire.compress.methods.sidco import sidco
from thinwire.compress.methods.sign import ef_sign_sgd, sign_sgd
from thinwire.compress.state import redistribute
from thinwire.compress.warm_up import warm_up

__all__ = [
    "Compressor",
    "Identity",
    "Parameter",
    "acp_sgd",
    "atomo",
    "bf16",
    "dgc",
    "ef_sign_sgd",
    "error_feedback",
    "fp8",
    "fp16",
    "gaussian_k",
    "hi_top_k",
    "int8",
    "leave_small",
    "momentum_correction",
    "ms_top_k",
    "natural",
    "ok_topk",
    "power_sgd",
    "qsgd",
    "random_k",
    "redistribute",
    "redsync",
    "sidco",
    "sign_sgd",
    "terngrad",
    "threshold",
    "top_k",
    "warm_up",
]
