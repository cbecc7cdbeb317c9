"""Compressed gradients: each constructor returns a `Compressor`, a frozen description of a method and its settings."""

from thinwire.compress.acp_sgd import acp_sgd
from thinwire.compress.atomo import atomo
from thinwire.compress.base import Compressor, Identity, Parameter
from thinwire.compress.cast import bf16, fp16
from thinwire.compress.dgc import dgc
from thinwire.compress.fp8 import fp8
from thinwire.compress.gaussian_k import gaussian_k
from thinwire.compress.hi_top_k import hi_top_k
from thinwire.compress.int8 import int8
from thinwire.compress.memory import error_feedback, momentum_correction
from thinwire.compress.ms_top_k import ms_top_k
from thinwire.compress.natural import natural
from thinwire.compress.ok_topk import ok_topk
from thinwire.compress.policy import leave_small
from thinwire.compress.power_sgd import power_sgd
from thinwire.compress.qsgd import qsgd
from thinwire.compress.random_k import random_k
from thinwire.compress.redsync import redsync
from thinwire.compress.schedule import warm_up
from thinwire.compress.sidco import sidco
from thinwire.compress.sign import ef_sign_sgd, sign_sgd
from thinwire.compress.state import redistribute
from thinwire.compress.terngrad import terngrad
from thinwire.compress.threshold import threshold
from thinwire.compress.top_k import top_k

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
