"""The statistics of a timeline: what computes, what communicates, what waits, and the communication that is hidden."""

import math
from dataclasses import dataclass
from itertools import pairwise

from thinwire.observe.trace import Event
from thinwire.plan.profile import Groups, Profile
from thinwire.plan.timeline import CHANNEL, COMPUTE, events, schedule


@dataclass(frozen=True)
class Timeline:
    """One simulated iteration and its statistics; all in seconds.

    Attributes:
        events: events of the tracks "compute" and "channel", in order of time on each.
        iteration_seconds: see `iteration_seconds`.
        compute_busy_seconds: backward + encode + decode.
        channel_busy_seconds: communication of all groups.
        exposed_seconds: communication that computing waits for: iteration = compute busy + exposed.
        overlapped_seconds: communication beside computing: channel busy = exposed + overlapped. P(X) of Cupcake.
        bubbles: start and seconds of each gap between two communications, in which the channel waits for gradients.
    """

    events: tuple[Event, ...]
    iteration_seconds: float
    compute_busy_seconds: float
    channel_busy_seconds: float
    exposed_seconds: float
    overlapped_seconds: float
    bubbles: tuple[tuple[float, float], ...]

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Busy seconds of each track."""
        return {COMPUTE: self.compute_busy_seconds, CHANNEL: self.channel_busy_seconds}


def simulate(profile: Profile, groups: Groups) -> Timeline:
    """Simulate, event by event, the iteration that `iteration_seconds` prices. Errors are the same.

    Example:
        >>> free, link = Linear(0, 0), Linear(alpha=1, beta=1)
        >>> line = simulate(Profile([2, 2], [3, 3], free, free, link), ((0,), (1,)))
        >>> line.exposed_seconds, line.overlapped_seconds, line.bubbles
        (6.0, 2.0, ())
    """
    steps = schedule(profile, groups)
    total = steps[-1].decode + steps[-1].decode_seconds
    computing = math.fsum((*profile.backward_seconds, *(step.encode_seconds + step.decode_seconds for step in steps)))
    channel = math.fsum(step.send_seconds for step in steps)
    exposed = min(channel, max(0.0, total - computing))  # rounding is no exposure
    gaps = [
        (earlier.send + earlier.send_seconds, later.send - (earlier.send + earlier.send_seconds))
        for earlier, later in pairwise(steps)
    ]
    return Timeline(
        events=events(profile, groups),
        iteration_seconds=total,
        compute_busy_seconds=computing,
        channel_busy_seconds=channel,
        exposed_seconds=exposed,
        overlapped_seconds=channel - exposed,
        bubbles=tuple((start, seconds) for start, seconds in gaps if seconds > 0),
    )
