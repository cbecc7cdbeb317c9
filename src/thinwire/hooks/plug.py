"""Where gradients come from and how they get back: what DDP's buckets and hooks on parameters have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.hooks import ddp
from thinwire.hooks.buckets import Buckets, Pending
from thinwire.hooks.native import DenseBucket


class Plug(Protocol):
    """What a `thinwire.Synchronizer` does with either."""

    @property
    def synchronizes(self) -> bool:
        """Whether the next backward pass is not one of `no_sync`."""
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


class DdpPlug:
    """The buckets of a DDP model, which stores their means itself.

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
        self._model, self._buckets, self._begin, self._expect = model, buckets, begin, expect
        ddp.install(model, self._on_bucket)

    @property
    def synchronizes(self) -> bool:
        return self._model.require_backward_grad_sync

    def finish(self) -> float:
        self._buckets.flush()
        return time.perf_counter()

    def deliver(self) -> None:
        pass

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
        """
        pending = self._buckets.add(bucket)
        if self._begin():
            self._expect(pending)
        return pending.future() if isinstance(pending, DenseBucket) else pending
