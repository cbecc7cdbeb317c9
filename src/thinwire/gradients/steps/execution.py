"""Follow a plan or a fusion policy while it holds: measure, regroup, watch, plan again, fall back.

Every decision follows from numbers that all ranks have gathered, and from counts of steps, so all ranks decide
the same at the end of the same step.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.errors import logger, warn
from thinwire.gradients.ddp import are_same
from thinwire.gradients.steps.fit import Measured
from thinwire.gradients.steps.grouping import Following, Intent, regrouped
from thinwire.observe.step import StepTimes
from thinwire.observe.trace import Event
from thinwire.plan.profile import Groups, Profile
from thinwire.plan.timeline import events, iteration_seconds
from thinwire.tune.playing import Playing
from thinwire.tune.trial import Trial

DRIFT = 0.1
"""Largest relative difference of measured and predicted seconds before the plan is made again."""

_MAX_PATIENCE = 16
PLAN, EXACT = "the plan", "exact synchronization"


class Execution:
    """Carries out an `Intent` on one rank. All ranks call `finish_step` after every synchronized backward.

    Args:
        lane: the lane that gathers measurements of all ranks.
        following: the groups and the compression that decisions change.
        formed: returns the buckets of DDP's last pass, by name of their parameters; none for a plain module.
    """

    _playing: Playing  # of the plan against exact synchronization, once that may be faster

    def __init__(
        self, intent: Intent, lane: Lane, following: Following, formed: Callable[[], Sequence[Sequence[str]]]
    ) -> None:
        self._intent, self._lane, self._following = intent, lane, following
        self._formed = formed
        self.profile: Profile | None = None
        self.replans = 0
        self.dropped = False
        self.measured_seconds = 0.0
        self.predicted_seconds = intent.predicted_seconds
        self._dense_seconds = intent.dense_seconds
        self._patience = 1
        self._reported = False
        self._compares_buckets = not following.can_regroup
        self._steps: list[StepTimes] = []
        self._to_skip = 0
        self.trial = Trial([EXACT])
        self._phase: Callable[[], None] = self._watch
        self._enter(self._watch if intent.groups is not None else self._measure)

    def finish_step(self, times: StepTimes) -> None:
        """Decide after a step; the next one may have other groups, or no compression."""
        formed = self._formed()
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        if self._compares_buckets:
            self._compares_buckets = False
            self._compare(formed)
        self._steps.append(times)
        self._phase()

    def stats(self) -> dict[str, float]:
        """Return the ``plan/`` entries of `Synchronizer.stats`."""
        return {
            "plan/groups": float(self._following.num_groups),
            "plan/replans": float(self.replans),
            "plan/dropped": float(self.dropped),
            "plan/predicted_seconds": self.predicted_seconds or 0.0,
            "plan/measured_seconds": self.measured_seconds,
        }

    def predicted_events(self) -> tuple[Event, ...]:
        """Return the events of a step predicted from the measured profile, or none if nothing was measured."""
        groups = None if self.profile is None else self._following.current()
        return () if self.profile is None or groups is None else events(self.profile, groups)

    def state_dict(self) -> dict[str, Any]:
        groups = self._following.groups
        return {
            "groups": None if groups is None else [list(group) for group in groups],
            "predicted_seconds": self.predicted_seconds,
            "dense_seconds": self._dense_seconds,
            "replans": self.replans,
            "dropped": self.dropped,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot restore the state."""
        groups = state["groups"]
        if groups is not None and sorted(name for group in groups for name in group) != sorted(self._intent.names):
            raise ValueError("the groups of the state are of other parameters than this model has")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups of the state and follow them; without any, they are measured again."""
        self.predicted_seconds, self._dense_seconds = state["predicted_seconds"], state["dense_seconds"]
        self.replans, self.dropped = int(state["replans"]), bool(state["dropped"])
        self._following.pause(False)  # as a test may have left it
        if self.dropped:
            self._following.follow(None)
            self._enter(self._rest)
        elif state["groups"] is not None:
            self._following.follow(tuple(map(tuple, state["groups"])))
            self._enter(self._watch)

    # --- phases

    def _enter(self, phase: Callable[[], None]) -> None:
        self._phase = phase if self._intent.is_watched else self._rest
        self._steps, self._to_skip = [], self._intent.pace.skipped_steps

    def _rest(self) -> None:
        """Drop the times of a step: nothing is watched any more."""
        self._steps.clear()

    def _measure(self) -> None:
        """Measure half of the steps in the present groups, then half with each gradient alone."""
        num_steps = self._intent.pace.measured_steps
        if len(self._steps) == num_steps:
            self._plan_again()
        elif len(self._steps) == num_steps // 2:
            self._following.send_alone()

    def _watch(self) -> None:
        if len(self._steps) < self._patience * self._intent.pace.window_steps:
            return
        self.measured_seconds = measured = self._typical_seconds()
        self._enter(self._watch)
        is_slow = self._dense_seconds is not None and measured > self._dense_seconds
        can_be_dropped = self._following.can_regroup or self._following.compresses  # else it is what is done anyhow
        if is_slow and can_be_dropped and not self._reported:
            self._enter(self._test)
            self._to_skip, pause, self.trial = 0, self._following.pause, Trial([PLAN, EXACT], gain=0.0)
            self._playing = Playing(self._lane.agree, "of a plan", self.trial, lambda arm, _: pause(arm == EXACT))
            self._playing.finish_step()  # which times steps from now on
        elif self._has_drifted(measured):
            self._drifted(measured)

    def _test(self) -> None:
        """Compare the plan with exact synchronization, in turn and on this machine now."""
        self._steps.clear()
        self._playing.finish_step()
        if not (trial := self.trial).is_settled:
            return
        self._following.pause(False)
        self._enter(self._watch)
        if trial.standing:
            self._report(trial.explain())
        else:
            self._log(
                f"a step takes {_ms(self.measured_seconds)}, and stock DDP was expected to take"
                f" {_ms(self._dense_seconds)}; but {trial.explain()}"
            )
            self._dense_seconds = self.measured_seconds

    # --- decisions

    def _has_drifted(self, measured: float) -> bool:
        predicted = self.predicted_seconds
        return predicted is not None and abs(measured - predicted) > DRIFT * predicted

    def _drifted(self, measured: float) -> None:
        text = f"a step takes {_ms(measured)} from the end of forward, and {_ms(self.predicted_seconds)} were planned"
        if self._following.can_regroup:
            self._log(f"{text}: measuring for a new plan")
            self._enter(self._measure)
            return
        self.predicted_seconds = measured
        self._warn(
            f"{text}. Groups cannot change under DDP: make a new plan with `thinwire plan --measure`, and build DDP"
            " with bucket_cap_mb_list=plan.bucket_cap_mb_list()"
        )

    def _compare(self, formed: Sequence[Sequence[str]]) -> None:
        """Warn if DDP's buckets differ from the plan, once its first passes have formed them."""
        buckets, groups = [bucket for bucket in formed if bucket], self._following.groups or ()
        if not are_same(buckets, groups):
            self._warn(
                f"DDP formed {len(buckets)} buckets that are not the {len(groups)} groups of the plan: its gradients"
                " became ready in another order than when the plan was made, or tables of embeddings are among them."
                " Make a plan with `thinwire plan --measure`, or attach the plain module, whose groups follow any plan"
            )

    def _plan_again(self) -> None:
        gradients, steps = self._following.gradients(), self._steps
        measured = Measured.of(gradients, steps)
        gathered = self._lane.agree("measured times", measured.numbers)
        profile, before = measured.profile(gathered), self._following.current()
        groups, name = regrouped(measured, profile, self._intent.policies, before)
        groups, self.predicted_seconds = self._agree_on_groups(groups, iteration_seconds(profile, groups))
        self.profile, is_first = profile, self._following.groups is None
        self._following.follow(tuple(tuple(gradients[number].name for number in group) for group in groups))
        was = f", {_ms(iteration_seconds(profile, before))} in {len(before)} groups before" if before else ""
        self._log(
            f"measured {len(steps)} steps; gradients now travel in {len(groups)} groups by {name}: expected are"
            f" {_ms(self.predicted_seconds)} from the end of forward{was}. Groups decide about the last bits of sums:"
            " a plan, and the state of a run, pin them"
        )
        self._enter(self._watch)
        if not is_first:
            self.replans += 1
            if groups == before:  # the model errs, and not the plan
                self.predicted_seconds = self.measured_seconds
                self._patience = min(2 * self._patience, _MAX_PATIENCE)

    def _agree_on_groups(self, groups: Groups, seconds: float) -> tuple[Groups, float]:
        """Broadcast the groups of rank 0: libraries of linear algebra may differ in the last bit."""
        subject = Subject("new groups", f"of {sum(map(len, groups))} gradients")
        groups, seconds = self._lane.submit(lambda lane: lane.channel(subject).broadcast([groups, seconds])).wait()
        return tuple(map(tuple, groups)), seconds

    def _report(self, reason: str) -> None:
        """Report a plan that does not pay, once, and drop it if fallback is on."""
        self._reported = True
        text = f"the plan is slower than exact synchronization ({reason})"
        if not self._intent.fallback:
            self._warn(f"{text}. Make a new one, or have it dropped by dataclasses.replace(plan, fallback=True)")
            return
        self.dropped = True
        left = self._following.drop()
        self._enter(self._rest)
        self._warn(f"{text}. It is dropped: synchronization is exact from now on{left}")

    def _typical_seconds(self) -> float:
        """Return the median step over steps and ranks, which is the same on all ranks."""
        mine = statistics.median(step.seconds for step in self._steps)
        return statistics.median(seconds for (seconds,) in self._lane.agree("seconds of a step", [mine]))

    def _log(self, text: str) -> None:
        if self._lane.rank == 0:
            logger.info("%s", text)

    def _warn(self, text: str) -> None:
        if self._lane.rank == 0:
            warn(text)


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1e3 * seconds:.1f} ms"
