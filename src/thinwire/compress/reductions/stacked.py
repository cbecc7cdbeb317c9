"""Sparse payloads of several parameters as one vector for each dtype: selected in each, then fused.

Ids of small parameters would each need a header, a format and a checksum of their own, and each a call of every kernel
on every rank's payload: for 14 matrices and 8 ranks on two cores decoding cost 127 ms a step, as one vector 35.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire.compress import packing
from thinwire.compress.base import Compressor, Parameter, Payload
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection
from thinwire.compress.methods.sparsify import Selection, Sparsifier
from thinwire.compress.reductions import messages
from thinwire.compress.reductions.base import Plan
from thinwire.compress.wrappers import Wrapper, packed_code


@dataclass(frozen=True)
class Stack:
    """Parameters whose payloads travel as one, or a single parameter.

    Args:
        indices: indices of the parameters among the plans.
        plan: the plan that packs all of them.
        offsets: start of each in the stack, and end of the last one; empty for a single parameter.
        num_sent: number of elements sent of all of them together; None if that depends on the gradients.
    """

    indices: tuple[int, ...]
    plan: Plan
    offsets: tuple[int, ...] = ()
    num_sent: int | None = None

    def pack(self, payloads: Sequence[Payload]) -> Tensor:
        """Pack the payloads of the parameters of the stack, in its order."""
        (code, parameter), joined = self.plan, payloads[0]
        if self.offsets:
            ids = [payload.parts[0] + offset for payload, offset in zip(payloads, self.offsets, strict=False)]
            joined = Payload((torch.cat(ids), torch.cat([payload.parts[1] for payload in payloads])))
        return packed_code(code).pack(joined, parameter)

    def parts(self, flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the part of each parameter in a tensor of the stack, as views of it."""
        if not self.offsets:
            return [flat]
        sizes = [end - start for start, end in pairwise(self.offsets)]
        return [part.view(shape) for part, shape in zip(flat.view(-1).split(sizes), shapes, strict=True)]

    @property
    def packed_bytes(self) -> int | None:
        code, parameter = self.plan
        if not self.offsets:
            return packed_code(code).packed_bytes(parameter)
        assert isinstance(code, Sparsifier)
        return None if self.num_sent is None else code.packed_bytes_of(self.num_sent, parameter)

    @property
    def max_bytes(self) -> int:
        known = self.packed_bytes
        return messages.max_packed_bytes(*self.plan) if known is None else known


def stacks(plans: Sequence[Plan]) -> list[Stack]:
    """Return the stacks of payloads: those with a `stack_code` together by dtype and code, each other one by itself."""
    together: dict[tuple[torch.dtype, Compressor | None], list[int]] = {}
    result = []
    for index, (compressor, parameter) in enumerate(plans):
        if (code := stack_code(compressor)) is None:
            result.append(Stack((index,), plans[index]))
        else:
            together.setdefault((parameter.working_dtype, code.values), []).append(index)
    for (dtype, _), indices in together.items():
        result.append(Stack((indices[0],), plans[indices[0]]) if len(indices) == 1 else _stack(indices, plans, dtype))
    return result


def pack(selections: Sequence[Selection], plans: Sequence[Plan]) -> Tensor:
    """Return one message (uint8, a multiple of 8 bytes), newly allocated; the plans code values as they are."""
    packed = [stack.pack([Payload(selections[index]) for index in stack.indices]) for stack in stacks(plans)]
    return packing.join(packed)


def unpack(message: Tensor, plans: Sequence[Plan]) -> list[Selection]:
    """Return the selection of each parameter in a message; values may share its memory.

    Raises:
        CorruptMessageError: see `thinwire.compress.reductions.messages.unpack`.
    """
    selections: dict[int, Selection] = {}
    all_stacks = stacks(plans)
    for stack, payload in zip(all_stacks, messages.unpack(message, [stack.plan for stack in all_stacks]), strict=True):
        ids, values = payload.parts
        offsets = stack.offsets or (0, stack.plan[1].numel)
        cuts = torch.searchsorted(ids, torch.tensor(offsets)).tolist()
        for index, offset, (start, stop) in zip(stack.indices, offsets, pairwise(cuts), strict=False):
            selections[index] = ids[start:stop] - offset, values[start:stop]
    return [selections[index] for index in range(len(plans))]


def max_bytes(plans: Sequence[Plan]) -> int:
    """Return the largest legal size of a message."""
    return packing.message_bytes([stack.max_bytes for stack in stacks(plans)])


def predicted_bytes(plans: Sequence[Plan]) -> int | None:
    """Return the bytes of a message with its header, or None if they depend on the gradients."""
    return messages.announced_bytes([stack.packed_bytes for stack in stacks(plans)])


def stack_code(compressor: Compressor) -> Sparsifier | None:
    """Return the sparsifier that packs payloads of several parameters as one, or None if they are packed apart."""
    while isinstance(compressor, (ErrorFeedback, MomentumCorrection)):
        compressor = compressor.inner
    if isinstance(compressor, Wrapper) or not isinstance(compressor, Sparsifier) or not compressor.is_exact:
        return None
    return compressor


def _stack(indices: Sequence[int], plans: Sequence[Plan], dtype: torch.dtype) -> Stack:
    chosen = [plans[index] for index in indices]
    offsets = tuple(accumulate((parameter.numel for _, parameter in chosen), initial=0))
    codes = [code for compressor, _ in chosen if (code := stack_code(compressor)) is not None]
    num_sent = messages.total([code.fixed_count(entry) for code, (_, entry) in zip(codes, chosen, strict=True)])
    together = Parameter(f"{chosen[0][1].name} to {chosen[-1][1].name}", (offsets[-1],), dtype)
    return Stack(tuple(indices), (codes[0], together), offsets, num_sent)
