"""What rounds in step with training and rounds in the background have in common: ranks that meet, average and go on."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging
from thinwire.errors import ThinwireError
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import Averager, RoundReport, T
from thinwire.outer.members import Members, Roll, hand_over
from thinwire.outer.recipe import OuterRecipe

ENDING = 1
"""Flag of a rank that wants rounds to end, which they do once all ranks have it."""
ASKED = 2
"""Flag of a rank that knows of a process that waits to be let in."""
FITS = "new ranks can take it"


class Rounds(ABC):
    """The rounds of a model. Hooks of the optimizer hold it; it holds no module.

    Its methods belong to the thread of training, but for jobs of the lane, which have a lane as an argument.

    Args:
        staging: the way of differences to the lane, and back.
        text: what ranks have to agree on, with what the averager describes.
        untrained: returns the tensors by name that newcomers take besides anchors.
    """

    def __init__(
        self,
        recipe: OuterRecipe,
        anchors: Anchors,
        averager: Averager,
        lane: Lane,
        staging: Staging,
        text: str,
        untrained: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._recipe, self.anchors, self.averager, self.lane = recipe, anchors, averager, lane
        self._staging, self._text, self._untrained = staging, text, untrained
        self._members: Members | None = None  # those with whom rounds go on if a rank is lost
        self._finished = 0  # rounds whose means this rank has, landed or not
        self.landed = self.ranks = self.refusals = self.lost_steps = 0
        self.exposed_seconds = 0.0

    def meet_in(self, lane: Lane, members: Members | None) -> None:
        """Begin rounds with the ranks of a lane.

        Args:
            members: those who go on when one of them is lost; None where that ends the training.
        """
        self.lane, self._members = lane, members
        lane.is_watched = members is not None

    @property
    @abstractmethod
    def steps(self) -> int:
        """Inner steps of this rank."""

    def check_start(self, optimized: Iterable[Tensor], is_loaded: bool) -> None:
        """Before the first step look for what has changed since attach, see `Anchors.check_start`."""
        self.anchors.check_start(optimized, is_loaded)

    def check_outside(self, call: str) -> None:
        """Raise ThinwireError inside of `swapped`, where parameters are not those of this rank, or if it was forked."""
        if self.lane.is_forked:
            self.lane.check(call)
        if self.anchors.are_swapped:
            raise ThinwireError(f"{call} inside of global_parameters(), where the model has the anchors: go outside")

    def before_step(self) -> None:
        """Anchor parameters that are trained from now on."""
        self.check_outside("a step")
        self.anchors.adopt()

    @abstractmethod
    def after_step(self) -> None:
        """Count an inner step, and land what is there.

        Raises:
            ThinwireError: a round has failed; parameters stay as they are. It surfaces once.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """End all rounds now; afterwards all ranks have the same parameters. All ranks call it."""

    @abstractmethod
    def land_all(self) -> None:
        """Land what is in flight, before the end."""

    @abstractmethod
    def swapped(self) -> AbstractContextManager[None]:
        """Give the model the anchors, and its own parameters back at the end; no step may be made inside."""

    def still(self) -> AbstractContextManager[None]:
        """Return a context in which the state of this rank changes only by its own calls."""
        return nullcontext()

    def stopped(self) -> AbstractContextManager[None]:
        """Return a context without rounds on any rank, all of which call it."""
        return nullcontext()

    def drop(self) -> None:  # noqa: B027  most begin none by themselves
        """Begin no more rounds."""

    @property
    def rank(self) -> int:
        return self.lane.rank

    @property
    def world_size(self) -> int:
        return self.lane.world_size

    def submit(self, job: Callable[[Lane], T]) -> Future[T]:
        """Run a job of all ranks on the lane, between two rounds."""
        with self.stopped():
            return self.lane.submit(job)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, in `still`."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot restore the state."""
        self.anchors.check_state(state)

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `check_state` has accepted, in `stopped`."""

    def enter(self, lane: Lane, roll: Roll) -> None:
        """Begin with the ranks of a lane, as a job of it, while the thread of training waits."""
        is_new = lane.rank in roll.new
        self._settle(-1 if is_new else roll.done)
        self._finished = roll.done
        self.averager.moved_to(lane)
        agree(lane, self._text, self.averager)
        if not roll.new:
            return
        is_source = lane.rank == roll.source
        mine = {**self._passed_on(roll.done), "untrained": self._untrained()} if is_source else {}
        state = hand_over(lane, roll, mine)
        lane.channel(Subject("state of new ranks", self._misfit(state) if is_new else FITS)).open()
        if is_new:
            untrained = self._untrained()
            for name in untrained.keys() & state["untrained"].keys():
                untrained[name].detach().copy_(state["untrained"][name])
            self._take(state, roll.began)

    def _misfit(self, state: Mapping[str, Any]) -> str:
        """Return what this rank, a new one, cannot take of the state of another; all have to learn it at once."""
        mine, given = self.anchors.state_dict(), {**state["untrained"], **state["anchors"]}
        wrong = mine["anchors"].keys() - state["anchors"].keys() | mine["buffers"].keys() ^ state["buffers"].keys()
        here = {**self._untrained(), **mine["anchors"]}
        wrong |= {name for name, one in here.items() if name not in given or given[name].shape != one.shape}
        return f"{min(wrong)} is missing, frozen, not finite or of another shape on one side only" if wrong else FITS

    @abstractmethod
    def _settle(self, done: int) -> None:
        """Keep what all ranks have finished, so many rounds, and take back what they have not."""

    @abstractmethod
    def _passed_on(self, done: int) -> dict[str, Any]:
        """Return the state that newcomers take after so many rounds."""

    @abstractmethod
    def _take(self, state: Mapping[str, Any], began: bool) -> None:
        """Go on from the anchors of another rank, with no steps that count.

        Args:
            began: whether it has trained.
        """

    def _average(
        self,
        lane: Lane,
        differences: Mapping[str, Tensor],
        steps: int,
        buffers: Sequence[Tensor],
        flag: int,
        keep: Callable[[RoundReport], None],
        is_exact: bool = False,
    ) -> RoundReport:
        """Average on all ranks; ``keep`` notes the means before it is known whether all ranks have them."""
        flag |= ASKED * (self._members is not None and self._members.asked(lane))
        report = self.averager.mean(lane, differences, steps, buffers, flag, is_exact)
        keep(report)
        if self._members is not None:  # who passes this knows that all have the means
            with self.averager.booking(lane, 0):
                lane.channel(Subject(f"the end of round {self._finished}", "")).open()
        return report

    def _go_on(self, error: Exception | None = None) -> None:
        """Let in who asked, or after an error go on with who is left; raise it if there are no others."""
        if self._members is not None:
            self.lane = self._members.go_on(self.lane, lambda: self._finished, error)
        elif error is not None:
            raise error

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what training waits for."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.exposed_seconds += time.perf_counter() - started


def agree(lane: Lane, text: str, averager: Averager) -> None:
    """Raise MismatchError on all ranks unless they run the same."""
    same_bits = f"torch.use_deterministic_algorithms({torch.are_deterministic_algorithms_enabled()})"
    with lane.setting_up():
        lane.channel(Subject("attach", "\n".join([text, same_bits, *averager.describe()]))).open()
