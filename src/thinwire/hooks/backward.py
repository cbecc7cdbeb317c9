"""The backward pass that a training script runs, with those that re-entrant checkpointing runs inside of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable


class Backward:
    """Calls ``ended`` at the end of the backward pass that runs when `enter` is called.

    Autograd calls back at the end of the innermost pass. The outermost one goes through the output of the model before
    any other begins, so it is entered there if that is watched.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._callback: weakref.ref[partial[None]] | None = None
        self._task = -1

    @property
    def is_running(self) -> bool:
        """Whether the pass that was entered has not ended. Autograd drops the callback if an exception ends it."""
        return self._callback is not None and self._callback() is not None

    @property
    def is_nested(self) -> bool:
        """Whether this is called by another pass, inside of the one that was entered."""
        return self.is_running and self._task != torch._C._current_graph_task_id()

    def enter(self) -> bool:
        """Have ``ended`` called; whether a backward runs at all."""
        if not self.is_running:
            callback = partial(self._end)
            try:
                Variable._execution_engine.queue_callback(callback)
            except RuntimeError:
                return False
            self._callback, self._task = weakref.ref(callback), torch._C._current_graph_task_id()
        return True

    def watch(self, output: object) -> None:
        """Enter the pass that goes through the output of a model first."""
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._on_output)

    def _on_output(self, gradients: tuple[Tensor, ...]) -> None:
        del gradients
        self.enter()

    def _end(self) -> None:
        self._callback = None
        self._ended()


def tensors_of(value: object) -> Iterator[Tensor]:
    """Those in what a module returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_of(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of(vars(value))
