"""Train a script for a few steps as advised, to see what a step takes: the script is not changed, its DDP model is."""

import contextlib
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach
from thinwire.gradients.synchronizer import Synchronizer
from thinwire.lab.analyze.failure import first_error, leaving_on_error, raised_by_script
from thinwire.lab.analyze.site import is_called_by_us
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.doctor.advice import Advice, method
from thinwire.lab.doctor.diagnosis import NOT_TRIED, Confirmed, why_impossible
from thinwire.lab.harmless import harmless, without_attach
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import LOSSY_WORTH, Option, step_seconds
from thinwire.lab.planning.ready import StepBoundary, slowest
from thinwire.lab.testbed.launch import RanksFailed, preload, values_of_ranks
from thinwire.lab.testbed.network import EmulatedNetwork
from thinwire.lab.testbed.rank import RankContext

WARM_STEPS = 6
"""Steps that do not count: "auto" measures the link in the first and may try schemes in the next few."""
LEAST_STEPS, MOST_STEPS = 5, 24
CLOSE = 1.25
"""Ratio to the shortest step up to which an option is tried twice, and its shorter step counts: what else the machine
does only adds to it. Two runs of one way differed by up to 20 % where other work came and went."""
_SECONDS = 6.0
"""Seconds for which an option is trained, as predicted, within these numbers of steps."""
_TIMEOUT_SECONDS = 600.0
BUDGET_SECONDS = 150.0
"""Time in which a diagnosis of a script should be done. No way is tried after that, but for stock DDP and the best
exact one."""
_LONG_SECONDS, _VERY_LONG_SECONDS, _LONGEST_SECONDS = 1.0, 4.0, 10.0
"""Steps that last longer are dominated by the network and alike: a few of them suffice."""


def counts(step_seconds: float) -> tuple[int, int]:
    """Return how many steps of an option warm up, and how many are timed then.

    Example:
        >>> counts(0.5), counts(2.0), counts(5.0), counts(20.0)
        ((6, 12), (2, 3), (2, 2), (1, 1))
    """
    if step_seconds > _LONGEST_SECONDS:
        return 1, 1
    if step_seconds > _LONG_SECONDS:
        return 2, 2 if step_seconds > _VERY_LONG_SECONDS else 3
    return WARM_STEPS, max(LEAST_STEPS, min(MOST_STEPS, round(_SECONDS / max(step_seconds, 1e-6))))


def seconds_of_trial(step_seconds: float) -> float:
    """Return how long the steps of a trial last."""
    return (sum(counts(step_seconds)) + 1) * step_seconds


def try_script(
    script: Path,
    arguments: Sequence[str],
    advised: Sequence[tuple[Option, Advice]],
    measurement: Measurement,
    network: EmulatedNetwork | None,
    on_stage: Callable[[str], None] = lambda stage: None,
    deadline: float = math.inf,
) -> list[Confirmed]:
    """Run a script once for each option, on the ranks that were measured, and return what a step takes.

    Args:
        advised: options, in the order of `finalists`: stock DDP, the best exact one, and so on.
        network: emulated hosts with one rank each; None for processes of this machine.
        deadline: ``time.monotonic()`` after which no trial should last.
    """

    def train(advice: Advice, predicted: float) -> list[list[float]]:
        where = {"world_size": measurement.world_size, "network": network}
        return run_on_ranks(_try_rank, str(script), list(arguments), advice, measurement.synchronizations, **where)

    return try_each(train, advised, measurement, on_stage, deadline)


def try_each(
    train: Callable[[Advice, float], list[list[float]]],
    advised: Sequence[tuple[Option, Advice]],
    measurement: Measurement,
    on_stage: Callable[[str], None],
    deadline: float,
) -> list[Confirmed]:
    """Train as each option says, and return what a step takes; one that fails ends no other.

    The first two options are tried in any case, the next ones in their order while there is time: where it ends with
    one, no later one is tried. A step that cannot be is measured twice, if there is time.

    Args:
        train: trains on all ranks, given the advice and the predicted step, and returns the seconds of their steps.
    """
    rows: dict[str, Confirmed] = {}
    startup = 0.0  # seconds of a trial without its steps

    def run(option: Option, advice: Advice) -> None:
        nonlocal startup
        predicted, began = step_seconds(measurement, option), time.monotonic()
        on_stage(f"training steps: {option.name}")
        try:
            seconds = max(map(statistics.median, train(advice, predicted)))
            known = rows[option.name].measured_step_seconds if option.name in rows else None
            rows[option.name] = Confirmed(option.name, predicted, seconds if known is None else min(known, seconds))
            startup = max(0.0, time.monotonic() - began - seconds_of_trial(seconds))
        except RanksFailed as failed:
            if option.name not in rows:
                rows[option.name] = Confirmed(option.name, predicted, None, f"failed: {last_line(failed)}")

    def has_time(seconds: float) -> bool:
        return time.monotonic() + startup + seconds_of_trial(seconds) < deadline

    reason = ""
    for index, (option, advice) in enumerate(advised):
        predicted = step_seconds(measurement, option)
        if index >= 2 and not reason and not has_time(predicted):
            needed, left = startup + seconds_of_trial(predicted), max(0.0, deadline - time.monotonic())
            reason = f"{NOT_TRIED}: {needed:.0f} s were needed, and {left:.0f} s were left of {BUDGET_SECONDS:.0f} s"
        if reason:
            rows[option.name] = Confirmed(option.name, predicted, None, reason)
            continue
        run(option, advice)
        seconds = rows[option.name].measured_step_seconds
        if seconds is not None and why_impossible(rows[option.name], option, measurement) and has_time(seconds):
            run(option, advice)
    measured = [rows[option.name].measured_step_seconds for option, _ in advised]
    for index in reversed(undecided(measured, [option.is_exact for option, _ in advised])):
        if has_time(measured[index] or 0.0):
            run(*advised[index])
    return [rows[option.name] for option, _ in advised]


def undecided(seconds: Sequence[float | None], is_exact: Sequence[bool]) -> list[int]:
    """Return the indices of times that a second trial may order otherwise: those within `CLOSE` of the shortest one,
    and the best exact one where it is as near to `LOSSY_WORTH` times that.

    Example:
        >>> undecided([1.0, None, 1.2, 1.5], [True] * 4)
        [0, 2]
        >>> undecided([1.6, 1.5, 1.0, 1.3], [True, True, False, False])
        [1, 2]
    """
    known = {index: value for index, value in enumerate(seconds) if value is not None}
    shortest = min(known.values(), default=0.0)
    exact = min((known[index] for index in known if is_exact[index]), default=math.inf)
    bounds = CLOSE * shortest, CLOSE * LOSSY_WORTH * shortest
    near = [index for index, value in known.items() if value <= bounds[0] or value == exact <= bounds[1]]
    return near if len(near) > 1 else []


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int | None,
    network: EmulatedNetwork | None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
    **settings: Any,
) -> list[Any]:
    """Run a function that runs a script, on ranks with the environment of torchrun, and return their values.

    Without a ``world_size`` it runs as the rank that torchrun started this process as. Further settings are those of
    `values_of_ranks`.

    Raises:
        RanksFailed: a rank failed; its traceback is in the text.
    """
    for module in ("torch._dynamo", "thinwire.lab.planning.training", __name__):
        preload(module)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that emulated hosts have no names
    return values_of_ranks(
        function,
        *args,
        world_size=world_size,
        ranks_per_host=None if network is None else 1,
        network=network,
        timeout_seconds=timeout_seconds,
        init_process_group=False,
        **settings,
    )


def last_line(failed: RanksFailed) -> str:
    """Return the last line of the first error, which names it."""
    if error := first_error(failed):
        return error[1].splitlines()[-1]
    lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no reason was given"])[0]


def torchrun_environment(context: RankContext) -> dict[str, str]:
    """Return what torchrun sets beyond what `values_of_ranks` does; some frameworks look for it."""
    return {
        "TORCHELASTIC_RUN_ID": "thinwire",
        "GROUP_RANK": str(context.host),
        "ROLE_RANK": str(context.rank),
        "ROLE_WORLD_SIZE": str(context.world_size),
    }


def as_torchrun(context: RankContext) -> None:
    """Make this process a rank as torchrun starts it, but for what it prints."""
    for name, value in torchrun_environment(context).items():
        os.environ.setdefault(name, value)
    if context.rank == 0:
        os.dup2(2, 1)  # the script's output goes to standard error: standard output is for the JSON of the parent
    else:
        silence()  # of what all ranks print, such as a usage, once is enough


def silence() -> None:
    """Discard what this process prints from now on."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def _try_rank(
    context: RankContext, script: str, arguments: list[str], advice: Advice, synchronizations: int
) -> list[float]:
    """Train on one rank; return the seconds of its steps."""
    os.environ.update(torchrun_environment(context))
    silence()  # the script has said it all when it was measured
    ended = partial(leaving_on_error, context.leave, script)
    clock = StepClock(ended(slowest), lambda: context.leave(clock.seconds), synchronizations)
    with raised_by_script(script), harmless(), without_attach(), _advised(advice, clock, ended):
        run_as_main(script, arguments)
    clock.close()
    return clock.seconds()


class StepClock:
    """A clock that notes when each training step of a model begins, and ends the script after enough of them.

    A step has as many synchronized backwards as when the script was measured, so it ends on all ranks at once, even if
    one skips its optimizer's step. How many are enough depends on how long the second one lasts on the slowest rank.

    Args:
        slowest: returns the seconds of the slowest rank, given the seconds of this rank; all ranks call it.
        on_enough: ends the script.
        synchronizations: synchronized backwards of a step.

    Example:
        >>> clock, model = StepClock(lambda seconds: 2.0), nn.Linear(2, 1)
        >>> clock.watch(model)
        >>> for _ in range(5):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> len(clock.moments), clock.warm, len(clock.seconds())
        (5, 2, 2)
    """

    def __init__(
        self, slowest: Callable[[float], float], on_enough: Callable[[], object] = sys.exit, synchronizations: int = 1
    ) -> None:
        self.moments: list[float] = []
        self.warm = WARM_STEPS
        self.synchronizer: Synchronizer | None = None
        self.boundary: StepBoundary | None = None
        self._steps = WARM_STEPS + MOST_STEPS
        self._slowest, self._on_enough, self._synchronizations = slowest, on_enough, synchronizations

    def seconds(self) -> list[float]:
        """Return the seconds of the steps that count."""
        if len(self.moments) < 3:
            raise ValueError(f"the script ended after {len(self.moments)} training steps")
        return [end - start for start, end in pairwise(self.moments[min(self.warm, len(self.moments) - 2) :])]

    def watch(self, model: nn.Module) -> None:
        """Watch a model; only the first counts."""
        synchronizes = lambda: getattr(model, "require_backward_grad_sync", True)  # noqa: E731
        boundary = self.boundary = StepBoundary(synchronizes, self._synchronizations)

        def after_gradient(_: torch.Tensor) -> None:
            boundary.gradient()

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(after_gradient)
        model.register_forward_pre_hook(self._before_forward)

    def close(self) -> None:
        """End the synchronization, if the script has left its process group to us."""
        if self.synchronizer is not None:
            with contextlib.suppress(Exception):
                self.synchronizer.detach()

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if self.boundary is None or not (module.training and torch.is_grad_enabled() and self.boundary.forward()):
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if len(self.moments) == 2:
            self.warm, timed = counts(self._slowest(time.perf_counter() - self.moments[1]))
            self._steps = self.warm + timed
        self.moments.append(time.perf_counter())
        if len(self.moments) > self._steps:
            self._on_enough()


@contextmanager
def _advised(advice: Advice, clock: StepClock, ended: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Follow the advice for the first DDP model that is built, as if its lines were in the script.

    Communication hooks of the script are left out.

    Args:
        ended: returns a function whose errors end the script at once, see `leaving_on_error`.
    """
    backward = ended(torch.autograd.backward) if advice.dense else torch.autograd.backward
    build, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    @wraps(build)
    def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if clock.boundary is not None:
            build(model, *args, **kwargs)
            return
        if advice.plan is not None:
            kwargs.pop("bucket_cap_mb", None)
            kwargs["bucket_cap_mb_list"] = advice.plan.bucket_cap_mb_list()
        build(model, *args, **kwargs)
        clock.watch(model)
        if advice.dense:
            clock.synchronizer = ended(attach_as_advised)(model, advice)

    @wraps(register)
    def register_comm_hook(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if is_called_by_us():
            register(model, *args, **kwargs)

    with (
        mock.patch.multiple(DistributedDataParallel, __init__=init, register_comm_hook=register_comm_hook),
        mock.patch.object(torch.autograd, "backward", backward),
    ):
        yield


def attach_as_advised(model: nn.Module, advice: Advice) -> Synchronizer:
    """Do what `thinwire.lab.doctor.advice.lines_of` says."""
    return attach(model, dense=advice.plan or method(str(advice.dense)))
