"""Notices that an exception ended a backward pass, on which peers would wait for gradients that never come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.autograd import Variable

from thinwire.errors import ranks_told
from thinwire.hooks.backward import tensors_of
from thinwire.lane import Lane

REASON = "an exception ended a backward pass of rank {rank} before all its gradients were there"


class Guard:
    """Breaks the lane off when a backward pass that ranks make together ends by an exception.

    Autograd calls back at the end of a pass. After an exception it drops the callback uncalled, whatever raised: a hook
    of the user, a function of torch, or Ctrl-C.

    Args:
        lane: that peers wait on.
        waits_from_output: whether they wait for a pass as soon as it goes through the output of the model.
    """

    def __init__(self, lane: Lane, waits_from_output: bool = True) -> None:
        self._lane, self._waits_from_output = lane, waits_from_output
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
        for tensor in tensors_of(output) if self._waits_from_output else ():
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

    def check(self) -> None:
        """Raises ThinwireError where a step begins that cannot be synchronized any more."""
        self._lane.check("the gradients of this step")

    def _broke_off(self) -> None:
        if self._lane.world_size > 1:
            self._lane.break_off(REASON.format(rank=self._lane.rank))


class _Pass:
    def __init__(self, broke_off: Callable[[], None]) -> None:
        self._broke_off: Callable[[], None] | None = broke_off

    def __call__(self) -> None:
        self._broke_off = None

    def __del__(self) -> None:
        if self._broke_off is not None:
            self._broke_off()
