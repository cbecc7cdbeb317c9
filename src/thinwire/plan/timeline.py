"""The timeline of one iteration under a grouping: its length and its events.

One compute stream: backward in order; a group is compressed right after its last gradient, which delays what follows.
One channel, in order: a group starts when it is compressed and the channel is free. Decompression is on the compute
stream, in order of groups: after a group's arrival, and after all of backward. Time counts from the start of backward.

Where encoding and decoding run beside backward, on the thread that communicates, they are part of ``communicate``, and
``compress`` and ``decompress`` are Linear(0, 0).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from thinwire.observe.trace import Event
from thinwire.plan.profile import Groups, Profile, check_groups

COMPUTE, CHANNEL = "compute", "channel"


class Step(NamedTuple):
    """A group's work: start and seconds of each part."""

    size_bytes: float
    encode: float
    encode_seconds: float
    send: float
    send_seconds: float
    decode: float
    decode_seconds: float


def schedule(profile: Profile, groups: Groups) -> list[Step]:
    """Return the work of each group.

    Raises:
        ValueError: see `check_groups`.
    """
    check_groups(profile, groups)
    ready, ends = profile.ready_seconds, profile.end_bytes
    compress, communicate, decompress = profile.compress, profile.communicate, profile.decompress
    delay = channel = 0.0
    sent = []
    for group in groups:
        size, complete = ends[group[-1] + 1] - ends[group[0]], ready[group[-1] + 1]
        encode, encode_seconds = complete + delay, compress(size)
        delay += encode_seconds
        send, send_seconds = max(channel, complete + delay), communicate(size)
        channel = send + send_seconds
        sent.append((size, encode, encode_seconds, send, send_seconds, decompress(size)))
    clock = ready[-1] + delay
    steps = []
    for size, encode, encode_seconds, send, send_seconds, decode_seconds in sent:
        clock = max(clock, send + send_seconds)
        steps.append(Step(size, encode, encode_seconds, send, send_seconds, clock, decode_seconds))
        clock += decode_seconds
    return steps


def iteration_seconds(profile: Profile, groups: Groups) -> float:
    """Return seconds from the start of backward until the last group is decompressed, without the rest of the step.

    Raises:
        ValueError: see `check_groups`.

    Example:
        >>> free, link = Linear(0, 0), Linear(alpha=1, beta=1)
        >>> profile = Profile([2, 2], [3, 3], free, free, link)
        >>> iteration_seconds(profile, ((0,), (1,))), iteration_seconds(profile, ((0, 1),))
        (10.0, 11.0)
    """
    last = schedule(profile, groups)[-1]
    return last.decode + last.decode_seconds


def events(profile: Profile, groups: Groups) -> tuple[Event, ...]:
    """Return the events of an iteration, in order of time on each track: "compute" and "channel".

    Raises:
        ValueError: see `check_groups`.
    """
    steps = schedule(profile, groups)
    return *_compute_events(profile, groups, steps), *_channel_events(groups, steps)


def _compute_events(profile: Profile, groups: Groups, steps: Sequence[Step]) -> Iterator[Event]:
    """Yield backward of each tensor, and all encoding and decoding that costs any time."""
    for number, (group, step) in enumerate(zip(groups, steps, strict=True)):
        delay = step.encode - profile.ready_seconds[group[-1] + 1]
        for tensor in group:
            name = profile.names[tensor] if profile.names else f"tensor {tensor}"
            start = profile.ready_seconds[tensor] + delay
            seconds = profile.backward_seconds[tensor]
            yield Event(f"backward {name}", COMPUTE, start, seconds, {"bytes": profile.size_bytes[tensor]})
        if step.encode_seconds:
            yield Event(f"encode group {number}", COMPUTE, step.encode, step.encode_seconds, _about(group, step))
    for number, (group, step) in enumerate(zip(groups, steps, strict=True)):
        if step.decode_seconds:
            yield Event(f"decode group {number}", COMPUTE, step.decode, step.decode_seconds, _about(group, step))


def _channel_events(groups: Groups, steps: Sequence[Step]) -> Iterator[Event]:
    for number, (group, step) in enumerate(zip(groups, steps, strict=True)):
        yield Event(f"communicate group {number}", CHANNEL, step.send, step.send_seconds, _about(group, step))


def _about(group: tuple[int, ...], step: Step) -> dict[str, float]:
    return {"tensors": len(group), "bytes": step.size_bytes}
