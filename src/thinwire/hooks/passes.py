"""Where a step begins and ends: after the forward of the model, and at the end of its backward."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.hooks.backward import Backward
from thinwire.hooks.clock import Clock
from thinwire.hooks.plug import Plug

logger = logging.getLogger("thinwire")


class Passes:
    """The forward and backward passes of a model.

    Args:
        model: gets hooks on its forward, with `watch`.
        clock: is told when its forward has ended.
        finish: called at the end of each backward pass in which `begin` was called. It calls `count`.
    """

    def __init__(self, model: nn.Module, clock: Clock, finish: Callable[[], None]) -> None:
        self._model, self._clock, self._finish = model, clock, finish
        self.steps = 0
        self._forwards = 0
        self._seen = self._counted = 0  # forwards of any kind: so far, and when a step was counted last
        self._is_ddp = isinstance(model, DistributedDataParallel)
        self._began = False
        self._backward = Backward(self._end_backward)
        self._plug: Plug | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def are_watched(self) -> bool:
        return bool(self._handles)

    def watch(self, plug: Plug) -> None:
        self._plug = plug
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
        self._forget_broken_off()
        if not self._began:
            self._began = self._backward.enter()
        return self._began

    def is_nested(self) -> bool:
        """Whether re-entrant checkpointing runs a backward inside of the one at whose end ``finish`` is called."""
        return self._backward.is_nested

    def count(self) -> None:
        """A synchronized backward has ended.

        Under DDP re-entrant checkpointing ends several for one forward, of which the first counts.
        """
        if self._seen == 0 or not self._is_ddp or self._seen != self._counted:
            self.steps += 1
        self._counted = self._seen

    def _end_backward(self) -> None:
        began, self._began = self._began, False
        assert self._plug is not None
        if began or self._plug.is_idle:
            self._finish()

    def _forget_broken_off(self) -> None:
        """Forget a backward pass that an exception ended."""
        if self._began and not self._backward.is_running:
            assert self._plug is not None
            self._began = False
            self._plug.reset()
            self._clock.reset()

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Warn when a whole step went by without the hook: then stock DDP, or nobody, reduced the gradients."""
        del module, args
        self._seen += 1
        self._forget_broken_off()
        synchronizes = not self._is_ddp or self._model.require_backward_grad_sync
        if not (self._model.training and torch.is_grad_enabled() and synchronizes):
            return
        self._forwards += 1
        if self._forwards == 2 and self.steps == 0 and self._is_ddp:
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
        if not (torch.is_grad_enabled() and self._plug.synchronizes):
            return
        if module.training:
            self._clock.start()
        if self._plug.begins_at_output and not torch.compiler.is_compiling():
            self._backward.watch(output)
