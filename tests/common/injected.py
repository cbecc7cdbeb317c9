"""Faults that strike a chosen rank at a chosen step, to test the reaction of the other ranks."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal


class InjectedFault(RuntimeError):
    """Error that `Faults.fail` makes a rank raise."""


@dataclass(frozen=True)
class Fault:
    """One planned fault; `seconds` is the length of a pause, `at` the point within the step, or its start."""

    kind: Literal["kill", "fail", "pause"]
    rank: int
    step: int
    seconds: float = 0.0
    at: str = ""

    def __post_init__(self) -> None:
        for name in ("rank", "step", "seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of a fault must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class Faults:
    """A plan of faults, made by chaining; every rank calls `strike` at the start of every step.

    faults = Faults().kill(rank=2, step=3).pause(rank=0, step=2, seconds=1.0)
    for step in range(10):
        faults.strike(context.rank, step)

    Code with points within a step at which a fault can strike calls `strike` there too, with the name of the point.
    """

    planned: tuple[Fault, ...] = ()

    def kill(self, rank: int, step: int, at: str = "") -> Faults:
        """Plan that `rank` sends itself SIGKILL: the machine is gone, nothing is cleaned up."""
        return self._and(Fault("kill", rank, step, at=at))

    def fail(self, rank: int, step: int, at: str = "") -> Faults:
        """Plan that `rank` raises InjectedFault: an error in the program."""
        return self._and(Fault("fail", rank, step, at=at))

    def pause(self, rank: int, step: int, seconds: float, at: str = "") -> Faults:
        """Plan that `rank` sleeps: a straggler."""
        return self._and(Fault("pause", rank, step, seconds, at))

    def strike(self, rank: int, step: int, at: str = "") -> None:
        """Execute the faults planned for `rank` at this point of `step`, in the order of planning."""
        for fault in self.planned:
            if (fault.rank, fault.step, fault.at) == (rank, step, at):
                _strike(fault)

    def _and(self, fault: Fault) -> Faults:
        return Faults((*self.planned, fault))


def _strike(fault: Fault) -> None:
    if fault.kind == "pause":
        time.sleep(fault.seconds)
    elif fault.kind == "fail":
        raise InjectedFault(f"injected fault on rank {fault.rank} at step {fault.step}")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """Stop this process as SIGSTOP does, for so long."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)
