"""What the timeline remembers of the groups so far, for many plans at once; and how one more group changes it.

A state is a way to group, and with several modes to send, the first tensors. It is a column of

    delay      seconds of compression so far: the compute stream is at ready(tensors) + delay
    channel    when the channel is free
    decoded    when the groups so far would be decompressed, if decompression had not to wait for backward
    decoding   seconds of decompression so far

and of the bytes before the next group, and the state's number. The iteration ends at
max(ready(all) + delay + decoding, decoded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Places = NDArray[np.intp]

Cost = Callable[[Any], Any]
"""Seconds of an array of bytes: a `Linear`, or any function that is not negative and does not fall as bytes grow."""

DELAY, CHANNEL, DECODED, DECODING, START_BYTES, NUMBER = range(6)
CLOCKS = slice(DELAY, START_BYTES)


@dataclass(frozen=True)
class Mode:
    """A way to send a group: what each part of it costs."""

    compress: Cost
    communicate: Cost
    decompress: Cost


def nothing_sent() -> Array:
    """The one state of no tensors."""
    return np.zeros((6, 1))


def extended(states: Array, mode: Mode, ready: float, end_bytes: float) -> Array:
    """The states after one more group, whose last gradient backward alone has at ``ready``.

    Args:
        states: [6, states], of any numbers of tensors.
        end_bytes: of all tensors up to the group's last one.
    """
    size = end_bytes - states[START_BYTES]
    decompress = mode.decompress(size)
    after = states.copy()
    after[DELAY] += mode.compress(size)
    after[CHANNEL] = np.maximum(states[CHANNEL], ready + after[DELAY]) + mode.communicate(size)
    after[DECODED] = np.maximum(states[DECODED], after[CHANNEL]) + decompress
    after[DECODING] += decompress
    return after


def criteria(states: Array) -> Array:
    """[4, states]: the iteration grows in each. A state that is no smaller in any than another one can be dropped."""
    delay, channel, decoded, decoding = states[CLOCKS]
    return np.stack([delay, delay + decoding, channel, decoded])
