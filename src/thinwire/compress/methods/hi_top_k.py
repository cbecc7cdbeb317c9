"""HiTopKComm, the part that a rank does alone: its gradient and its memory, to be added up inside its host first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Memory, Parameter, Payload, State
from thinwire.compress.methods.select import MsTopK, ms_top_k

HI_TOP_K = "hi_top_k"
"""The name of the method and of its reduction."""


@dataclass(frozen=True)
class HiTopK(Compressor):
    """See `hi_top_k`. What the ranks do together is `thinwire.compress.reduction.hi_top_k`.

    Its payload is what a rank hands in inside its host: everything. State: ``error``, of the shape of the parameter; of
    this rank's shard it is what the host did not send, elsewhere zero.

    Args:
        selector: what chooses, of the sum over a host, the elements that cross to other hosts.
    """

    selector: MsTopK

    @property
    def name(self) -> str:
        return f"{HI_TOP_K}({', '.join(self.selector.settings)})"

    @property
    def memory(self) -> Memory:
        return Memory.OWN

    def init(self, parameter: Parameter) -> State:
        return {"error": torch.zeros(parameter.shape, dtype=parameter.working_dtype)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        del parameter
        return Payload((state["error"].add_(gradient).view(-1),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].clone().view(parameter.shape)


def hi_top_k(density: float = 0.01, *, steps: int = 30) -> HiTopK:
    """HiTopKComm (Shi et al., MLSys'21, arXiv 2010.10458): exact inside a host, `ms_top_k` of its sum between hosts.

    The ranks of a host add up shards of the gradient, each one of them; each rank sends the largest elements of its
    shard to the ranks of its place on the other hosts, and what they all sent to its own host. So a host sends one
    selection, and not one for each rank to each rank. What was not sent stays with the rank that has the shard: it has
    its own memory, and `attach` adds none. It is a reduction of its own, which is taken by itself.

    With one rank on each host it is an all-gather of `ms_top_k`; on one host nothing is left out, since nothing
    crosses a network. Where hosts have unequally many ranks there are as many shards as the smallest has ranks, and the
    others only hand in and get back. docs/compress-methods.md has the details.

    Args:
        density: the part of its sum that a host sends, in (0, 1].
        steps: of the search for a threshold, see `ms_top_k`.

    Raises:
        ValueError: a density outside (0, 1]; no steps.

    Example:
        >>> sync = thinwire.attach(model, compress=thinwire.compress.hi_top_k(0.01))     # doctest: +SKIP
    """
    return HiTopK(ms_top_k(density, steps=steps))
