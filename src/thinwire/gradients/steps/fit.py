"""Fit a `thinwire.plan.Profile` to measurements of all ranks over a few steps. Pure: equal numbers, equal profile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np

from thinwire.observe.step import Load, StepTimes, differences, median_of_slowest
from thinwire.plan.profile import Linear, Profile

_SHORTEST_SECONDS = 1e-9  # of a job shorter than the clock's resolution
_NO_BETTER = 1e-12  # a smaller gain in squared error is rounding


@dataclass(frozen=True)
class JobCosts:
    """Costs in seconds of a job of the lane.

    Args:
        job: cost of its headers.
        exact, compressed: fixed cost of having gradients of that kind at all.
        exact_byte, compressed_byte: cost of each of their bytes.
        compressed_tensor: cost of each compressed gradient.
    """

    job: float
    exact: float
    compressed: float
    exact_byte: float
    compressed_byte: float
    compressed_tensor: float

    @classmethod
    def fit(cls, loads: Sequence[Load], seconds: Sequence[float]) -> JobCosts:
        """Fit non-negative costs of least relative squares.

        The costs are few, so every subset that may be above zero is tried.
        """
        design = np.array([_counted(load) for load in loads], np.float64) / np.array(seconds, np.float64)[:, None]
        best, costs = math.inf, np.zeros(design.shape[1])
        columns = np.flatnonzero(design.any(0)).tolist()
        sizes = range(1, len(columns) + 1)  # small ones first, so that a cost that adds nothing stays 0
        for chosen in chain.from_iterable(combinations(columns, size) for size in sizes):
            part, *_ = np.linalg.lstsq(design[:, chosen], np.ones(len(design)), rcond=None)
            error = float(np.square(design[:, chosen] @ part - 1.0).sum())
            if (part >= 0.0).all() and error < best - _NO_BETTER:
                best, costs = error, np.zeros(design.shape[1])
                costs[list(chosen)] = part
        return cls(*map(float, costs))

    def of_tensors(self, load: Load) -> float:
        """Return the seconds of a load's tensors, without the fixed costs of a job."""
        compressed = load.num_compressed * self.compressed_tensor + load.compressed_bytes * self.compressed_byte
        return compressed + load.exact_bytes * self.exact_byte

    def of_job(self, loads: Sequence[Load]) -> float:
        """Return the fixed seconds of a job that has all these loads."""
        exact, compressed = any(load.exact_bytes for load in loads), any(load.compressed_bytes for load in loads)
        return self.job + exact * self.exact + compressed * self.compressed


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank over some steps, in which all ranks submitted the same jobs.

    Args:
        gradients: load of each gradient alone, in the order in which they become ready.
        loads: loads of each job, step by step; the same on all ranks.
        numbers: seconds at which gradients were ready, then seconds of jobs, on this rank; equally many on all ranks.
    """

    gradients: tuple[Load, ...]
    loads: tuple[tuple[Load, ...], ...]
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, gradients: Sequence[Load], steps: Sequence[StepTimes]) -> Measured:
        ready = [step.moment(gradient.name) - step.started for step in steps for gradient in gradients]
        jobs = [[job for job in step.jobs if job.load.size_bytes > 0] for step in steps]
        seconds = [job.seconds for of_step in jobs for job in of_step]
        loads = tuple(tuple(job.load for job in of_step) for of_step in jobs)
        return cls(tuple(gradients), loads, (*ready, *seconds))

    def profile(self, gathered: Sequence[Sequence[float]]) -> Profile:
        """Return the profile of all ranks: medians over the steps.

        A gradient is ready when the slowest rank has it. A job costs the seconds of the rank that came last to it and
        waited for nobody. Encoding and decoding run on the lane, beside backward, so they are part of communicating.

        The bytes of all tensors are shared out by their seconds: each compressed tensor has a cost of its own, so
        small ones count more bytes than they have.

        Args:
            gathered: the numbers of each rank.
        """
        count = len(self.gradients)
        num_ready = count * len(self.loads)
        ready = median_of_slowest([of_rank[:num_ready] for of_rank in gathered], count)
        last = [min(times) for times in zip(*(of_rank[num_ready:] for of_rank in gathered), strict=True)]
        costs = self._costs(last)
        seconds = [costs.of_tensors(gradient) for gradient in self.gradients]
        sizes = tuple(gradient.size_bytes for gradient in self.gradients)
        byte_seconds = sum(seconds) / max(1, sum(sizes))
        return Profile(
            backward_seconds=differences(ready),
            size_bytes=tuple(each / byte_seconds for each in seconds) if byte_seconds else sizes,
            compress=Linear(0.0, 0.0),
            decompress=Linear(0.0, 0.0),
            communicate=Linear(costs.of_job(self.gradients), byte_seconds),
            names=tuple(gradient.name for gradient in self.gradients),
        )

    def in_bytes(self, profile: Profile) -> Profile:
        """Return the profile with the tensors' real bytes, for policies that count those."""
        return replace(profile, size_bytes=tuple(gradient.size_bytes for gradient in self.gradients))

    def _costs(self, seconds: Sequence[float]) -> JobCosts:
        alike: dict[tuple[int, int, Load], list[float]] = {}
        remaining = iter(seconds)
        for of_step in self.loads:
            for number, load in enumerate(of_step):
                alike.setdefault((len(of_step), number, load), []).append(next(remaining))
        medians = {key: max(_SHORTEST_SECONDS, statistics.median(times)) for key, times in alike.items()}
        return JobCosts.fit([load for _, _, load in medians], list(medians.values()))


def _counted(load: Load) -> tuple[float, ...]:
    """Return the counts of a load in the order of the fields of `JobCosts`."""
    exact, compressed = float(load.exact_bytes > 0), float(load.compressed_bytes > 0)
    return 1.0, exact, compressed, load.exact_bytes, load.compressed_bytes, load.num_compressed
