"""Where gradients come from and how they get back: what DDP's buckets and hooks on parameters have in common."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ThinwireError
from thinwire.hooks import ddp
from thinwire.hooks.buckets import Buckets, Pending
from thinwire.hooks.model import synchronized_parameters

logger = logging.getLogger("thinwire")


class Plug(Protocol):
    """What a `thinwire.Synchronizer` does with either."""

    @property
    def synchronizes(self) -> bool:
        """Whether the next backward pass is not one of `no_sync`."""
        ...

    @property
    def begins_at_output(self) -> bool:
        """Whether a step is a backward through the output of the model, whatever passes run inside of it."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is synchronized, so that every backward ends a step."""
        ...

    def finish(self) -> float:
        """Submit what is left, at the end of backward; since when nothing is left to compute (`time.perf_counter`)."""
        ...

    def deliver(self) -> None:
        """Store what the lane brought, when all of it is there."""
        ...

    def reset(self) -> None:
        """Forget a backward that did not come to its end."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes in it stay on this rank, and add up until the next pass outside."""
        ...

    def remove(self) -> None:
        """Leave the model as it was."""
        ...


class Alone:
    """One rank has nothing to synchronize: gradients stay as backward made them, and only steps are counted."""

    def __init__(self, model: nn.Module) -> None:
        self._ddp = weakref.ref(model) if isinstance(model, DistributedDataParallel) else None
        self._accumulates = False
        self.begins_at_output = self.is_idle = True

    @property
    def synchronizes(self) -> bool:
        ddp = None if self._ddp is None else self._ddp()
        return not self._accumulates if ddp is None else ddp.require_backward_grad_sync

    def finish(self) -> float:
        return time.perf_counter()

    def deliver(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def no_sync(self) -> AbstractContextManager[None]:
        ddp = None if self._ddp is None else self._ddp()
        return self._accumulating() if ddp is None else ddp.no_sync()

    def remove(self) -> None:
        pass

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before


class DdpPlug:
    """The buckets of a DDP model, which stores their means itself, and which this object does not keep alive.

    Args:
        model: gets the communication hook.
        buckets: where its buckets go.
        begin: called with each bucket; whether a backward is running, at whose end `finish` and `deliver` are called.
        expect: called with what is to be waited for then.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        buckets: Buckets,
        begin: Callable[[], bool],
        expect: Callable[[Pending], None],
    ) -> None:
        self._weak_model, self._buckets, self._begin, self._expect = weakref.ref(model), buckets, begin, expect
        self.begins_at_output = self.is_idle = False  # DDP ends each pass by itself
        frozen = (parameter for _, parameter in synchronized_parameters(model) if not parameter.requires_grad)
        self._frozen = [weakref.ref(parameter) for parameter in frozen]
        ddp.install(model, self._on_bucket)

    @property
    def synchronizes(self) -> bool:
        return self._model.require_backward_grad_sync

    @property
    def _model(self) -> DistributedDataParallel:
        model = self._weak_model()
        assert model is not None, "its reducer calls the hook, and goes with it"
        return model

    def finish(self) -> float:
        self._buckets.flush()
        return time.perf_counter()

    def deliver(self) -> None:
        """DDP has stored all. It never looks at parameters again that were frozen when it was built."""
        if any(parameter.requires_grad for weak in self._frozen if (parameter := weak()) is not None):
            self._frozen = []
            text = (
                "parameters were unfrozen after DistributedDataParallel was built: it does not synchronize them, so the"
                " models of the ranks drift apart. Build it again after unfreezing, and attach the new one"
            )
            logger.warning("%s", text)
            warnings.warn(text, stacklevel=2)

    def reset(self) -> None:
        pass

    def no_sync(self) -> AbstractContextManager[None]:
        return self._model.no_sync()

    def remove(self) -> None:
        ddp.uninstall(self._model)
        self._buckets.flush()

    def _on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Called by DDP in backward for each bucket, in the same order on all ranks.

        Under ``model.join()`` also outside of backward, for ranks that ran out of data.

        Raises:
            ThinwireError: join was told to divide by the number of ranks that have data left. On all ranks, as all come
                here, those without data too.
        """
        if is_joining(self._model) and not self._model._divide_by_initial_world_size:
            raise ThinwireError(
                "join(divide_by_initial_world_size=False) divides by a number that DDP does not tell its hooks: call"
                " model.join() without it, or train this model without thinwire"
            )
        pending = self._buckets.add(bucket)
        if self._begin():
            self._expect(pending)
        return pending if isinstance(pending, Future) else pending.future()


def is_joining(model: nn.Module | None) -> bool:
    """Whether ranks may run out of data before others, under ``model.join()``: nothing else can be agreed on then."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))
