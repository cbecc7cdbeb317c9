"""Results of `thinwire analyze`: plain values for JSON, and the facts of a run in words."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from thinwire.lab.analyze.prediction import DEFAULT_LINK, AssumedLink, Prediction, predict_dense
from thinwire.lab.analyze.recording import Recording, Table
from thinwire.lab.analyze.statistics import TableStatistics, table_statistics
from thinwire.lab.bench.trace import IndexTrace
from thinwire.lab.text import counted

EXTRAPOLATION = (
    "The union on more ranks than were recorded is extrapolated by gamma = n^a, fitted to the recorded curve, and"
    " capped at the number of rows."
)


@dataclass(frozen=True)
class StepTotal:
    """Predicted bytes that a rank sends for all parameters in a step, and the seconds, none of them hidden."""

    name: str
    bytes: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Analysis:
    """A recording with the statistics of its sparse tables, largest table first."""

    script: str
    steps_wanted: int
    recording: Recording
    sparse: tuple[TableStatistics, ...]
    network: AssumedLink = DEFAULT_LINK

    @classmethod
    def of(cls, recording: Recording, script: str, steps_wanted: int, network: AssumedLink = DEFAULT_LINK) -> Self:
        """Compute all statistics, and predict seconds for ``network``."""
        tables = sorted(recording.tables, key=lambda table: -table.size_bytes)
        sparse = tuple(
            table_statistics(table.name, recording.traces[table.name], table.torch_dtype, network)
            for table in tables
            if table.name in recording.traces
        )
        return cls(script, steps_wanted, recording, sparse, network)

    @property
    def others(self) -> list[Table]:
        """Tables without statistics: dense ones and small ones, largest first."""
        rest = [table for table in self.recording.tables if table.name not in self.recording.traces]
        return sorted(rest, key=lambda table: -table.size_bytes)

    @property
    def conditions(self) -> str:
        """Description of the run in one line."""
        recording = self.recording
        steps = counted(recording.num_steps, "step")
        if recording.num_steps < self.steps_wanted:
            steps += f" (the script ended before the {self.steps_wanted} asked for)"
        tables = f"{len(self.sparse)} of {len(recording.tables)} parameters are sparse tables"
        return f"{self.script} on {recording.world_size} workers, {steps}: {tables}"

    @property
    def totals(self) -> tuple[StepTotal, ...]:
        """Stock DDP with dense tables, with sparse=True, and thinwire, on the recorded ranks."""
        ranks = self.recording.world_size
        rest = sum(table.size_bytes for table in self.others)
        sent, seconds = predict_dense(rest, ranks, self.network.machine(ranks)) if rest else (0.0, 0.0)
        tables = [table.here for table in self.sparse]
        totals = {
            "stock DDP": [(each.bytes["dense"], each.seconds["dense"]) for each in tables],
            "stock DDP, sparse=True": [(each.torch_bytes, each.torch_seconds) for each in tables],
            "thinwire": [(each.bytes[each.pick], each.seconds[each.pick]) for each in tables],
        }
        return tuple(
            StepTotal(name, sent + sum(each[0] for each in each_table), seconds + sum(each[1] for each in each_table))
            for name, each_table in totals.items()
        )

    def largest_trace(self) -> IndexTrace:
        """Return the ids of the largest sparse table. Raises ValueError if there is none."""
        if not self.sparse:
            raise ValueError(
                "no parameter has a sparse gradient (2-D, at least 16 KiB, fewer than half of the rows non-zero in"
                " every step), so there is no trace to record"
            )
        return self.recording.traces[self.sparse[0].name]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of ``thinwire analyze --json``; bytes and seconds are per rank and step."""
        return {
            "script": self.script,
            "workers": self.recording.world_size,
            "steps": self.recording.num_steps,
            "steps_wanted": self.steps_wanted,
            "extrapolation": EXTRAPOLATION,
            "machine": self.network.to_json(self.recording.world_size),
            "totals": [asdict(total) for total in self.totals],
            "parameters": [_sparse_json(table) for table in self.sparse],
            "others": [
                {**asdict(table), "density_mean": float(self.recording.densities[table.name].mean())}
                for table in self.others
            ],
        }


def warnings_of(table: TableStatistics) -> list[str]:
    """Return in words, once each, why some numbers are impossible, so that dense is picked."""
    warned = dict.fromkeys(prediction.warning for prediction in table.predictions if prediction.warning)
    return [f"Warning: {warning}." for warning in warned]


def explanations(table: TableStatistics) -> list[str]:
    """Return the reasons for thinwire's choice: on the recorded ranks, and wherever fewer ranks pick otherwise."""
    lines, before = [], None
    for prediction in table.predictions:
        changed = before is not None and before != prediction.pick
        if prediction.warning is None and (changed or prediction.world_size == table.world_size):
            lines.append(prediction.explanation)
        before = prediction.pick
    return lines


def _sparse_json(table: TableStatistics) -> dict[str, Any]:
    figures = {name: value for name, value in asdict(table).items() if name != "overlaps"}
    return {
        **figures,
        "overlap_quantiles": table.overlap_quantiles,
        "pick": table.here.pick,
        "predictions": [_prediction_json(prediction, table) for prediction in table.predictions],
    }


def _prediction_json(prediction: Prediction, table: TableStatistics) -> dict[str, Any]:
    """The prediction, with the exact bytes of the recorded ids if it is for the recorded number of ranks."""
    recorded = prediction.world_size == table.world_size
    return {**asdict(prediction), "exact_bytes": table.sent_bytes if recorded else None}
