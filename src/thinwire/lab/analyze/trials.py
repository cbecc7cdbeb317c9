"""Train a script for a few steps as advised, to see what a step takes: the script is not changed, its DDP model is."""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach
from thinwire.compress.named import parse
from thinwire.lab.analyze.failure import first_error, raised_by_script
from thinwire.lab.analyze.site import is_called_by_us, without_attach
from thinwire.lab.analyze.worker import run_as_main
from thinwire.lab.doctor.advice import Advice
from thinwire.lab.doctor.diagnosis import NOT_TRIED, Confirmed
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import Way, step_seconds
from thinwire.lab.testbed.launch import RanksFailed, preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork
from thinwire.lab.testbed.rank import RankContext
from thinwire.synchronizer import Synchronizer

WARM_STEPS = 6
"""Steps that do not count: "auto" measures the link in the first and may try schemes in the next few."""
LEAST_STEPS, MOST_STEPS = 5, 24
CLOSE = 1.25
"""Ratio to the shortest step up to which a way is tried twice, and its shorter step counts: what else the machine does
only adds to it. Two runs of one way differed by up to 20 % where other work came and went."""
_SECONDS = 6.0
"""Seconds for which a way is trained, as predicted, within these numbers of steps."""
_TIMEOUT_SECONDS = 600.0
BUDGET_SECONDS = 150.0
"""Time in which a diagnosis of a script should be done. No way is tried after that, but for stock DDP and the best."""
_LONG_SECONDS, _VERY_LONG_SECONDS = 1.0, 4.0
"""Steps that last longer are dominated by the network and alike: a few of them suffice."""


def counts(step_seconds: float) -> tuple[int, int]:
    """Return how many steps of a way warm up, and how many are timed then.

    Example:
        >>> counts(0.5), counts(2.0), counts(5.0)
        ((6, 12), (2, 3), (2, 2))
    """
    if step_seconds > _LONG_SECONDS:
        return 2, 2 if step_seconds > _VERY_LONG_SECONDS else 3
    return WARM_STEPS, max(LEAST_STEPS, min(MOST_STEPS, round(_SECONDS / max(step_seconds, 1e-6))))


def seconds_of_trial(step_seconds: float) -> float:
    """Return how long the steps of a trial last."""
    return (sum(counts(step_seconds)) + 1) * step_seconds


def try_script(
    script: Path,
    arguments: Sequence[str],
    advised: Sequence[tuple[Way, Advice]],
    measurement: Measurement,
    network: EmulatedNetwork | None,
    on_stage: Callable[[str], None] = lambda stage: None,
    deadline: float = math.inf,
) -> list[Confirmed]:
    """Run a script once for each way, on the ranks that were measured, and return what a step takes.

    The first way, and the best of the others by prediction, are tried in any case; the next ones while there is time.

    Args:
        advised: ways; the first is stock DDP.
        network: emulated hosts with one rank each; None for processes of this machine.
        deadline: ``time.monotonic()`` after which no trial should last.
    """
    rows: dict[str, Confirmed] = {}
    startup = 0.0  # seconds of a trial without its steps

    def run(way: Way, advice: Advice) -> None:
        nonlocal startup
        predicted, began = step_seconds(measurement, way), time.monotonic()
        on_stage(f"training steps: {way.name}")
        try:
            ranks = run_on_ranks(
                _try_rank,
                str(script),
                list(arguments),
                advice,
                world_size=measurement.world_size,
                network=network,
            )
            known = rows[way.name].measured_step_seconds if way.name in rows else None
            seconds = max(map(statistics.median, ranks))
            rows[way.name] = Confirmed(way.name, predicted, seconds if known is None else min(known, seconds))
            startup = max(0.0, time.monotonic() - began - seconds_of_trial(seconds))
        except RanksFailed as failed:
            if way.name not in rows:
                rows[way.name] = Confirmed(way.name, predicted, None, f"failed: {last_line(failed)}")

    def has_time(seconds: float) -> bool:
        return time.monotonic() + startup + seconds_of_trial(seconds) < deadline

    stock, *others = advised
    for place, (way, advice) in enumerate([stock, *sorted(others, key=lambda pair: pair[0].seconds)]):
        if place < 2 or has_time(step_seconds(measurement, way)):
            run(way, advice)
        else:
            rows[way.name] = Confirmed(way.name, step_seconds(measurement, way), None, NOT_TRIED)
    measured = [rows[way.name].measured_step_seconds for way, _ in advised]
    close = close_to_best(measured)
    for place in reversed(close if len(close) > 1 else []):
        if has_time(measured[place] or 0.0):
            run(*advised[place])
    return [rows[way.name] for way, _ in advised]


def close_to_best(seconds: Sequence[float | None]) -> list[int]:
    """Return the places of the times that are within `CLOSE` of the shortest one.

    Example:
        >>> close_to_best([1.0, None, 1.2, 1.5])
        [0, 2]
    """
    bound = CLOSE * min((value for value in seconds if value is not None), default=0.0)
    return [place for place, value in enumerate(seconds) if value is not None and value <= bound]


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    network: EmulatedNetwork | None,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run a function that runs a script, on ranks with the environment of torchrun, and return their values.

    Raises:
        RanksFailed: a rank failed; its traceback is in the text.
    """
    for module in ("torch._dynamo", "thinwire.lab.planning.training", __name__):
        preload(module)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that emulated hosts have no names
    outcomes = run_ranks(
        function,
        *args,
        world_size=world_size,
        ranks_per_host=None if network is None else 1,
        network=network,
        timeout_seconds=_TIMEOUT_SECONDS,
        init_process_group=False,
        on_message=on_message,
    )
    return [outcome.value for outcome in outcomes]


def last_line(failed: RanksFailed) -> str:
    """Return the last line of the first error, which names it."""
    if error := first_error(failed):
        return error[1].splitlines()[-1]
    lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no reason was given"])[0]


def torchrun_environment(context: RankContext) -> dict[str, str]:
    """Return what torchrun sets beyond what `run_ranks` does; some frameworks look for it."""
    return {
        "TORCHELASTIC_RUN_ID": "thinwire",
        "GROUP_RANK": str(context.host),
        "ROLE_RANK": str(context.rank),
        "ROLE_WORLD_SIZE": str(context.world_size),
    }


def silence() -> None:
    """Discard what this process prints from now on."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def _try_rank(context: RankContext, script: str, arguments: list[str], advice: Advice) -> list[float]:
    """Train on one rank; return the seconds of its steps."""
    os.environ.update(torchrun_environment(context))
    silence()  # the script has said it all when it was measured
    clock = StepClock(slowest)
    with raised_by_script(script), without_attach(), _advised(advice, clock):
        run_as_main(script, arguments, lambda: clock.is_done)
    clock.close()
    if len(clock.moments) < 3:
        raise ValueError(f"the script ended after {len(clock.moments)} training steps")
    warm = min(clock.warm, len(clock.moments) - 2)
    return [end - start for start, end in pairwise(clock.moments[warm:])]


class StepClock:
    """A clock that notes when each training step of a model begins, and ends the script after enough of them.

    How many are enough depends on how long the second one lasts on the slowest rank.

    Args:
        slowest: function that returns for the seconds of this rank those of the slowest; all ranks call it.

    Example:
        >>> clock, model = StepClock(lambda seconds: 2.0), nn.Linear(2, 1)
        >>> clock.watch(model)
        >>> for _ in range(5):
        ...     _ = model(torch.ones(1, 2))
        >>> len(clock.moments), clock.warm, clock.is_done
        (5, 2, False)
    """

    def __init__(self, slowest: Callable[[float], float]) -> None:
        self.moments: list[float] = []
        self.warm = WARM_STEPS
        self.synchronizer: Synchronizer | None = None
        self.is_watching = False
        self._steps = WARM_STEPS + MOST_STEPS
        self._slowest = slowest

    @property
    def is_done(self) -> bool:
        return len(self.moments) > self._steps

    def watch(self, model: nn.Module) -> None:
        """Watch a model; only the first counts."""
        self.is_watching = True
        model.register_forward_pre_hook(self._before_forward)

    def close(self) -> None:
        """End the synchronization, if the script has left its process group to us."""
        if self.synchronizer is not None:
            with contextlib.suppress(Exception):
                self.synchronizer.detach()

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        del args
        if not (module.training and torch.is_grad_enabled()):
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if len(self.moments) == 2:
            self.warm, timed = counts(self._slowest(time.perf_counter() - self.moments[1]))
            self._steps = self.warm + timed
        self.moments.append(time.perf_counter())
        if self.is_done:
            sys.exit(0)


def slowest(seconds: float) -> float:
    """Return the largest of the numbers of all ranks; a collective call."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    largest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


@contextmanager
def _advised(advice: Advice, clock: StepClock) -> Iterator[None]:
    """Follow the advice for the first DDP model that is built, as if its lines were in the script.

    Communication hooks of the script are left out.
    """
    build, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    @wraps(build)
    def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if clock.is_watching:
            build(model, *args, **kwargs)
            return
        if advice.plan is not None:
            kwargs.pop("bucket_cap_mb", None)
            kwargs["bucket_cap_mb_list"] = advice.plan.bucket_cap_mb_list()
        build(model, *args, **kwargs)
        clock.watch(model)
        if advice.attaches:
            clock.synchronizer = attach_as_advised(model, advice)

    @wraps(register)
    def register_comm_hook(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if is_called_by_us():
            register(model, *args, **kwargs)

    DistributedDataParallel.__init__ = init
    DistributedDataParallel.register_comm_hook = register_comm_hook
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = build
        DistributedDataParallel.register_comm_hook = register


def attach_as_advised(model: nn.Module, advice: Advice) -> Synchronizer:
    """Do what `thinwire.lab.doctor.advice.lines_of` says."""
    if advice.plan is not None:
        return attach(model, plan=advice.plan)
    arguments: dict[str, Any] = {} if advice.dense is None else {"dense": advice.dense}
    if advice.compressor is not None:
        arguments["compress"] = parse(advice.compressor)
    if advice.exchange is not None:
        arguments["exchange"] = advice.exchange
    return attach(model, **arguments)
