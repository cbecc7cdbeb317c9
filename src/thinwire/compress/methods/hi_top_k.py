"""HiTopKComm, the local part of a rank: its gradient and its memory, to be added up inside its host first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Memory, Parameter, Payload, State
from thinwire.compress.methods.select import MsTopK, ms_top_k

HI_TOP_K = "hi_top_k"
"""Name of the method and of its reduction."""


@dataclass(frozen=True)
class HiTopK(Compressor):
    """The compressor of `hi_top_k`; its reduction is `thinwire.compress.reduction.hi_top_k`.

    Its payload is the whole gradient, for the sum inside the host. State: ``error``, of the shape of the parameter: in
    this rank's shard the unsent rest of the host, elsewhere zero.

    Args:
        selector: selects, from the sum over a host, the elements that cross to other hosts.
    """

    selector: MsTopK

    memory = Memory.OWN

    @property
    def name(self) -> str:
        return f"{HI_TOP_K}({', '.join(self.selector.settings)})"

    def init(self, parameter: Parameter) -> State:
        return {"error": torch.zeros(parameter.shape, dtype=parameter.working_dtype)}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return Payload((state["error"].add_(gradient).view(-1),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].clone().view(parameter.shape)


def hi_top_k(density: float = 0.01, *, steps: int = 30) -> HiTopK:
    """Return HiTopKComm (Shi et al., MLSys'21, arXiv 2010.10458): exact in a host, `ms_top_k` of its sum between.

    The ranks of a host add up shards of the gradient, each one of them; each rank sends the largest elements of its
    shard to the ranks of the same index on the other hosts, and the sum of these selections to its own host. So a host
    sends one selection, and not one for each rank to each rank. The unsent rest stays with the rank that has the shard:
    the method has its own memory, and `attach` adds none. It has a reduction of its own, which "auto" chooses.

    With one rank on each host it is an all-gather of `ms_top_k`; on one host nothing is left out, since nothing
    crosses a network. If hosts have different numbers of ranks, the smallest has one shard for each of its ranks, and
    further ranks of other hosts only contribute and receive. docs/guides/ok-topk-and-hitopk.md has the details.

    Args:
        density: fraction of its sum that a host sends, in (0, 1].
        steps: number of steps of the search for a threshold, see `ms_top_k`.

    Raises:
        ValueError: a density outside (0, 1]; no steps.

    Example:
        >>> sync = thinwire.attach(model, compress=thinwire.compress.hi_top_k(0.01))     # doctest: +SKIP
    """
    return HiTopK(ms_top_k(density, steps=steps))
