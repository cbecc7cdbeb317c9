"""Random numbers that depend only on parameter, step and rank, so that a resumed run draws the same."""

from __future__ import annotations

from thinwire.compress.base import Parameter, State
from thinwire.wire import digest64


def counters() -> State:
    """Return the state of a compressor that draws: the step, and a salt that reductions set to the rank."""
    return {"step": 0, "salt": 0}


def next_seed(seed: int, parameter: Parameter, state: State) -> int:
    """Return the seed, 63 bits, of this step of a parameter on this rank, and advance the step in ``state``."""
    step = state["step"]
    state["step"] = step + 1
    return stable_seed(seed, parameter.name, step, state["salt"])


def stable_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on the parts alone: not on the process, the machine or the version of Python."""
    text = "\0".join(map(str, parts)).encode()
    return digest64(text) >> 1
