"""Memories of the unsent rest of gradients: error feedback and momentum correction, as wrappers."""

from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Joint, Memory, Parameter, Payload, State
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.wrappers import Wrapper, core_of, unwrapped


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """A wrapper that adds to each gradient the unsent rest of the last ones.

    (Seide et al. 2014; Karimireddy et al., ICML'19.) ``p = g + decay * e``; send ``C(p)``; ``e = p - C(p)``. State of a
    parameter: ``error``, of its shape, float32 for 16-bit gradients (in 16 bits the small rest would vanish), and the
    state of the wrapped compressor as ``inner``. `thinwire.attach` adds it if needed.

    Args:
        inner: the compressor.
        decay: fraction of the memory that is added, in [0, 1]; 1 conserves everything.

    Raises:
        ValueError: a decay outside [0, 1]; a compressor that has a memory already.

    Example:
        >>> from thinwire.compress.methods.select import top_k
        >>> error_feedback(top_k(0.01)).name
        'error_feedback(top_k(0.01))'
    """

    decay: float = 1.0

    memory = Memory.OWN

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"error feedback decays by a factor in [0, 1], not {self.decay}")
        if self.inner.memory is Memory.OWN:
            raise ValueError(
                f"{self.inner.name} keeps what it does not send already: leave error_feedback out, because what is"
                " remembered twice is sent twice"
            )

    @property
    def name(self) -> str:
        return f"error_feedback({self.inner.name}{'' if self.decay == 1.0 else f', {self.decay:g}'})"

    def init(self, parameter: Parameter) -> State:
        error = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        return {"error": error, "inner": self.inner.init(parameter)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        corrected = state["error"]
        if self.decay != 1.0:
            corrected.mul_(self.decay)
        corrected.add_(gradient)
        payload = self.inner.compress(corrected, parameter, state["inner"])
        if isinstance(core_of(self.inner), Joint):
            return payload
        payload = replace(payload, parts=tuple(_apart(part, corrected) for part in payload.parts))
        self.code.add(payload, parameter, corrected, negated=True)
        return payload

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        core, of_core = unwrapped(self.inner, state["inner"])
        if isinstance(core, Joint):
            core.residual_of_sum(state["error"], mean, parameter, of_core)
        self.inner.finish(mean, parameter, state["inner"])


error_feedback = ErrorFeedback


@dataclass(frozen=True)
class EF21(Wrapper):
    """A wrapper that averages the momentum of gradients by sending how it changes, so what arrives late is not stale.

    (EF21-SGDM: Richtarik et al., NeurIPS'21; Fatkhullin et al., NeurIPS'23.) Each rank keeps ``v = m v + (1 - m) g``;
    all keep the same estimate h of its mean. Ranks send ``C(v - h)``; ``h = h + mean``, and the gradient becomes h.
    Error feedback sends every gradient sooner or later, also when it is old; here what was not sent fades as v does.

    The optimizer must have no momentum for such a parameter (``torch.optim.Muon(..., momentum=0, nesterov=False)``):
    pass it to `thinwire.attach`, which checks. Before Adam, also of vectors, use error feedback. State: ``average`` (v)
    and ``estimate`` (h), of the parameter's shape, float32 for 16-bit gradients; and the inner compressor's state.

    Args:
        inner: a compressor of sums that has no memory: `power_sgd`, `acp_sgd`.
        momentum: m, in [0, 1). In docs/evidence/few-bytes.md 0.9 ended lower than 0.8, and that than 0.6.

    Raises:
        ValueError: momentum outside [0, 1); another compressor.

    Example:
        >>> from thinwire.compress.methods.low_rank import power_sgd
        >>> ef21(power_sgd(0.12)).name
        'ef21(power_sgd(0.12), 0.9)'
    """

    momentum: float = 0.9

    memory = Memory.OWN

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is in [0, 1), not {self.momentum}")
        if not isinstance(self.inner, Joint):
            raise ValueError(
                f"{self.inner.name} has a mean that differs from what a rank can take from its own difference: ef21"
                " takes power_sgd or acp_sgd, without a memory of their own"
            )

    @property
    def name(self) -> str:
        return f"ef21({self.inner.name}, {self.momentum:g})"

    def init(self, parameter: Parameter) -> State:
        average = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        return {"average": average, "estimate": average.clone(), "inner": self.inner.init(parameter)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        average = state["average"].lerp_(gradient.to(parameter.working_dtype), 1.0 - self.momentum)
        return self.inner.compress(average - state["estimate"], parameter, state["inner"])

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        self.inner.finish(mean, parameter, state["inner"])
        mean.copy_(state["estimate"].add_(mean))


ef21 = EF21


def with_memory(compressor: Compressor) -> Compressor:
    """Return the compressor, with error feedback around it if it is biased and forgets its unsent rest."""
    return ErrorFeedback(compressor) if compressor.memory is Memory.NEEDED else compressor


@dataclass(frozen=True)
class Forgotten(Wrapper):
    """A wrapper for a code whose loss is nobody's to keep here: who asked for the mean takes it from that."""

    name = "forgotten"
    memory = Memory.OWN


def _apart(part: Tensor, memory: Tensor) -> Tensor:
    """Return the part without memory shared with a tensor that is about to be written to."""
    shared = part.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    return part.clone() if shared else part


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """A wrapper with momentum before sparsification, as DGC has it (Lin et al., ICLR'18), not in the optimizer.

    ``u = m u + g; v = v + u``; send ``C(v)``; at the sent elements ``u`` (momentum factor masking) and ``v`` become 0
    (section 3.2). ``v`` is the memory, so no error feedback is needed. With ``nesterov`` ``u = m (u + g); v += u + g``.
    The optimizer must have no momentum for such a parameter, or it would count twice: pass it to `thinwire.attach`,
    which checks.

    Args:
        inner: the compressor; only ``v`` is corrected if it is no sparsifier.
        momentum: m, in [0, 1).
        nesterov: as in ``torch.optim.SGD``.
        clip_norm: clip each local gradient of a parameter to this norm before it is accumulated, as ``local clipping``
            (section 3.2; pass ``global_norm / sqrt(world_size)``); None for no clipping.
        masking: whether momentum is cleared at the sent elements.

    Raises:
        ValueError: momentum outside [0, 1); a compressor that has a memory already.

    Example:
        >>> from thinwire.compress.methods.select import top_k
        >>> momentum_correction(top_k(0.01), 0.5).name
        'momentum_correction(top_k(0.01), 0.5)'
    """

    momentum: float = 0.9
    _: KW_ONLY
    nesterov: bool = False
    clip_norm: float | None = None
    masking: bool = True

    memory = Memory.OWN

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is in [0, 1), not {self.momentum}")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ValueError(f"gradients are clipped to a positive norm, not {self.clip_norm}")
        if self.inner.memory is Memory.OWN or isinstance(core_of(self.inner), Joint):
            raise ValueError(f"{self.inner.name} has a memory of its own, which momentum correction would double")

    @property
    def name(self) -> str:
        settings = f"{self.momentum:g}" + ", nesterov" * self.nesterov + ", unmasked" * (not self.masking)
        clip = "" if self.clip_norm is None else f", clip {self.clip_norm:g}"
        return f"momentum_correction({self.inner.name}, {settings}{clip})"

    def init(self, parameter: Parameter) -> State:
        momentum = torch.zeros(parameter.shape, dtype=parameter.working_dtype)
        return {"momentum": momentum, "velocity": momentum.clone(), "inner": self.inner.init(parameter)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        momentum, velocity = state["momentum"], state["velocity"]
        gradient = clipped(self, gradient)
        if self.nesterov:
            momentum.add_(gradient).mul_(self.momentum)
            velocity.add_(momentum).add_(gradient)
        else:
            momentum.mul_(self.momentum).add_(gradient)
            velocity.add_(momentum)
        payload = self.inner.compress(velocity, parameter, state["inner"])
        payload = replace(payload, parts=tuple(_apart(part, velocity) for part in payload.parts))
        self.code.add(payload, parameter, velocity, negated=True)
        if self.masking and isinstance(self.code, Sparsifier):
            momentum.view(-1).index_fill_(0, payload.parts[0], 0.0)
        return payload


momentum_correction = MomentumCorrection


def clipped(compressor: Compressor, gradient: Tensor) -> Tensor:
    """Return a gradient as momentum correction clips it: where pieces are compressed apart, before it is cut."""
    if isinstance(compressor, MomentumCorrection) and compressor.clip_norm is not None:
        norm = float(torch.linalg.vector_norm(gradient))
        return gradient * (compressor.clip_norm / norm) if norm > compressor.clip_norm else gradient
    return clipped(compressor.inner, gradient) if isinstance(compressor, Wrapper) else gradient
