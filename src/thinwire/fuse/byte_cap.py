"""Buckets of so many bytes, as DDP and Horovod make them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from thinwire.fuse.policy import NamedPolicy, groups_ending_at
from thinwire.plan.profile import Groups, Profile

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ByteCap(NamedPolicy):
    """See `byte_cap`."""

    constructor: ClassVar[str] = "byte_cap"
    mb: float = 25.0
    first_mb: float | None = None

    def __post_init__(self) -> None:
        for name, cap in (("mb", self.mb), ("first_mb", self.first_mb)):
            if cap is not None and not (math.isfinite(cap) and cap > 0):
                raise ValueError(f"{name} is {cap}; a bucket needs a cap above 0 MiB. For one bucket use one_bucket()")

    def groups(self, profile: Profile) -> Groups:
        cap = MEBIBYTE * (self.mb if self.first_mb is None else self.first_mb)
        filled, ends = 0.0, []
        for tensor, size in enumerate(profile.size_bytes):
            filled += size
            if filled >= cap:
                ends.append(tensor + 1)
                filled, cap = 0.0, MEBIBYTE * self.mb
        if not ends or ends[-1] < profile.num_tensors:
            ends.append(profile.num_tensors)
        return groups_ending_at(ends)


def byte_cap(mb: float = 25.0, first_mb: float | None = None) -> ByteCap:
    """Buckets that close once they have ``mb`` MiB of gradients, as DDP's do: each overshoots by up to one tensor.

    Args:
        mb: of a bucket; DDP's ``bucket_cap_mb``, 25 by default. Horovod's buffer has 64.
        first_mb: of the first bucket; DDP has 1 MiB, so that communication begins early. None is ``mb``.

    Raises:
        ValueError: a cap that is not above 0.

    Best where nobody measured: it knows neither the link nor the compressor, and is rarely more than twice the best.

    Example:
        >>> byte_cap(mb=8, first_mb=1).name
        'byte_cap:mb=8:first_mb=1'
    """
    return ByteCap(mb, first_mb)
