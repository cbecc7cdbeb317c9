"""Choose in the steps of a training which scheme sums tables, or whether stock DDP does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.comm.lane import Lane
from thinwire.errors import logger
from thinwire.gradients.ddp import ROWS, Plug
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.tables import LookupRows, weak
from thinwire.tune.playing import SETUP_SECONDS, Playing
from thinwire.tune.trial import Trial

STOCK = "stock DDP"
TAKEN = "another communication hook"
SEEN_STEPS = 8
"""Number of batches as rows, after which the schemes that may be faster than the choice are known."""
MOST_OFFERS = 3
"""Number of times that schemes are offered in a run; what there is to learn is learned then."""


class RowsChoice:
    """The choice between stock DDP and sums of rows by several schemes, see `thinwire.tune.trial`.

    Args:
        lane: the lane of all ranks.
        gradients: sums tables.
        plug: the plug of the model, which says whether stock is an arm.
        lookups: the watcher of lookups, which stock does not need.
        names: the tables.
        warm_up: loads the kernels; called before the first sum of rows that follows sums of stock.
    """

    def __init__(
        self,
        lane: Lane,
        gradients: GradientSync,
        plug: Plug,
        lookups: LookupRows,
        names: Sequence[str],
        warm_up: Callable[[], object],
    ) -> None:
        self._lane, self._gradients, self._lookups, self._warm_up = lane, gradients, lookups, warm_up
        self._names = list(names)
        self._plug = plug if plug.plays_stock else None
        arms = [STOCK, ROWS] if self._plug is not None else [ROWS]
        self.trial = Trial(arms, SETUP_SECONDS if self._plug is not None else 0.0)
        self._offers: set[tuple[str, ...]] = set()
        self._reason = ""
        self._is_asked = False
        self._playing = Playing(lane.agree, "sums of tables", self.trial, weak(self._turn))

    def finish_step(self, waited: float) -> None:
        """Decide how tables are summed in the next step."""
        self._playing.finish_step(waited)
        if self.trial.is_idle and not self.trial.standing:
            return
        if not self.trial.is_timed and self.trial.arm == ROWS and len(self._offers) < MOST_OFFERS:
            self._offer()
        reason = self.trial.explain()
        if reason != self._reason and not self.trial.is_timed:
            self._reason = reason
            if self.trial.arm == STOCK or self.trial.tests:
                self._gradients.explain(self._names, reason)
            if self.trial.tests and self._lane.rank == 0:
                logger.info("embedding tables are summed by %s", reason)

    def adopt(self, names: Sequence[str]) -> None:
        """Choose also for tables that the first step has shown."""
        self._names += names
        self._turn(self.trial.arm, not self.trial.is_timed)

    def state_dict(self) -> dict[str, Any]:
        """Return what was decided, which decides about bits of sums."""
        return {**self.trial.state_dict(), "world_size": self._lane.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a decision, if it is of as many ranks, and not for stock DDP where that is no option."""
        is_option = state["standing"] != STOCK or self._plug is not None
        if is_option and state.get("world_size", self._lane.world_size) == self._lane.world_size:
            self._is_asked = True  # at attach, and ranks do not meet in here
            if state["standing"] != STOCK:
                self._warm_up()
            self._playing.load_state_dict(state)

    def _offer(self) -> None:
        """Offer the schemes that prices in closed form cannot tell from the choice."""
        key, priced = self._gradients.rivals(SEEN_STEPS)
        names = (key, *(name for name, _ in priced))
        if priced and names not in self._offers:
            self._offers.add(names)
            self.trial.offer([f"{ROWS} by {name} for {key}" for name, _ in priced[1:]])
            self._playing.turn()

    def _turn(self, arm: str, stands: bool) -> None:
        gradients, is_stock = self._gradients, arm == STOCK
        gradients.is_stock = is_stock
        gradients.tried = None
        if arm not in (STOCK, ROWS):
            name, _, key = arm.removeprefix(f"{ROWS} by ").partition(" for ")
            gradients.tried = key, name
        if self._plug is None:
            return
        if is_stock:
            if stands:
                self._is_asked = False
                gradients.explain(self._names, self.trial.explain())
            if not self._lookups.candidates:  # else they are looked for in the first forward
                self._lookups.remove()
            self._plug.see(ROWS, False, stands)
        elif self._is_asked or self._may_see():
            self._lookups.install()
            self._plug.see(ROWS, True, stands)

    def _may_see(self) -> bool:
        """Decline if a script has registered a hook since `attach`, which is asked before rows; else load kernels."""
        assert self._plug is not None
        self._is_asked = True
        free = self._lane.agree(TAKEN, [float(self._plug.is_free)])
        if may := [0.0] not in free:
            self._warm_up()
        else:
            rank = self._lane.exchange.global_ranks[free.index([0.0])]
            self.trial.decline(f"{STOCK}: rank {rank} has registered {TAKEN}")
            self._playing.turn()
        return may
