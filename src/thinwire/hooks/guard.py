"""Notices that an exception ended a backward pass, on which peers would wait for gradients that never come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass

from torch import Tensor
from torch.autograd import Variable

from thinwire.errors import ranks_told
from thinwire.lane import Lane

REASON = "an exception ended a backward pass of rank {rank} before all its gradients were there"


class Guard:
    """Breaks the lane off when a backward pass that ranks make together ends by an exception.

    Autograd calls back at the end of a pass. After an exception it drops the callback uncalled, whatever raised: a hook
    of the user, a function of torch, or Ctrl-C.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._running: weakref.ref[_Pass] | None = None

    def enter(self) -> None:
        """A backward pass runs that peers wait for; nothing happens outside of one."""
        if self._running is None or self._running() is None:
            running = _Pass(self._broke_off)
            try:
                Variable._execution_engine.queue_callback(running)
            except RuntimeError:
                running()
            else:
                self._running = weakref.ref(running)

    def watch(self, output: object) -> None:
        """Enter the pass that goes through what the model returned: it may fail before there is any gradient."""
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self.enter())

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Around what is done when the pass has ended; ranks stay in step after errors that all of them raise."""
        try:
            yield
        except BaseException as error:
            if ranks_told(error) < self._lane.world_size:
                self._broke_off()
            raise

    def _broke_off(self) -> None:
        self._lane.break_off(REASON.format(rank=self._lane.rank))


class _Pass:
    def __init__(self, broke_off: Callable[[], None]) -> None:
        self._broke_off: Callable[[], None] | None = broke_off

    def __call__(self) -> None:
        self._broke_off = None

    def __del__(self) -> None:
        if self._broke_off is not None:
            self._broke_off()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(vars(value))
