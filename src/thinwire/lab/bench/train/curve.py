"""Held-out loss against steps and seconds: smoothing, the final loss, the time to a given loss. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVALUATIONS = 30
"""Of a run without its extra steps; the last tenth of them is the end of the run."""


def evaluation_steps(steps: int) -> tuple[int, ...]:
    """After which steps (from 1) the held-out loss is measured: thirty times, evenly, the last after the last step."""
    return tuple(sorted({max(1, round(steps * (i + 1) / EVALUATIONS)) for i in range(EVALUATIONS)}))


def window_of(steps: int) -> int:
    """Evaluations in the last tenth of a run, at least one: the width of the smoothing."""
    return sum(step > 0.9 * steps for step in evaluation_steps(steps))


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Trailing means of ``window`` losses; the first ones of as many as there are.

    >>> smoothed([3.0, 1.0, 2.0], 2)
    [3.0, 2.0, 1.5]
    """
    return [sum(part) / len(part) for i in range(len(losses)) if (part := losses[max(0, i - window + 1) : i + 1])]


@dataclass(frozen=True)
class LossCurve:
    """Held-out losses, each after so many steps and seconds of training.

    Args:
        steps: strictly increasing; those beyond ``planned_steps`` are extra.
        seconds: of training, without the evaluations.
        losses: in nats.
        planned_steps: of the run without the extra ones.
    """

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    planned_steps: int

    @property
    def smoothed(self) -> list[float]:
        """The losses, smoothed as wide as the end of the run: 10 % of its steps."""
        return smoothed(self.losses, window_of(self.planned_steps))

    @property
    def final_loss(self) -> float:
        """Mean of the held-out losses in the last 10 % of the planned steps."""
        return self.smoothed[sum(step <= self.planned_steps for step in self.steps) - 1]

    def seconds_to(self, loss: float) -> float | None:
        """When the smoothed loss first was at most this, interpolated between evaluations; None if it never was."""
        reached, points = self.smoothed, list(self.seconds)
        for i, value in enumerate(reached):
            if value <= loss:
                if i == 0 or not reached[i - 1] > loss:
                    return points[i]
                share = (reached[i - 1] - loss) / (reached[i - 1] - value)
                return points[i - 1] + share * (points[i] - points[i - 1])
        return None
