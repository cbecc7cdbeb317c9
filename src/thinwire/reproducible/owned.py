"""The mean of the ranks' exact sums, by owners that round it once.

Sums travel to owners by the code of float64 values, in which trailing zeros of a mantissa cost nothing: 30 bits of a
sum of three float32 gradients, 17 of three that autocast made. Back go the rounded means, in 27; or the rounded sums
where these are shorter, as under autocast, because a division by 24 fills a mantissa: then ranks divide them, and get
the few means for which that is not the same in addition.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.comm.channel import Channel
from thinwire.comm.frames import frame_bytes
from thinwire.errors import CorruptMessageError
from thinwire.reproducible.exact import ExactSum, divided
from thinwire.rows import floats
from thinwire.sums import owners
from thinwire.sums.lossless import Half, dealt

_COUNT_BYTES, _PATCH_BYTES = 4, 8
LEAST_VALUES = 1024
"""Fewest values of a message that are encoded: sums of float64 have more to gain than gradients."""
_MEANS = -1  # in place of the number of patches: the message has means, not sums


class ExactMean:
    """The code of the mean of the exact sums of all ranks, for `owners.begin`. The sums are left as they are.

    Args:
        total: the sum of this rank.
        count: how many parts the ranks have added, all together.
        out: flat, gets the mean, correctly rounded to its dtype, which is that of what was added.
        push, pull: count the bytes that travel.
        terms: what the sums of all ranks have beside their values.
        codes: whether values travel coded, which all ranks can read; else as they are.
    """

    def __init__(
        self,
        total: ExactSum,
        count: int,
        out: Tensor,
        channel: Channel,
        push: Half,
        pull: Half,
        terms: Sequence[tuple[Tensor, Tensor]],
        codes: bool = True,
    ) -> None:
        self.total, self.count, self.out, self.rank = total, count, out, channel.rank
        self.pushed, self.pulled, self.terms = push, pull, terms
        self.cuts = dealt(out.numel(), channel.world_size)
        self.segments = [len(cuts) for cuts in self.cuts]
        self.least_values = LEAST_VALUES if codes else out.numel() + 1

    def most_pushed(self, source: int, owner: int, number: int) -> int:
        return self.total.values[self.cuts[owner][number]].nbytes

    def most_pulled(self, owner: int, number: int) -> int:
        means = self.out[self.cuts[owner][number]]
        return means.nbytes + _COUNT_BYTES if means.numel() else 0

    def push(self, owner: int, number: int) -> Tensor:
        values = self.total.values[self.cuts[owner][number]].cpu()
        return _counted(self.pushed, values.numel(), self._encoded(values))

    def add(self, number: int, arriving: owners.Arriving) -> ExactSum:
        cut = self.cuts[self.rank][number]
        sum_of_all = ExactSum(self.total.values[cut].cpu().clone())
        part = torch.empty_like(sum_of_all.values)
        for _, receive in arriving:
            floats.decode(receive(), part)
            sum_of_all.add(part)
        for ids, terms in self.terms:
            inside = (ids >= cut.start) & (ids < cut.stop)
            sum_of_all.terms.append((ids[inside] - cut.start, terms[inside]))
        return sum_of_all

    def pull(self, number: int, total: ExactSum) -> Tensor:
        means = total.mean(self.count, self.out.dtype)
        self.out[self.cuts[self.rank][number]] = means
        message, patches = [self._encoded(means)], _MEANS
        if means.dtype == torch.float32 and means.numel() >= self.least_values:
            sums = total.values.float()
            quotients = divided(sums.double(), self.count, means.dtype)
            others = (quotients.view(torch.int32) != means.view(torch.int32)).nonzero().flatten()
            patch_bits = 8 * _PATCH_BYTES * others.numel() / means.numel()
            if floats.bits_per_value(sums) + patch_bits < floats.bits_per_value(means):
                shorter = [self._encoded(sums), others.int().view(torch.uint8), means[others].view(torch.uint8)]
                if sum(part.numel() for part in shorter) <= message[0].numel():
                    message, patches = shorter, others.numel()
        message.append(torch.tensor([patches], dtype=torch.int32).view(torch.uint8))
        return _counted(self.pulled, means.numel(), torch.cat(message))

    def take(self, owner: int, number: int, receive: Callable[[], Tensor]) -> None:
        means, message = self.out[self.cuts[owner][number]], receive()
        target = torch.empty(means.shape, dtype=means.dtype)
        rest = message.numel() - _COUNT_BYTES
        patches = int(message[rest:].clone().view(torch.int32)) if rest >= 0 else -2
        if patches == _MEANS:
            floats.decode(message[:rest], target)
        else:
            size = rest - _PATCH_BYTES * patches
            if not 0 <= patches <= means.numel() or size < 0 or means.dtype != torch.float32:
                raise CorruptMessageError(f"{patches} means beside {means.numel()} sums")
            floats.decode(message[:size], target)
            ids, values = message[size:rest].clone().view(torch.int32).view(2, patches)
            if patches and (int(ids.min()) < 0 or int(ids.max()) >= means.numel()):
                raise CorruptMessageError("a mean beside the sums, of none of them")
            target = divided(target.double(), self.count, means.dtype)
            target[ids.long()] = values.view(torch.float32)
        means.copy_(target)

    def _encoded(self, values: Tensor) -> Tensor:
        return floats.encode(values) if values.numel() >= self.least_values else values.view(torch.uint8)


def _counted(half: Half, numel: int, message: Tensor) -> Tensor:
    half.values, half.num_bytes = half.values + numel, half.num_bytes + frame_bytes(message.numel())
    return message
