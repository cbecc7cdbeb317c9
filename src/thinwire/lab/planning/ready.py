"""Measure training steps without synchronization: when each gradient is ready, and the time outside backward.

All ranks begin each step together, so that they share resources as in training; a time is that of the slowest
rank, because a gradient can be summed only when all ranks have it.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.comm.agree import gather_numbers
from thinwire.comm.process_group import Exchange
from thinwire.compress.base import Parameter
from thinwire.lab.planning.codecs import GradientSample, settle
from thinwire.observe.step import Clock, StepTimes, differences, median_of_slowest
from thinwire.rows.sparse import Layout

_MAX_MARKS = 256 * 1024

WARM_STEPS = 3
"""Number of first steps that are not counted: they fill caches and allocators and touch memory first."""


class DeviceClock(Clock):
    """A clock of the device that computes: on a GPU the times of a step are taken on its stream."""

    def __init__(self, device: torch.device) -> None:
        self._is_of_gpu = device.type == "cuda"
        super().__init__(_recorded if self._is_of_gpu else time.perf_counter)

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient of the running step is ready."""
        return bool(self._step.ready)

    def finish(self) -> StepTimes:
        done = super().finish()
        return _settled(done) if self._is_of_gpu else done


def _recorded() -> Any:
    """Record an event in the stream of the GPU."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _settled(step: StepTimes) -> StepTimes:
    """Return the times of events in seconds, when all of them have happened; the first one is 0."""
    torch.cuda.synchronize()
    first: Any = step.began or step.started

    def seconds(event: Any) -> float:
        return first.elapsed_time(event) * 1e-3 if event else 0.0

    ready = {name: seconds(event) for name, event in step.ready.items()}
    return StepTimes(0.0, seconds(step.started), ready, step.jobs, seconds(step.ended))


_PATIENCE = 32
"""Synchronized backwards after which an optimizer that exists, but was never seen to step, is no longer waited for."""


@dataclass(frozen=True)
class Training:
    """A model with all that one training step of it needs.

    Args:
        model: a plain module, on its device; no DDP.
        batch: makes the next batch of this rank.
        loss: computes from the model and a batch the scalar to call ``backward`` on.
        optimizer: None means SGD with momentum and a learning rate of 0.
        after_backward: called between ``backward`` and the optimizer's step, for clipping for example; or None.
    """

    model: nn.Module
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    after_backward: Callable[[nn.Module], object] | None = None

    def stepper(self, model: nn.Module | None = None) -> Callable[[], None]:
        """Return a function that trains one step, of ``model`` if that is wrapped around this one."""
        model = (model or self.model).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = self.optimizer or torch.optim.SGD(trained, lr=0.0, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            self.loss(model, self.batch()).backward()
            if self.after_backward is not None:
                self.after_backward(self.model)
            optimizer.step()

        return step

    def step_seconds(self, model: nn.Module | None, warm: int, timed: int) -> list[float]:
        """Train ``warm`` + ``timed`` steps, of ``model`` if that is wrapped around this one; return the latter's."""
        step, moments = self.stepper(model), []
        for _ in range(warm + timed + 1):
            moments.append(time.perf_counter())
            step()
            self.settle()
        return [end - start for start, end in pairwise(moments[warm:])]

    def settle(self) -> None:
        """Wait until the device has finished the work queued on it."""
        settle(next((parameter.device for parameter in self.model.parameters()), torch.device("cpu")))


@dataclass(frozen=True)
class Ready:
    """The times of one step, which is the median of those measured.

    Args:
        parameters: parameters that got gradients, in the order in which these are ready.
        backward_seconds: seconds of each from the gradient before it to its own, in one synchronized backward. The
            first counts from the end of the model's forward, so it includes the loss.
        forward_seconds: seconds of the model's forwards before synchronized backwards.
        rest_seconds: all other seconds of the step: batches that are only accumulated, optimizer, data, all else the
            script does.
    """

    parameters: tuple[Parameter, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float
    rest_seconds: float


class StepBoundary:
    """A watcher that says of each forward whether it begins a step, by the number of synchronized backwards.

    All ranks have these alike, and it does not matter which of them an optimizer follows: `OptimizerBoundary` learns
    their number.

    Args:
        synchronizes: returns whether the backward of a forward that begins now is synchronized; False under
            ``no_sync()``.
        every: synchronized backwards of a step.

    Example:
        >>> boundary = StepBoundary(lambda: True, every=2)
        >>> def micro_batch():
        ...     begins = boundary.forward()
        ...     _ = boundary.gradient()
        ...     return begins
        >>> micro_batch(), micro_batch(), micro_batch()
        (True, False, True)
    """

    def __init__(self, synchronizes: Callable[[], bool], every: int = 1) -> None:
        self._synchronizes, self._every = synchronizes, every
        self._is_first = True
        self._has_gradient = False  # since the last forward
        self._will_synchronize = False  # DDP prepares for it in any forward since the last backward
        self._synchronized = 0  # since the step began

    def ends(self) -> bool:
        """Return whether the step is complete, so that the next forward begins another one."""
        return self._synchronized >= self._every

    def forward(self) -> bool:
        """Note that a forward for training begins, and return whether it begins a step."""
        begins = self._is_first or self.ends()
        if begins:
            self._is_first, self._synchronized = False, 0
        self._will_synchronize = self._synchronizes() or (self._will_synchronize and not self._has_gradient)
        self._has_gradient = False
        return begins

    def gradient(self) -> bool:
        """Note that a gradient is ready, and return whether this backward is synchronized."""
        if self._will_synchronize and not self._has_gradient:
            self._synchronized += 1
        self._has_gradient = True
        return self._will_synchronize


class OptimizerBoundary(StepBoundary):
    """A `StepBoundary` by the steps of the model's optimizer: a step is what lies between two of them.

    torch calls one global hook after each ``Optimizer.step``: also after those that Accelerate, Lightning or a
    GradScaler wraps; one that a GradScaler skips is a step too. So accumulation, several forwards and several backwards
    a step need no rules of their own. Forwards alone cannot tell: a contrastive training has two a step. Nor can
    synchronized backwards: GradCache has many.
    While gradients are local, a script may skip on one rank what it makes on others, as where its norm is not finite.
    So ranks vote after each synchronized backward, and a step of any of them is one of all.
    Where no torch optimizer has the model's parameters, a step ends with each synchronized backward, and with an
    optimizer no step ends before one: ranks that step alone have not synchronized yet.

    Args:
        parameters: the model's trained parameters.
        synchronizes: see `StepBoundary`.
        vote: returns whether any rank says yes, given what this one says; all ranks call it.

    Attributes:
        optimizers: types of the optimizers that stepped these parameters, sorted.
        scaler: the variable by which one of them stepped with a scaler, ``scaler`` if it is none; empty without one.
    """

    scaler = ""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        synchronizes: Callable[[], bool] = lambda: True,
        vote: Callable[[bool], bool] = lambda ends: ends,
    ) -> None:
        super().__init__(synchronizes)
        self.optimizers: list[str] = []
        self._ids = {id(parameter) for parameter in parameters}
        self._vote = vote
        self._stepped = False  # since the step began
        self._waits: bool | None = None  # for an optimizer's step; None if it is not known yet
        self._handle = register_optimizer_step_post_hook(self._after_optimizer)
        self._scaled = mock.patch.object(torch.amp.GradScaler, "step", self._noting(torch.amp.GradScaler.step))
        self._scaled.start()

    def ends(self) -> bool:
        """Return whether the step is complete on any rank; all ranks call it after each synchronized backward."""
        if not (self._synchronized and self._has_gradient):
            return False
        ends = self._vote(self._stepped or not self._waits_for_optimizer())
        self._stepped = self._stepped and not ends
        return ends

    def close(self) -> None:
        """Remove the hooks."""
        self._handle.remove()
        self._scaled.stop()

    def _noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def noted(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = step(scaler, optimizer, *args, **kwargs)
            if self._is_ours(optimizer):
                self._stepped = self._waits = True
                seen = {**(frame := sys._getframe(1)).f_globals, **frame.f_locals}
                self.scaler = next((name for name, value in seen.items() if value is scaler), "scaler")
            return result

        return noted

    def _after_optimizer(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._is_ours(optimizer):
            self._stepped = self._waits = True
            names = [base.__name__ for base in type(optimizer).__mro__]
            name = "SGD" if "SGD" in names else names[0]
            self.optimizers = sorted({*self.optimizers, name})

    def _waits_for_optimizer(self) -> bool:
        if self._waits is None:
            self._waits = any(map(self._is_ours, living(Optimizer)))
        return self._waits and (bool(self.optimizers) or self._synchronized < _PATIENCE)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        groups = getattr(optimizer, "param_groups", ())
        return any(id(parameter) in self._ids for group in groups for parameter in group["params"])


def living(*types: type) -> list[Any]:
    """Return the objects of these types in this process. Their types are asked, because proxies answer for others."""
    if gc.get_freeze_count():
        gc.unfreeze()  # what a script has frozen is in no list
    return [entry for entry in gc.get_objects() if issubclass(type(entry), types)]


class StepWatch:
    """A stopwatch of training steps, by hooks on the model until `close`; `OptimizerBoundary` says where one ends.

    Args:
        module: the model that trains; with DDP the module inside, or the DDP model itself with its module's names.
        trained: its parameters by name.
        begin: called before each step; returns when all ranks are there.
        tables: names of embedding tables among them: the rows of their gradients are recorded while steps warm up.
        samples: whether to sample the other gradients meanwhile; if not, `take` is for somebody who knows better when
            they are synchronized.
        synchronizes: see `StepBoundary`.
        vote: see `OptimizerBoundary`.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> watch = StepWatch(module, dict(module.named_parameters()), lambda: None)
        >>> for _ in range(WARM_STEPS + 2):
        ...     module(torch.ones(1, 2)).sum().backward()
        >>> watch.close().shape  # steps, then forward, two gradients and the rest
        torch.Size([2, 4])
    """

    def __init__(
        self,
        module: nn.Module,
        trained: dict[str, Tensor],
        begin: Callable[[], None],
        tables: Collection[str] = (),
        samples: bool = True,
        synchronizes: Callable[[], bool] = lambda: True,
        vote: Callable[[bool], bool] = lambda ends: ends,
    ) -> None:
        self.names = tuple(trained)
        self.rows: list[dict[str, Tensor]] = [{} for _ in range(WARM_STEPS)]
        """Ids of the non-zero rows of each table in each of the first steps."""
        self.sparse: set[str] = set()
        """Names of tables whose gradients are sparse."""
        self.sample = GradientSample(trained, tables)
        """Chunks of the gradients of one of the first steps."""
        self._tables = frozenset(tables)
        self._samples, self._sampled_step = samples, -1
        self._begin = begin
        self._clock = DeviceClock(next((tensor.device for tensor in trained.values()), torch.device("cpu")))
        self._is_step = False
        self.boundary = OptimizerBoundary(trained.values(), synchronizes, vote)
        self._pass_synchronizes = False
        self._passes: list[tuple[StepTimes, bool]] = []
        self._steps: list[list[float]] = []
        self._counts: list[tuple[int, int]] = []
        self._handles = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
            *(
                tensor.register_post_accumulate_grad_hook(self._after_accumulation(name))
                for name, tensor in trained.items()
            ),
        ]

    @property
    def num_steps(self) -> int:
        """Number of complete steps."""
        return len(self._steps)

    @property
    def counts(self) -> tuple[int, int]:
        """Backwards of a step, and how many of them are synchronized; medians."""
        passes, synchronized = zip(*(self._counts[WARM_STEPS:] or [(1, 1)]), strict=True)
        return statistics.median_low(passes), statistics.median_low(synchronized)

    def take(self, name: str, gradient: Tensor | None) -> None:
        """Sample a gradient as it is synchronized, while steps warm up, or until there is a sample."""
        if self.num_steps < WARM_STEPS or not self.sample.taken or self._sampled_step == self.num_steps:
            self._sampled_step = self.num_steps
            self.sample.take(name, gradient)

    def close(self) -> Tensor:
        """End the last step now, if it is complete, and remove the hooks; a collective call, as `vote` is.

        Returns:
            float64 [steps, 2 + parameters], without the first `WARM_STEPS`: seconds from the start of a step to the end
            of forward, to each gradient, and to the start of the next step, as if the step were one synchronized
            backward: forwards of all such backwards are added, moments of gradients are means over them, and of the
            rest of the step all but one of the backwards are taken away.
        """
        self._end_pass()
        if self.boundary.ends():
            self._end_step()
        self.boundary.close()
        for handle in self._handles:
            handle.remove()
        return torch.tensor(self._steps[WARM_STEPS:], dtype=torch.float64).view(-1, 2 + len(self.names))

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if has_gradients := self._clock.has_gradients:
            self._end_pass()
        if self.boundary.forward():
            self._end_step()
            self._begin()
            self._is_step = True
            self._clock.begin()
        elif has_gradients:
            self._clock.begin()

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if module.training and torch.is_grad_enabled():
            self._clock.start()

    def _after_accumulation(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._is_step:
                self._clock.ready(name)
                self._pass_synchronizes = self.boundary.gradient()
                if not self._pass_synchronizes:
                    return
                if name in self._tables and self.num_steps < WARM_STEPS and parameter.grad is not None:
                    self.rows[self.num_steps][name] = nonzero_rows(parameter.grad).cpu()
                    self.sparse |= {name} if parameter.grad.is_sparse else set()
                if self._samples:
                    self.take(name, parameter.grad)

        return hook

    def _end_pass(self) -> None:
        self._passes.append((self._clock.finish(), self._pass_synchronizes))
        self._pass_synchronizes = False

    def _end_step(self) -> None:
        """Record the step that ends; a forward without backward is no step."""
        was_step, self._is_step = self._is_step, False
        passes, self._passes = [(times, synchronizes) for times, synchronizes in self._passes if times.ready], []
        synchronized = [times for times, synchronizes in passes if synchronizes]
        if not (was_step and synchronized):
            return
        forward = sum(times.started - times.began for times in synchronized)
        ready = [statistics.fmean(times.moment(name) - times.started for times in synchronized) for name in self.names]
        total = sum(times.ended - times.began for times, _ in passes)
        end = total - (len(synchronized) - 1) * max(ready)
        self._steps.append([forward, *(forward + seconds for seconds in ready), end])
        self._counts.append((len(passes), len(synchronized)))


def nonzero_rows(gradient: Tensor) -> Tensor:
    """Return the sorted unique ids, int64, of the rows named by a sparse gradient, or non-zero in a dense one."""
    gradient, layout = gradient.detach(), Layout.of(gradient)
    if gradient.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if layout.sparse_dim is None:
        return (gradient.reshape(layout.num_rows, -1) != 0).any(dim=1).nonzero().flatten()
    indices = gradient._indices()
    ids = indices[0]
    for dim in range(1, layout.sparse_dim):
        ids = ids * layout.shape[dim] + indices[dim]
    return ids.unique()


class TouchedRows(NamedTuple):
    """The rows of a table that a step touches, as means over steps: on each rank, and on all together."""

    held: tuple[float, ...]
    union: float


def agree_on_rows(exchange: Exchange, rows: Sequence[dict[str, Tensor]], num_rows: dict[str, int]) -> list[TouchedRows]:
    """Return the rows that all ranks touched, from those that each recorded; a collective call.

    Of tables of more than `_MAX_MARKS` rows, every k-th id is counted, so that no rank sends more than 2 MB a table.

    Args:
        rows: `StepWatch.rows`.
        num_rows: number of rows of each table, the same on all ranks.
    """
    touched = []
    for name, total in num_rows.items():
        every = -(-total // _MAX_MARKS)
        steps = [step.get(name, torch.empty(0, dtype=torch.int64)) for step in rows]
        held = gather_numbers(exchange, f"rows of {name}", [statistics.fmean(ids.numel() for ids in steps)])
        unions = []
        for ids in steps:
            marks = torch.zeros(-(-total // every), dtype=torch.float32)
            marks[ids[ids % every == 0] // every] = 1.0
            exchange.all_reduce(marks)
            unions.append(every * int(marks.count_nonzero()))
        mean = tuple(number for (number,) in held)
        touched.append(TouchedRows(mean, min(float(total), max(statistics.fmean(unions), *mean))))
    return touched


def agree(exchange: Exchange, times: Tensor, parameters: tuple[Parameter, ...]) -> Ready:
    """Return one step for all ranks, from the steps that each of them measured; a collective call.

    Args:
        times: step times as `StepWatch.close` returns them, of the same number of steps on all ranks.
        parameters: parameters in the order of its columns, the same on all ranks.

    Raises:
        ValueError: no step was measured.
    """
    if not len(times):
        raise ValueError(
            f"no training step was measured: at least {WARM_STEPS + 1} with forward and backward in training mode are"
            " needed"
        )
    gathered = gather_numbers(exchange, "step times", times.flatten().tolist())
    return typical(median_of_slowest(gathered, times.shape[1]), parameters)


def typical(moments: Sequence[float], parameters: tuple[Parameter, ...]) -> Ready:
    """Return the step with these 2 + parameters moments, its gradients in the order in which they are ready.

    Of gradients ready at the same moment the one registered last comes first, as in backward.
    """
    forward, *ready, end = moments
    order = sorted(range(len(parameters)), key=lambda index: (ready[index], -index))
    backward = differences([ready[index] for index in order], forward)
    last = max(forward, *ready)
    return Ready(tuple(parameters[index] for index in order), backward, forward, max(0.0, end - last))


def slowest(seconds: float) -> float:
    """Return the largest of the numbers of all ranks; a collective call."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    largest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
