"""What was synchronized and what it cost: one line a parameter, and totals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Prediction = float | Callable[[], float]
"""Bytes, or what works them out: only the last step is ever asked for."""


@dataclass
class ParameterRecord:
    """The account of one parameter, or of all that are all-reduced together.

    ``step_*`` fields are of the last finished step, ``total_*`` fields sums over all steps; densities, scheme
    formats and ``fused`` are those of the last synchronization. Bytes of a synchronization of several parameters
    are shared out, so that sums over records are what was sent.
    """

    name: str
    kind: str = ""  # "sparse gradient", "dense gradient, rows known" or "... scanned", "all-reduce"
    scheme: str = ""
    formats: str = ""
    density: float = 1.0
    density_after: float = 1.0
    reason: str = ""  # of the scheme of the next step, where it was chosen
    fused: int = 1  # parameters in the synchronization that this one was part of
    step_bytes: int = 0
    step_dense_bytes: int = 0
    total_bytes: int = 0
    total_dense_bytes: int = 0
    steps: int = 0
    _sent: int = field(default=0, repr=False)
    _predicted: list[Prediction] = field(default_factory=list, repr=False)
    _step_predicted: list[Prediction] = field(default_factory=list, repr=False)
    _dense: int = field(default=0, repr=False)

    @property
    def step_predicted_bytes(self) -> float:
        """Worked out only when somebody asks."""
        return sum(entry() if callable(entry) else entry for entry in self._step_predicted)

    def add(self, sent_bytes: int, predicted_bytes: Prediction, dense_bytes: int) -> None:
        """Add one piece of the running step: bytes sent, predicted, and what stock DDP would send."""
        self._sent += sent_bytes
        self._predicted.append(predicted_bytes)
        self._dense += dense_bytes

    def leave(self, scheme: str) -> None:
        """From the next step on it is synchronized in its bucket, or counted when that is over."""
        self.scheme, self.formats, self.fused = scheme, "", 1

    def finish_step(self) -> None:
        """The running step becomes the last one, if anything was synchronized in it."""
        predicted, self._predicted = self._predicted, []
        if self._dense == 0 and self._sent == 0:
            return
        self.step_bytes, self._step_predicted, self.step_dense_bytes = self._sent, predicted, self._dense
        self.total_bytes += self._sent
        self.total_dense_bytes += self._dense
        self.steps += 1
        self._sent, self._dense = 0, 0

    def row(self) -> dict[str, str | int | float]:
        """One row of `Synchronizer.table`; bytes are those that this rank sent in the last step."""
        return {
            "name": self.name,
            "kind": self.kind,
            "density": self.density,
            "density_after": self.density_after,
            "scheme": self.scheme,
            "formats": self.formats,
            "fused": self.fused,
            "reason": self.reason,
            "bytes": self.step_bytes,
            "predicted_bytes": round(self.step_predicted_bytes),
            "dense_bytes": self.step_dense_bytes,
            "total_bytes": self.total_bytes,
            "steps": self.steps,
        }
