"""Measure a training step without its synchronization: when each gradient is ready, and what is beside backward.

All ranks begin each step together, so that what they share is shared as in training; a time is that of the slowest
rank, because a gradient can be summed only when all ranks have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.compress.base import Parameter
from thinwire.sync.agree import gather_numbers
from thinwire.sync.exchange import Exchange

WARM_STEPS = 3
"""At the beginning, not counted: caches, allocators, the first touch of memory."""


@dataclass(frozen=True)
class Ready:
    """One step, the median of those measured.

    Args:
        parameters: that got gradients, in the order in which these are ready.
        backward_seconds: of each: from the gradient before it to its own. The first counts from the end of the model's
            forward, so the loss is in it.
        forward_seconds: of the model.
        rest_seconds: from the last gradient to the next forward: the optimizer, the data, whatever the script does.
    """

    parameters: tuple[Parameter, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float
    rest_seconds: float


class Clock:
    """Moments on the device that computes: of the host, or events in the stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all moments so far have come."""
        if self._cuda:
            torch.cuda.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) * 1e-3 if self._cuda else end - start


@dataclass
class _Step:
    start: Any
    forward: Any = None
    ready: dict[str, Any] = field(default_factory=dict)


class StepWatch:
    """Times the training steps of a model by hooks on it, until `close`. A step begins with its forward.

    Args:
        module: what trains; with DDP the module inside, or the DDP model itself with the names of its module.
        trained: its parameters by name.
        begin: called before each step; returns when all ranks are there.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> watch = StepWatch(module, dict(module.named_parameters()), lambda: None)
        >>> for _ in range(WARM_STEPS + 2):
        ...     module(torch.ones(1, 2)).sum().backward()
        >>> watch.close().shape  # steps, then forward, two gradients and the rest
        torch.Size([2, 4])
    """

    def __init__(self, module: nn.Module, trained: dict[str, Tensor], begin: Callable[[], None]) -> None:
        self.names = tuple(trained)
        self._begin = begin
        self._clock = Clock(next((tensor.device for tensor in trained.values()), torch.device("cpu")))
        self._step: _Step | None = None
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
        """That are complete."""
        return len(self._steps)

    def close(self) -> Tensor:
        """End the last step here, and take the hooks away.

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
        self._step = _Step(self._clock.now())

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        del module, args, output
        if self._step is not None and self._step.forward is None:
            self._step.forward = self._clock.now()

    def _after_accumulation(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            del parameter
            if self._step is not None:
                self._step.ready[name] = self._clock.now()

        return hook

    def _end_step(self) -> None:
        """A forward without backward is no step."""
        step, self._step = self._step, None
        if step is None or not step.ready:
            return
        end = self._clock.now()
        self._clock.settle()
        ready = {name: self._clock.seconds(step.start, moment) for name, moment in step.ready.items()}
        last = max(ready.values())  # of those that were not used, too: their zeros are sent at the end
        times = [ready.get(name, last) for name in self.names]
        self._steps.append(
            [self._clock.seconds(step.start, step.forward), *times, self._clock.seconds(step.start, end)]
        )


def agree(exchange: Exchange, times: Tensor, parameters: tuple[Parameter, ...]) -> Ready:
    """One step for all ranks, from what each of them has measured; a collective call.

    Args:
        times: as `StepWatch.close` gives them; as many steps on all ranks.
        parameters: in the order of its columns, the same on all ranks.

    Raises:
        ValueError: no step was measured.
    """
    if not len(times):
        raise ValueError(
            f"no training step was measured: at least {WARM_STEPS + 1} with forward and backward in training mode are"
            " needed"
        )
    gathered = gather_numbers(exchange, "step times", times.flatten().tolist())
    slowest = torch.tensor(gathered, dtype=torch.float64).view(-1, *times.shape).amax(0)
    return typical(slowest, parameters)


def typical(times: Tensor, parameters: tuple[Parameter, ...]) -> Ready:
    """The median step of float64 [steps, 2 + parameters], and the order in which its gradients are ready.

    Of gradients that are ready at the same moment the one registered last comes first, as backward has it.
    """
    forward, *ready, end = times.median(0).values.tolist()
    places = sorted(range(len(parameters)), key=lambda place: (ready[place], -place))
    moments = [max(forward, ready[place]) for place in places]
    backward = [late - early for early, late in zip([forward, *moments[:-1]], moments, strict=True)]
    return Ready(tuple(parameters[place] for place in places), tuple(backward), forward, max(0.0, end - moments[-1]))
