"""Where gradients come from and how they get back: what DDP's buckets and hooks on parameters have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ThinwireError
from thinwire.hooks import ddp
from thinwire.hooks.buckets import Buckets


class Plug(Protocol):
    """What a `thinwire.Synchronizer` does with either."""

    @property
    def synchronizes(self) -> bool:
        """Whether the next backward pass is not one of `no_sync`."""
        ...

    def finish(self) -> None:
        """Submit what is left, at the end of backward."""
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
    """The buckets of a DDP model, which stores their means itself, and which this object does not keep alive.

    Args:
        model: gets the communication hook.
        buckets: where its buckets go.
        begin: called with each bucket; whether a backward is running, at whose end `finish` and `deliver` are called.
        expect: called with each future that is to be waited for then.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        buckets: Buckets,
        begin: Callable[[], bool],
        expect: Callable[[Future[Tensor]], None],
    ) -> None:
        self._weak_model, self._buckets, self._begin, self._expect = weakref.ref(model), buckets, begin, expect
        ddp.install(model, self._on_bucket)

    @property
    def synchronizes(self) -> bool:
        return self._model.require_backward_grad_sync

    @property
    def _model(self) -> DistributedDataParallel:
        model = self._weak_model()
        assert model is not None, "its reducer calls the hook, and goes with it"
        return model

    def finish(self) -> None:
        self._buckets.flush()

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

        Raises:
            ThinwireError: join was told to divide by the number of ranks that have data left. On all ranks, as all come
                here, those without data too.
        """
        if is_joining(self._model) and not self._model._divide_by_initial_world_size:
            raise ThinwireError(
                "join(divide_by_initial_world_size=False) divides by a number that DDP does not tell its hooks: call"
                " model.join() without it, or train this model without thinwire"
            )
        future = self._buckets.add(bucket)
        if self._begin():
            self._expect(future)
        return future


def is_joining(model: nn.Module | None) -> bool:
    """Whether ranks may run out of data before others, under ``model.join()``: nothing else can be agreed on then."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))
