"""Random numbers that follow from what is drawn, so that a run that is resumed draws the same."""

from __future__ import annotations

from thinwire.compress.base import Parameter, State
from thinwire.wire import digest64


def counters() -> State:
    """State of a compressor that draws: the step, and a salt that reductions set to the rank, so that ranks differ."""
    return {"step": 0, "salt": 0}


def next_seed(seed: int, parameter: Parameter, state: State) -> int:
    """The seed, 63 bits, of this step of a parameter on this rank; the step in ``state`` moves on."""
    step = state["step"]
    state["step"] = step + 1
    return stable_seed(seed, parameter.name, step, state["salt"])


def stable_seed(*parts: int | str) -> int:
    """63 bits that depend on the parts alone: not on the process, the machine or the version of Python."""
    text = "\0".join(map(str, parts)).encode()
    return digest64(text) >> 1
