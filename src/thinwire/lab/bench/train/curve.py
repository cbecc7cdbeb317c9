"""Held-out loss against steps and seconds: smoothing, the final loss, the time to a given loss. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

EVALUATIONS = 30
"""Number of evaluations in a run without its extra steps; the last tenth of them is the end of the run."""
TOLERANCE = 0.001
"""Relative difference up to which two losses count as equal: 0.1 %; another seed makes a larger one."""


def reached_at(loss: float) -> float:
    """Return the largest loss that counts as having reached ``loss``."""
    return loss + TOLERANCE * abs(loss)


def evaluation_steps(steps: int) -> tuple[int, ...]:
    """Return the steps (from 1) after which the held-out loss is measured: thirty, evenly spread up to the last."""
    return tuple(sorted({max(1, round(steps * (i + 1) / EVALUATIONS)) for i in range(EVALUATIONS)}))


def window_of(steps: int) -> int:
    """Return the number of evaluations in the last tenth of a run, at least one: the width of the smoothing."""
    return sum(step > 0.9 * steps for step in evaluation_steps(steps))


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Return trailing means of ``window`` losses; the first ones over fewer losses.

    >>> smoothed([3.0, 1.0, 2.0], 2)
    [3.0, 2.0, 1.5]
    """
    return [sum(part) / len(part) for i in range(len(losses)) if (part := losses[max(0, i - window + 1) : i + 1])]


@dataclass(frozen=True)
class LossCurve:
    """Held-out losses with the steps and seconds of training before each.

    Args:
        steps: strictly increasing; those beyond ``planned_steps`` are extra.
        seconds: seconds of training, without the evaluations.
        losses: losses in nats.
        planned_steps: number of steps without the extra ones.
    """

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    planned_steps: int

    @property
    def smoothed(self) -> list[float]:
        """Losses smoothed over the number of evaluations in the last 10 % of the steps."""
        return smoothed(self.losses, window_of(self.planned_steps))

    @property
    def final_loss(self) -> float:
        """Mean of the held-out losses in the last 10 % of the planned steps."""
        return self.smoothed[sum(step <= self.planned_steps for step in self.steps) - 1]

    def seconds_to(self, loss: float) -> float | None:
        """Return the time at which the smoothed loss first was at most ``loss``, interpolated; None if it never was."""
        reached, points = self.smoothed, list(self.seconds)
        for i, value in enumerate(reached):
            if value <= loss:
                if i == 0 or not reached[i - 1] > loss:
                    return points[i]
                share = (reached[i - 1] - loss) / (reached[i - 1] - value)
                return points[i - 1] + share * (points[i] - points[i - 1])
        return None
