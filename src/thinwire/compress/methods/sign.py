"""One bit for each value: majority vote, and signs with a scale under error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Memory, Parameter, Payload, State, WholeTensor, counters
from thinwire.compress.memory import ErrorFeedback
from thinwire.compress.methods.quantize import Blocks
from thinwire.errors import CorruptMessageError


@dataclass(frozen=True)
class ScaledSign(Blocks):
    """The compressor to ``(||p||_1 / n) sign(p)`` of each block. Parts: signs (uint8, 8 in a byte), scales [blocks].

    A zero, which one bit cannot express, gets the sign of its index, the step and the rank: the signs of zeros
    cancel out between steps.

    Args:
        block: number of consecutive values with one scale; None for all values of a parameter.

    Raises:
        ValueError: a block of less than 8 values, or that is no multiple of 8.
    """

    block: int | None = None

    bits = 1

    def __post_init__(self) -> None:
        if self.block is not None and not (isinstance(self.block, int) and self.block >= 8 and self.block % 8 == 0):
            raise ValueError(f"blocks of signs are of 8, 16, 24 ... elements, not {self.block!r}; None for one scale")

    @property
    def name(self) -> str:
        return "scaled_sign" if self.block is None else f"scaled_sign({self.block})"

    def init(self, parameter: Parameter) -> State:
        return counters()

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        return self._signed(flat, kernels.mean_of_blocks(flat, self.block_elements(parameter)), state)

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        signs, scales = payload.parts
        kernels.add_signs(signs, scales.neg() if negated else scales, self.block_elements(parameter), total.view(-1))

    def check(self, codes: Tensor, scales: Tensor, parameter: Parameter) -> None:
        low, high = (float(bound) for bound in scales.aminmax()) if scales.numel() else (0.0, 0.0)
        if not 0.0 <= low <= high < float("inf"):
            raise CorruptMessageError(f"signs with scales from {low:g} to {high:g}, which are means of magnitudes")

    @staticmethod
    def _signed(flat: Tensor, scales: Tensor, state: State) -> Payload:
        signs = kernels.pack_signs(flat, state["step"] + state["salt"])
        state["step"] += 1
        return Payload((signs, scales))


@dataclass(frozen=True)
class SignSGD(ScaledSign):
    """The compressor of `sign_sgd`. The scale is 1, or 0 if all of a gradient is zero: such a rank does not vote."""

    block: None = None  # all magnitudes are one

    memory = Memory.OWN  # nothing keeps the rest: magnitudes are lost for good

    @property
    def name(self) -> str:
        return "sign_sgd"

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        votes = flat.numel() > 0 and float(kernels.largest_of_blocks(flat, flat.numel())[0]) > 0.0
        return self._signed(flat, flat.new_full((min(1, flat.numel()),), float(votes)), state)

    def combine(self, payloads: Sequence[Payload], parameter: Parameter) -> Tensor:
        """Return the majority's sign: -1, 1, or 0 for a tie."""
        return super().combine(payloads, parameter).sign_()

    def check(self, codes: Tensor, scales: Tensor, parameter: Parameter) -> None:
        if any(scale not in (0.0, 1.0) for scale in scales.tolist()):
            raise CorruptMessageError(f"votes that count {scales.tolist()} times")


@dataclass(frozen=True)
class Signum(SignSGD, WholeTensor):
    """A `SignSGD` with the sign of the momentum, which each rank keeps. State: also ``momentum``."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is in [0, 1), not {self.momentum!r}; 0.9 makes Signum of it")

    @property
    def name(self) -> str:
        return f"sign_sgd({self.momentum:g})"

    def init(self, parameter: Parameter) -> State:
        return {**counters(), "momentum": torch.zeros(parameter.shape, dtype=parameter.working_dtype)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        momentum = state["momentum"].mul_(self.momentum).add_(gradient, alpha=1.0 - self.momentum)
        return super().compress(momentum, parameter, state)


def sign_sgd(momentum: float = 0.0) -> SignSGD:
    """Return signSGD with majority vote (Bernstein et al., ICML'18 and ICLR'19): the sign of the sum of signs.

    One bit a value, and every element of the result is -1, 1, or 0 for a tie: **the learning rate must be some hundred
    times smaller than with gradients**, as for Adam. Magnitudes are lost for good, so error feedback around it makes no
    sense; `ef_sign_sgd` has them.

    Args:
        momentum: factor of ``m = momentum m + (1 - momentum) g``, kept by each rank, whose sign votes (Signum); 0 for
            that of the gradient. The optimizer then has no momentum of its own for these parameters.

    Raises:
        ValueError: momentum outside [0, 1).
    """
    return SignSGD() if momentum == 0.0 else Signum(momentum=momentum)


def ef_sign_sgd(decay: float = 1.0, block: int | None = 128) -> ErrorFeedback:
    """Return signs with scales under error feedback (Karimireddy et al., ICML'19): ``(||p||_1 / n) sign(p)``.

    One bit a value and one scale a block; with the memory it converges at the rate of SGD, with its learning rate.

    Args:
        decay: decay of the memory, as in `error_feedback`.
        block: number of consecutive values with one scale. At 128 scales cost 1/4 bit a value, and most blocks lie
            within one row of an embedding: rows differ by orders of magnitude. None has one scale a parameter, as in
            the paper.

    Raises:
        ValueError: a decay outside [0, 1]; a block that is no multiple of 8.
    """
    return ErrorFeedback(ScaledSign(block), decay)
