"""Lossless sums of dense gradients as the doctor prices them: bytes, seconds, and the link below which they pay."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.comm.machine import Machine
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import usual_groups
from thinwire.plan.text import format_seconds
from thinwire.rows.formats import ring_all_reduce_bytes
from thinwire.tune.lossless import Code, Ranks, lossless_seconds, native_seconds, verdict

_MOST_MBIT = 1e7
_ONE_CORE, _TWO_CORES = 0.9, 1.5
"""Cores for the code of a rank from which on the break-even holds for one core, and for two."""


@dataclass(frozen=True)
class LosslessOption:
    """What lossless sums of a training's dense gradients would send and take, in the buckets of DDP.

    Args:
        code: what the code achieves on gradients of the dtype that most of them have; seconds of a processor.
        sent_bytes, native_bytes: bytes that a rank sends in a step, losslessly and by native all-reduces.
        seconds, native_seconds: seconds in which the network is busy in a step.
        break_even_mbit: rate of a host's link below which they are faster, with one and with two cores for the code of
            a rank: 0 where no link is slow enough.
        cores: cores that the code of a rank has here, as measured.
    """

    code: Code
    sent_bytes: float
    native_bytes: float
    seconds: float
    native_seconds: float
    break_even_mbit: tuple[float, float]
    cores: float = 1.0

    @property
    def pays(self) -> bool:
        """Whether they are faster by 10 %."""
        return verdict(self.native_seconds, self.seconds, self.code).is_lossless

    def to_json(self) -> dict[str, Any]:
        code, rest = asdict(self.code), {name: value for name, value in vars(self).items() if name != "code"}
        return {**code, **rest, "break_even_mbit": list(self.break_even_mbit), "pays": self.pays}

    def describe(self) -> str:
        """Return the verdict in one line."""
        saved = 1.0 - self.sent_bytes / self.native_bytes if self.native_bytes else 0.0
        share = f"saves {saved:.0%}" if saved > 0 else f"adds {-saved:.0%}"
        times = f"{format_seconds(self.seconds)} instead of {format_seconds(self.native_seconds)} a step"
        rate = self.break_even_mbit[self.cores >= _TWO_CORES]
        below = f"worth it below {format_mbit(rate)}" if rate else "worth it on no link"
        if rate and self.cores < _ONE_CORE:
            below += f" with a core for each rank's code ({self.cores:.1f} here)"
        return f"{'pays' if self.pays else 'nothing to gain'}, {share} of the bytes: {times}; {below}"


def lossless_option(measurement: Measurement) -> LosslessOption | None:
    """Return the price of lossless sums; None where nothing has a code, or it was not measured."""
    sizes: dict[Any, int] = {}
    for parameter, size_bytes in zip(measurement.parameters, measurement.size_bytes, strict=True):
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + size_bytes
    known = {entry.dtype: entry for entry in measurement.dense_codes if entry.dtype in sizes}
    codes = {dtype: entry.code for dtype, entry in known.items()}
    if not codes:
        return None
    world_size, groups, count = measurement.world_size, usual_groups(measurement), measurement.synchronizations
    exact, coded = measurement.costs(), measurement.lossless_costs()
    main = max(codes, key=lambda dtype: sizes[dtype])
    ranks = Ranks(world_size, math.ceil(world_size / measurement.hosts) if measurement.hosts > 1 else 1)
    one, two = (break_even_mbit(sizes[main], ranks, codes[main], cores) for cores in (1, 2))
    return LosslessOption(
        codes[main],
        count
        * math.fsum(
            codes[dtype].sent_bytes(size, world_size) if dtype in codes else ring_all_reduce_bytes(size, world_size)
            for dtype, size in sizes.items()
        ),
        count * ring_all_reduce_bytes(sum(sizes.values()), world_size),
        count * math.fsum(map(coded.seconds, groups)),
        count * math.fsum(exact.seconds(group) - exact.opening_seconds for group in groups),
        (one, two),
        known[main].cores,
    )


def break_even_mbit(num_bytes: float, ranks: Ranks, code: Code, cores: int = 1) -> float:
    """Return the rate of a host's link below which a lossless sum is faster, with so many cores for the code of a rank.

    Of the link only bytes count. Of what a rank sends to all, the share for other hosts leaves its host by a link that
    its neighbours share; a ring crosses each link once, however many ranks a host has.

    Returns:
        Mbit/s: 0 where no link is slow enough, and `_MOST_MBIT` where it is faster on all.
    """
    world_size, local = ranks.world_size, ranks.ranks_per_host
    shared = local * (world_size - local) / max(1, world_size - 1)
    coded = Ranks(world_size, local, cores * local)

    def is_faster(mbit: float) -> bool:
        link = Machine(0.0, 0.0, shared * 8e-6 / mbit, 8e-6 / mbit, *[0.0] * 7)
        return lossless_seconds(num_bytes, coded, link, code) < native_seconds(num_bytes, world_size, link)

    low, high = 1e-3, _MOST_MBIT
    if not is_faster(low) or is_faster(high):
        return high if is_faster(low) else 0.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return low


def format_mbit(mbit: float) -> str:
    """Format a rate as ``250 Mbit/s`` or ``2.5 Gbit/s``, with two digits, which is all that is known."""
    rounded = float(f"{mbit:.2g}")
    return f"{rounded:g} Mbit/s" if rounded < 1000 else f"{rounded / 1000:g} Gbit/s"
