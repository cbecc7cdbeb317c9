"""Rounds of ranks that are threads, one job at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.process_group import Staging
from thinwire.compress.assign import Dense
from thinwire.observe.step import ParameterRecords
from thinwire.outer import OuterRecipe
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import Averager, Entry
from thinwire.outer.shadow import ShadowRounds
from thinwire.outer.stepped import SteppedRounds
from threaded import LoopbackLane


@dataclass
class Lane(LoopbackLane):
    """Makes rounds in the background only when a test does."""

    timeout_seconds: float = 60.0
    is_watched: bool = False

    def check(self, subject: str) -> None:
        pass

    def submit(self, job: Callable[[Any], Any], before: Callable[[], None] | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            return super().submit(job) if before is None else future
        except OSError as error:
            future.set_exception(error)  # type: ignore[arg-type]
            return future


@dataclass
class Rank:
    """A matrix and a buffer under rounds, which steps move by what a test says."""

    network: LoopbackExchange
    recipe: OuterRecipe
    compress: Dense = "native"
    parameter: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.zeros(64, 64)))
    buffers: dict[str, Tensor] = field(default_factory=lambda: {"mean": torch.zeros(3)})

    def __post_init__(self) -> None:
        self.lane: Any = Lane(self.network)
        self.averager = Averager(
            self.lane, [Entry("matrix", self.parameter, False)], self.compress, "auto", ParameterRecords()
        )
        self.anchors = Anchors({"matrix": self.parameter}, self.recipe, lambda: self.buffers)
        parts = self.recipe, self.anchors, self.averager, self.lane, Staging(), "", dict
        self.rounds: Any = ShadowRounds(*parts) if self.recipe.in_background else SteppedRounds(*parts)
        self.rounds.meet_in(self.lane, None)

    @property
    def anchor(self) -> Tensor:
        return self.anchors.anchors["matrix"].detach().clone()

    @property
    def value(self) -> Tensor:
        return self.parameter.detach().clone()

    @torch.no_grad()
    def step(self, change: float = 1.0) -> None:
        self.rounds.before_step()
        self.parameter.add_(change)
        self.rounds.after_step()

    def saved(self) -> tuple[Tensor, dict[str, Any]]:
        return self.value, copy.deepcopy(self.rounds.state_dict())

    def again(self, saved: tuple[Tensor, dict[str, Any]]) -> Rank:
        """Another one, which goes on from there."""
        found = Rank(self.network, self.recipe, self.compress, nn.Parameter(saved[0].clone()))
        found.rounds.check_state(saved[1])
        found.rounds.load_state_dict(saved[1])
        return found


def on_ranks(function: Callable[[LoopbackExchange], None], world_size: int = 2) -> None:
    for outcome in run_ranks(world_size, lambda network: (function(network),)):
        outcome.get()
