"""Where a step begins and ends: after the forward of the model, and at the end of its backward."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.hooks.clock import Clock
from thinwire.hooks.guard import Guard
from thinwire.hooks.plug import Plug

logger = logging.getLogger("thinwire")


class Passes:
    """The forward and backward passes of a model.

    Args:
        model: gets hooks on its forward, with `watch`.
        clock: is told when its forward has ended.
        finish: called at the end of each backward pass in which `begin` was called. It counts ``steps``.
    """

    def __init__(self, model: nn.Module, clock: Clock, finish: Callable[[], None]) -> None:
        self._model, self._clock, self._finish = model, clock, finish
        self.steps = 0
        self._forwards = 0
        self._began = False
        self._plug: Plug | None = None
        self._guard: Guard | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def are_watched(self) -> bool:
        return bool(self._handles)

    def watch(self, plug: Plug, guard: Guard) -> None:
        self._plug, self._guard = plug, guard
        self._handles = [
            self._model.register_forward_pre_hook(self._before_forward),
            self._model.register_forward_hook(self._after_forward),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> bool:
        """Have ``finish`` called at the end of the running backward; whether there is one."""
        assert self._guard is not None
        self._guard.enter()
        if not self._began:
            try:
                Variable._execution_engine.queue_callback(self._end_backward)
            except RuntimeError:
                return False
            self._began = True
        return True

    def _end_backward(self) -> None:
        self._began = False
        assert self._guard is not None
        with self._guard.finishing():
            self._finish()

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Warn when a whole step went by without the hook: then stock DDP, or nobody, reduced the gradients."""
        del module, args
        synchronizes = not isinstance(self._model, DistributedDataParallel) or self._model.require_backward_grad_sync
        if not (self._model.training and torch.is_grad_enabled() and synchronizes):
            return
        if self._began:  # the last backward was broken off by an exception
            assert self._plug is not None
            self._began = False
            self._plug.reset()
            self._clock.reset()
        self._forwards += 1
        if self._forwards == 2 and self.steps == 0 and isinstance(self._model, DistributedDataParallel):
            text = (
                "thinwire is attached, but a forward pass went by and its hook was not called: gradients are not"
                " synchronized by thinwire. Call the DDP model itself (not model.module), and run backward."
            )
            logger.warning(text)
            warnings.warn(text, stacklevel=3)

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Backward begins now, as far as anybody but the training script knows."""
        del args
        assert self._plug is not None
        assert self._guard is not None
        if not (torch.is_grad_enabled() and self._plug.synchronizes):
            return
        if module.training:
            self._clock.start()
        if not torch.compiler.is_compiling():
            self._guard.watch(output)
