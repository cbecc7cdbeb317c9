"""Governor of the interval between two checkpoints: what they cost a training stays below a share of its time.

Iterations in which a version is copied or sent (loaded) are compared with those in which none is (free). Both kinds
alternate, and medians are compared, so a disturbance of the machine that lasts longer than a few iterations, or less
than one, moves neither. Where versions leave no iteration free, one is left out now and then.
"""

import math
import threading
from collections import deque
from statistics import median

from thinwire.errors import logger

_UNGOVERNED = 20  # iterations at the start: protection comes first, and they are slow
_FEW = 3  # versions, and free iterations, before their medians are believed
_VERSIONS, _FREE = 9, 20  # over which medians are taken
_PROBE_VERSIONS = 10  # one of so many is left out where no iteration would be free
_RARE_PROBE_VERSIONS = 100  # where next to nothing is sent
_AIM = 0.8  # of the share is used: costs vary by a fifth from one version to the next
_MARGIN = 2.0  # a version may become that much cheaper before more of them are made
_MOST = 10_000
_SHARE, _LEAST_SECONDS = 0.05, 0.01  # of "auto"


class Governor:
    """The number of steps between two checkpoints, from their measured cost.

    The trainer's thread calls `note_iteration` and `note_begun`, any thread `note_sent`. ``next_step`` is the step of
    the next checkpoint, the same on all ranks, which agree on the greatest `stride` of theirs (`agree`).

    Args:
        max_overhead: share of the time of training that checkpoints may cost; None for no limit, "auto" for 5 % of an
            iteration, or 10 ms if that is more: small states are then kept at every step of fast iterations.
        every: steps between two checkpoints at least; a stride counts multiples of it.
        most_steps: steps between two checkpoints at most.
    """

    def __init__(self, max_overhead: float | str | None = None, every: int = 1, most_steps: int | None = None) -> None:
        self._least_seconds = _LEAST_SECONDS if max_overhead == "auto" else 0.0
        share = _SHARE if max_overhead == "auto" else max_overhead
        if share is not None and (isinstance(share, str) or not share > 0):
            raise ValueError(
                f"max_overhead={max_overhead!r}: a share of the training's time such as 0.05, 'auto' or None"
            )
        self.max_overhead, self._every = share, every
        self._most = max(1, (_MOST if most_steps is None else most_steps) // every)
        self._free: deque[float] = deque(maxlen=_FREE)
        self._costs: deque[float] = deque(maxlen=_VERSIONS)
        self._spans: deque[int] = deque(maxlen=_FEW)  # loaded iterations of each version
        self._loaded, self._loaded_seconds = 0, 0.0  # iterations since the last version began, and their lengths
        self._iterations, self._versions, self._wanted, self._has_warned = 0, 0, 1, False
        self._in_flight = threading.Event()
        self.is_loaded = False  # the iteration that runs now
        self.needs_free = False  # whether the pacer profiles the network in them
        self.sends_little = False  # because nearly all of a version is what ranks have in common
        self.next_step, self._agreed = 0, 1

    @property
    def every(self) -> int:
        """Steps between two checkpoints at present."""
        return self._agreed * self._every

    def note_iteration(self, seconds: float) -> None:
        """Record the length of the iteration that ends now."""
        self._iterations += 1
        if self.is_loaded:
            self._loaded, self._loaded_seconds = self._loaded + 1, self._loaded_seconds + seconds
        else:
            self._free.append(seconds)
        self.is_loaded = self._in_flight.is_set()

    def note_begun(self) -> None:
        """Record that a version is made at the start of this iteration."""
        if self._versions and self._loaded:
            self._spans.append(self._loaded)
            if self._free:
                self._costs.append(self._loaded_seconds - self._loaded * median(self._free))
        self._loaded, self._loaded_seconds, self.is_loaded = 0, 0.0, True
        self._versions += 1
        self._in_flight.set()

    def note_sent(self) -> None:
        """Record that all peers have the version."""
        self._in_flight.clear()

    @property
    def cost_seconds(self) -> float | None:
        """Seconds by which a version lengthens training, median of the last 9; None while too little is known."""
        known = min(len(self._costs), len(self._free)) >= _FEW
        return max(0.0, median(self._costs)) if known else None

    @property
    def overhead(self) -> float:
        """Share of the time of training that checkpoints cost at the present interval; 0 while it is not known."""
        cost = self.cost_seconds
        return cost / (self.every * median(self._free)) if cost is not None else 0.0

    @property
    def stride(self) -> int:
        """The interval that this rank wants now, in multiples of ``every``."""
        cost, wanted = self.cost_seconds, 1
        if self.max_overhead is not None and cost is not None:
            budget = max(self.max_overhead * median(self._free), self._least_seconds) * self._every
            if not cost <= budget * self._wanted <= _MARGIN * cost + budget:
                self._wanted = max(1, min(math.ceil(cost / budget / _AIM), self._most))
            wanted = self._wanted
        if self.max_overhead is not None and self._probes(cost):
            wanted = max(wanted, math.ceil((1 + max(self._spans, default=1)) / self._every))
        return max(1, min(wanted, self._most))

    def _probes(self, cost: float | None) -> bool:
        rate = _RARE_PROBE_VERSIONS if self.sends_little else _PROBE_VERSIONS
        wants = cost is None or self.needs_free or self._versions % rate == 0
        return wants and self._iterations >= _UNGOVERNED

    def agree(self, step: int, stride: int) -> None:
        """Record that the ranks make a checkpoint of ``step``, and the next one that many multiples later."""
        self.next_step, self._agreed = step + stride * self._every, stride
        cost = self.cost_seconds
        if stride > 1 and cost is not None and self._wanted > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a checkpoint lengthens training by %.0f ms, and an iteration takes %.0f ms: one is made every %s steps"
                " to keep max_overhead=%s, so a failure may cost that many more steps (checkpoint/at_risk_steps)",
                1e3 * cost, 1e3 * median(self._free), stride * self._every, self.max_overhead,
            )  # fmt: skip

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of ``step`` is to be made."""
        return step % self._every == 0 and step >= self.next_step
