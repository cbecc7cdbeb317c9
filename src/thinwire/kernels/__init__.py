"""Kernels: `reference` is the definition of correct, `registry` has a row for each, and `dispatch` picks a twin."""

# ruff: noqa: F403  a row in the registry is a name of this package

from thinwire.kernels.dispatch import KERNELS, using
from thinwire.kernels.reference.codes import elias_fano_bytes
from thinwire.kernels.reference.quantize import packed_codes_bytes
from thinwire.kernels.reference.rows import stack_starts
from thinwire.kernels.reference.select import Moments
from thinwire.kernels.registry import *
from thinwire.kernels.warm import warm_up

__all__ = ["Moments", "elias_fano_bytes", "packed_codes_bytes", "stack_starts", "using", "warm_up", *KERNELS]
