# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with text.
"""The communication hook of DistributedDataParallel: one per model for life, with a target that can change."""

from collections.abc import Callable
from copy import copy
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ThinwireError

OnBucket = Callable[[dist.GradBucket], Future[Tensor]]
_TAKEN = (
    "this DDP model has a communication hook already, and DDP takes only one: leave out register_comm_hook or"
    " thinwire.attach"
)


class _Dispatcher:
    """DDP takes one hook and never lets go of it, so this one forwards to a target, or does what stock DDP does.

    A copy of the model, which has a reducer of its own and no hook in it, carries torch's `allreduce_hook` on its list.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.__name__ = self.__qualname__ = "thinwire"  # DDP reads both
        self.process_group = process_group
        self.target: OnBucket | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., Future[Tensor]]:
        return allreduce_hook

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return copy, (allreduce_hook,)

    def __call__(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        del state
        if not isinstance(bucket, dist.GradBucket):
            raise ThinwireError(
                "DDP called the hook without a bucket, as it does under torch._dynamo.config.optimize_ddp ="
                ' "python_reducer": set it to "ddp_optimizer" or False'
            )
        if self.target is not None:
            return self.target(bucket)
        if bucket.buffer().is_sparse:
            return _stock_sparse(self.process_group, bucket.buffer())
        return allreduce_hook(self.process_group, bucket)


_dispatchers: WeakKeyDictionary[DistributedDataParallel, _Dispatcher] = WeakKeyDictionary()


def install(ddp: DistributedDataParallel, target: OnBucket) -> None:
    """Have ``target`` called with every gradient bucket of ``ddp``, in the order that all ranks share.

    Raises:
        ValueError: thinwire is attached to this model already, or another communication hook is registered.
    """
    if ddp not in _dispatchers:
        process_group = ddp.process_group
        assert isinstance(process_group, dist.ProcessGroup)
        dispatcher = _Dispatcher(process_group)
        try:
            ddp.register_comm_hook(None, dispatcher)
        except RuntimeError as error:
            raise ValueError(f"{_TAKEN} ({str(error).splitlines()[0]})") from error
        _dispatchers[ddp] = dispatcher
    if _dispatchers[ddp].target is not None:
        raise ValueError("thinwire is attached to this model already: call detach() on its Synchronizer first")
    _dispatchers[ddp].target = target


def check_free(ddp: DistributedDataParallel) -> None:
    """Raises ValueError if another communication hook is registered, without registering one."""
    if ddp not in _dispatchers and ddp._comm_hooks:
        raise ValueError(_TAKEN)


def uninstall(ddp: DistributedDataParallel) -> None:
    """Give the buckets of ``ddp`` back to what stock DDP does with them."""
    _dispatchers[ddp].target = None


def is_attached(ddp: DistributedDataParallel) -> bool:
    """Whether a target is installed."""
    return ddp in _dispatchers and _dispatchers[ddp].target is not None


def _stock_sparse(process_group: dist.ProcessGroup, gradient: Tensor) -> Future[Tensor]:
    work = dist.all_reduce(gradient, group=process_group, async_op=True)
    assert work is not None
    world_size = process_group.size()
    return work.get_future().then(lambda done: torch.div(done.value()[0], world_size))
