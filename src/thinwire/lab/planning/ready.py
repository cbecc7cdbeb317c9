"""Measure training steps without synchronization: when each gradient is ready, and the time outside backward.

All ranks begin each step together, so that they share resources as in training; a time is that of the slowest
rank, because a gradient can be summed only when all ranks have it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.comm.agree import gather_numbers
from thinwire.comm.process_group import Exchange
from thinwire.compress.base import Parameter
from thinwire.lab.planning.codecs import GradientSample
from thinwire.observe.step import Clock, differences, median_of_slowest
from thinwire.sparse import Layout

_MAX_MARKS = 256 * 1024

WARM_STEPS = 3
"""Number of first steps that are not counted: they fill caches and allocators and touch memory first."""


@dataclass(frozen=True)
class Ready:
    """The times of one step, which is the median of those measured.

    Args:
        parameters: parameters that got gradients, in the order in which these are ready.
        backward_seconds: seconds of each from the gradient before it to its own. The first counts from the end of the
            model's forward, so it includes the loss.
        forward_seconds: seconds of the model's forward.
        rest_seconds: seconds from the last gradient to the next forward: optimizer, data, all else the script does.
    """

    parameters: tuple[Parameter, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float
    rest_seconds: float


class StepWatch:
    """A stopwatch of training steps, by hooks on the model until `close`. A step begins with its forward.

    Args:
        module: the model that trains; with DDP the module inside, or the DDP model itself with its module's names.
        trained: its parameters by name.
        begin: called before each step; returns when all ranks are there.
        tables: names of embedding tables among them: the rows of their gradients are recorded while steps warm up.
        samples: whether to sample the other gradients meanwhile; if not, `take` is for somebody who knows better when
            they are synchronized.

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
        self._clock = Clock(next((tensor.device for tensor in trained.values()), torch.device("cpu")))
        self._is_step = False
        self._steps: list[list[float]] = []
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

    def take(self, name: str, gradient: Tensor | None) -> None:
        """Sample a gradient as it is synchronized, while steps warm up, or until there is a sample."""
        if self.num_steps < WARM_STEPS or not self.sample.taken or self._sampled_step == self.num_steps:
            self._sampled_step = self.num_steps
            self.sample.take(name, gradient)

    def close(self) -> Tensor:
        """End the last step now, and remove the hooks.

        Returns:
            float64 [steps, 2 + parameters], without the first `WARM_STEPS`: seconds from the start of a step to the end
            of forward, to each gradient, and to the start of the next step.
        """
        self._end_step()
        for handle in self._handles:
            handle.remove()
        return torch.tensor(self._steps[WARM_STEPS:], dtype=torch.float64).view(-1, 2 + len(self.names))

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        del args
        if not (module.training and torch.is_grad_enabled()):
            return
        self._end_step()
        self._begin()
        self._is_step = True
        self._clock.begin()

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        del args, output
        if module.training and torch.is_grad_enabled():
            self._clock.start()

    def _after_accumulation(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._is_step:
                self._clock.ready(name)
                if name in self._tables and self.num_steps < WARM_STEPS and parameter.grad is not None:
                    self.rows[self.num_steps][name] = nonzero_rows(parameter.grad).cpu()
                    self.sparse |= {name} if parameter.grad.is_sparse else set()
                if self._samples:
                    self.take(name, parameter.grad)

        return hook

    def _end_step(self) -> None:
        """Record the step that ends; a forward without backward is no step."""
        was_step, self._is_step = self._is_step, False
        step = self._clock.finish()
        if was_step and step.ready:
            moments = (step.started, *(step.moment(name) for name in self.names), step.ended)
            self._steps.append([moment - step.began for moment in moments])


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


@dataclass(frozen=True)
class TouchedRows:
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
    found = []
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
        found.append(TouchedRows(mean, min(float(total), max(statistics.fmean(unions), *mean))))
    return found


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
    places = sorted(range(len(parameters)), key=lambda place: (ready[place], -place))
    backward = differences([ready[place] for place in places], forward)
    last = max(forward, *ready)
    return Ready(tuple(parameters[place] for place in places), backward, forward, max(0.0, end - last))
