"""The timeline of one iteration under a grouping: its length and its events.

One compute stream: backward in order; a group is compressed right after its last gradient, which delays what follows.
One channel, in order: a group starts when it is compressed and the channel is free. Decompression is on the compute
stream, in order of groups: after a group's arrival, and after all of backward. Time counts from the start of backward.

Where encoding and decoding run beside backward, on the thread that communicates, they are part of ``communicate``, and
``compress`` and ``decompress`` are Linear(0, 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from thinwire.fuse.profile import Groups, Linear, Profile, check_groups
from thinwire.observe.trace import Event

COMPUTE, CHANNEL = "compute", "channel"
_FREE = Linear(0.0, 0.0)


def iteration_seconds(
    profile: Profile, groups: Groups, dense: Linear | None = None, compressed: Sequence[bool] | None = None
) -> float:
    """Return seconds from the start of backward until the last group is decompressed, without the rest of the step.

    Args:
        dense: cost of communicating a group that is not compressed; needed if there is one.
        compressed: whether each group is compressed; all are by default.

    Raises:
        ValueError: see `check_groups`; or ``compressed`` has another length, or there is no ``dense``.

    Example:
        >>> free, link = Linear(0, 0), Linear(alpha=1, beta=1)
        >>> profile = Profile([2, 2], [3, 3], free, free, link)
        >>> iteration_seconds(profile, ((0,), (1,))), iteration_seconds(profile, ((0, 1),))
        (10.0, 11.0)

    Planners call it often, so it records no events; `thinwire.plan.simulate` returns the same number, to the bit, with
    them.
    """
    check_groups(profile, groups)
    choices = _check_choices(groups, dense, compressed)
    ready, ends = profile.ready_seconds, profile.end_bytes
    delay = channel = 0.0
    arrivals = []
    for group, choice in zip(groups, choices, strict=True):
        compress, communicate, decompress = _costs(profile, dense, choice)
        size = ends[group[-1] + 1] - ends[group[0]]
        delay += compress.alpha + compress.beta * size  # written out: a call costs more than the sum
        channel = max(channel, ready[group[-1] + 1] + delay) + (communicate.alpha + communicate.beta * size)
        arrivals.append((channel, decompress.alpha + decompress.beta * size))
    clock = ready[-1] + delay
    for arrival, seconds in arrivals:
        clock = max(clock, arrival) + seconds
    return clock


def events(
    profile: Profile, groups: Groups, dense: Linear | None = None, compressed: Sequence[bool] | None = None
) -> tuple[Event, ...]:
    """Return the events of the iteration that `iteration_seconds` prices, in order of time on each track.

    The tracks are "compute" and "channel". Arguments and errors are those of `iteration_seconds`.
    """
    steps = schedule(profile, groups, dense, compressed)
    return *_compute_events(profile, groups, steps), *_channel_events(groups, steps)


class Step(NamedTuple):
    """A group's work: start and seconds of each part."""

    size_bytes: float
    encode: float
    encode_seconds: float
    send: float
    send_seconds: float
    decode: float
    decode_seconds: float


def schedule(profile: Profile, groups: Groups, dense: Linear | None, compressed: Sequence[bool] | None) -> list[Step]:
    """Return the work of each group. Arguments and errors are those of `iteration_seconds`."""
    check_groups(profile, groups)
    choices = _check_choices(groups, dense, compressed)
    ready, ends = profile.ready_seconds, profile.end_bytes
    delay = channel = 0.0
    sent = []
    for group, choice in zip(groups, choices, strict=True):
        compress, communicate, decompress = _costs(profile, dense, choice)
        size = ends[group[-1] + 1] - ends[group[0]]
        encode, encode_seconds = ready[group[-1] + 1] + delay, compress(size)
        delay += encode_seconds
        send, send_seconds = max(channel, ready[group[-1] + 1] + delay), communicate(size)
        channel = send + send_seconds
        sent.append(Step(size, encode, encode_seconds, send, send_seconds, math.nan, decompress(size)))
    clock = ready[-1] + delay
    steps = []
    for step in sent:
        clock = max(clock, step.send + step.send_seconds)
        steps.append(step._replace(decode=clock))
        clock += step.decode_seconds
    return steps


def _check_choices(groups: Groups, dense: Linear | None, compressed: Sequence[bool] | None) -> Sequence[bool]:
    if compressed is None:
        return (True,) * len(groups)
    if len(compressed) != len(groups):
        raise ValueError(f"{len(compressed)} choices for {len(groups)} groups: say of each whether it is compressed")
    if dense is None and not all(compressed):
        raise ValueError("a group is not compressed: say what communicating it costs (dense=Linear(...))")
    return compressed


def _costs(profile: Profile, dense: Linear | None, compressed: bool) -> tuple[Linear, Linear, Linear]:
    """Return the costs of compressing, communicating and decompressing a group."""
    if compressed:
        return profile.compress, profile.communicate, profile.decompress
    assert dense is not None
    return _FREE, dense, _FREE


def _compute_events(profile: Profile, groups: Groups, steps: Sequence[Step]) -> Iterator[Event]:
    """Yield backward of each tensor, and all encoding and decoding that costs any time."""
    for place, (group, step) in enumerate(zip(groups, steps, strict=True)):
        delay = step.encode - profile.ready_seconds[group[-1] + 1]
        for tensor in group:
            name = profile.names[tensor] if profile.names else f"tensor {tensor}"
            start = profile.ready_seconds[tensor] + delay
            seconds = profile.backward_seconds[tensor]
            yield Event(f"backward {name}", COMPUTE, start, seconds, {"bytes": profile.size_bytes[tensor]})
        if step.encode_seconds:
            yield Event(f"encode group {place}", COMPUTE, step.encode, step.encode_seconds, _about(group, step))
    for place, (group, step) in enumerate(zip(groups, steps, strict=True)):
        if step.decode_seconds:
            yield Event(f"decode group {place}", COMPUTE, step.decode, step.decode_seconds, _about(group, step))


def _channel_events(groups: Groups, steps: Sequence[Step]) -> Iterator[Event]:
    for place, (group, step) in enumerate(zip(groups, steps, strict=True)):
        yield Event(f"communicate group {place}", CHANNEL, step.send, step.send_seconds, _about(group, step))


def _about(group: tuple[int, ...], step: Step) -> dict[str, float]:
    return {"tensors": len(group), "bytes": step.size_bytes}
