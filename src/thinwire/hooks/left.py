"""A DDP model of which nothing is to be sent otherwise than DDP sends it: DDP does it, without a hook, and is watched.

A hook in Python costs, even if it does no more than DDP does: 20 buckets of 256 kB on two ranks of one machine take
7.7 ms by torch's own `allreduce_hook`, and 5.8 ms without one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.hooks import ddp
from thinwire.hooks.model import synchronized_parameters
from thinwire.hooks.native import NativeAllReduce
from thinwire.hooks.plug import DdpPlug
from thinwire.lane import Lane


class LeftToDdp:
    """Sees where the backward passes of a DDP model end, and books what DDP sends.

    Args:
        model: without a communication hook, which it keeps being.
        native: where bytes are booked.
        lane: where seconds are booked: those for which backward waits, as more is not seen.
        begin: has `finish` and `deliver` called, when DDP has waited for its buckets.
        hooked: makes of the model what sees each bucket, for `observe`.

    Raises:
        ValueError: another communication hook is registered.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        native: NativeAllReduce,
        lane: Lane,
        begin: Callable[[], object],
        hooked: Callable[[DistributedDataParallel], DdpPlug],
    ) -> None:
        ddp.check_free(model)
        self._weak_model = weakref.ref(model)
        self._native, self._lane, self._begin, self._hooked = native, lane, begin, hooked
        self.begins_at_output = self.is_idle = False
        self._seen: DdpPlug | None = None
        self._since: float | None = None  # nothing is left to compute in the running backward
        trained = [parameter for _, parameter in synchronized_parameters(model) if parameter.requires_grad]
        self._num_bytes = sum(parameter.nbytes for parameter in trained)
        self._handles = [_watched(parameter, self) for parameter in _always_used(model, trained)]

    @property
    def _model(self) -> DistributedDataParallel:
        model = self._weak_model()
        assert model is not None, "what calls this goes with the model"
        return model

    @property
    def synchronizes(self) -> bool:
        return self._model.require_backward_grad_sync

    def observe(self) -> None:
        """See each bucket from now on. What is sent stays the same, so not all ranks have to."""
        if self._seen is None:
            self._remove_hooks()
            self._seen = self._hooked(self._model)

    def finish(self) -> float:
        if self._seen is not None:
            return self._seen.finish()
        self._native.count(self._num_bytes)
        assert self._since is not None
        return self._since

    def deliver(self) -> None:
        if self._since is not None:
            self._lane.note_busy(self._since, time.perf_counter())
            self._since = None

    def reset(self) -> None:
        self._since = None

    def no_sync(self) -> AbstractContextManager[None]:
        return self._model.no_sync()

    def remove(self) -> None:
        self._remove_hooks()
        if self._seen is not None:
            self._seen.remove()

    def on_gradient(self) -> None:
        """DDP waits for its buckets in a callback that it queues when the last one is full: between these two."""
        if self._since is None and self.synchronizes:
            self._since = time.perf_counter()
            Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._since = time.perf_counter()
        self._begin()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _watched(parameter: nn.Parameter, left: LeftToDdp) -> RemovableHandle:
    """The hook must not hold what holds the parameter."""
    weak = weakref.ref(left)

    def hook(parameter: Tensor) -> None:
        del parameter
        alive = weak()
        if alive is not None:
            alive.on_gradient()

    return parameter.register_post_accumulate_grad_hook(hook)


def _always_used(model: DistributedDataParallel, trained: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
    """Enough that one of them gets a gradient in every backward: DDP insists on all, unless it is told otherwise."""
    return trained if model.find_unused_parameters or model.static_graph else trained[:1]
