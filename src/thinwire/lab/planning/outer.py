"""The price of an outer loop, an option that changes the algorithm: it is named where it would help, never chosen."""

import math
from dataclasses import dataclass, replace

from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.tables import row_jobs
from thinwire.outer.recipe import LEAST_ROUNDS
from thinwire.plan.text import format_bytes, format_seconds
from thinwire.rows.formats import ring_all_reduce_bytes

EVERY = 32
"""Inner steps of a round: DiLoCo was trained with 50 to 500 and loses less with fewer."""
DOMINATES = 0.5
"""Share of the best step that waits for the network, above which an outer loop is named."""
WORTH = 1.5
"""Least ratio of the best step to that of the outer loop with which it is named."""
GUIDE = "docs/guides/outer.md"


@dataclass(frozen=True)
class OuterOption:
    """The price of ``thinwire.outer.diloco(every=...)``, without compression.

    Args:
        every: inner steps of a round.
        sent_bytes: bytes that the busiest rank sends, in a step on average.
        exposed_seconds: seconds of a step in which training waits, on average; rounds are not hidden.
        step_seconds: predicted seconds of a step, on average.
        best_step_seconds: seconds of a step with the best way to synchronize each gradient.
    """

    every: int
    sent_bytes: float
    exposed_seconds: float
    step_seconds: float
    best_step_seconds: float

    @property
    def recipe(self) -> str:
        return f"diloco(every={self.every})"

    @property
    def lines(self) -> list[str]:
        """The lines to paste."""
        call = f"thinwire.outer.attach(model, optimizer, thinwire.outer.{self.recipe})"
        return ["import thinwire", f"loop = {call}"]

    @property
    def where(self) -> str:
        """Where the lines belong, and what their names stand for."""
        return (
            "before the first step, with `model` the plain module on every rank, without DistributedDataParallel, and"
            " `optimizer` its optimizer"
        )

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "recipe": self.recipe, "lines": self.lines, "where": self.where, "guide": GUIDE}

    def describe(self) -> list[str]:
        """Return a paragraph with the lines to paste, and an empty line before it."""
        seconds, waiting = format_seconds(self.step_seconds), format_seconds(self.exposed_seconds)
        return [
            "",
            f"Even so most of a step waits for the network. Another algorithm, {self.recipe}, would send"
            f" {format_bytes(self.sent_bytes)} a step: {seconds} a step are predicted, {waiting} of them waiting,"
            f" {self.best_step_seconds / self.step_seconds:.1f} times as fast.",
            f"Ranks then train apart for {self.every} steps at a time, which changes the loss: with fewer than"
            f" {LEAST_ROUNDS} rounds, {LEAST_ROUNDS * self.every:,} steps, it ended 11 to 44 % above; see {GUIDE}. If"
            f" you want that, add instead, {self.where}:",
            "",
            *(f"    {line}" for line in self.lines),
        ]


def outer_option(measurement: Measurement, step_seconds: float, computing_seconds: float) -> OuterOption | None:
    """Return the outer loop for a measured training; None where it would not be `WORTH` times as fast, or where the
    network does not dominate.

    A round all-reduces the differences of all parameters in one job. Of a table it sends the rows that were touched
    since the last round: at most ``every`` times the rows of a step, and no more than there are.

    Args:
        step_seconds: seconds of a step under the best way to synchronize each gradient.
        computing_seconds: seconds of a step without waiting for the network.
    """
    costs = measurement.costs()
    everything = range(len(measurement.parameters))
    sent_bytes = ring_all_reduce_bytes(sum(measurement.size_bytes), measurement.world_size)
    seconds = costs.seconds(everything) if everything else 0.0
    tables = [
        replace(
            table,
            held=tuple(min(table.num_rows, EVERY * rows) for rows in table.held),
            union=min(table.num_rows, EVERY * table.union),
        )
        for table in measurement.tables
    ]
    jobs = row_jobs(tables, measurement.link, measurement.alike)
    exposed = (seconds + math.fsum(job.seconds for job in jobs)) / EVERY
    sent = (sent_bytes + math.fsum(job.sent_bytes for job in jobs)) / EVERY
    option = OuterOption(EVERY, sent, exposed, computing_seconds + exposed, step_seconds)
    is_dominated = step_seconds - computing_seconds > DOMINATES * step_seconds
    return option if is_dominated and step_seconds >= WORTH * option.step_seconds else None
